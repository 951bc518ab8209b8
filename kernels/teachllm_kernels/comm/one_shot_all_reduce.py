"""One-shot all-reduce: each of several GPUs writes its part straight into the memory of the others, and all add up.

A ring of n GPUs sends the fewest bytes, in 2 (n - 1) steps that wait for each other. A decode's row of 4,096 elements
takes 20 ns to send, and a step takes microseconds: so here every rank sends its whole part to all others at once, and
adds up what arrived. Two GPUs send no more than in a ring.

    rank 0's buffer    slot 0   from 1 | from 2 | ...        Each sender fills its own place in a slot, without a flag:
                       slot 1   from 1 | from 2 | ...        a place is empty as long as it holds a -0.0, which is
                       slot 2   from 1 | from 2 | ...        never sent (0.0 is sent instead), and the reader waits.

A sum takes the next slot and empties the one before. Two slots would be too few: while this rank still reads its slot,
another rank that has all its parts may already send for the next sum. It cannot send for the sum after that: for this
it needs what this rank sends in the next sum, and by then the slot is empty again. Each row has its own slot counter,
since a sum may have any number of rows; all ranks make the same sums in the same order.

All ranks add up in the order of ranks, so all get the same bits. A rank that waits for a missing rank waits for
ever, as in any collective: whatever supervises the ranks must end it.

Source: TensorRT-LLM's one-shot all-reduce, which calls this way of waiting Lamport's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, tl, triton

NUM_SLOTS = 3
_SLOTS = tl.constexpr(NUM_SLOTS)
_WORDS = {2: torch.int16, 4: torch.int32}  # the same bits as integers


class SymmetricBuffer:
    """One rank's receive buffer and its addresses of all other ranks' buffers.

    Args:
        rank: this rank's number.
        buffers: every rank's buffer, by rank: [NUM_SLOTS, num_ranks, num_rows, size], elements of 2 or 4 bytes, all
            -0.0. This rank can write to all of them; its own is on its own device. Their memory must not move.
        owner: the owner of the other ranks' memory, if the tensors are not.

    Attributes:
        rank, num_ranks: as above.
        num_rows, size: the most rows per sum, and their length.
        dtype: dtype of the elements.
    """

    def __init__(self, rank: int, buffers: Sequence[torch.Tensor], owner: object = None) -> None:
        own = buffers[rank]
        _, self.num_ranks, self.num_rows, self.size = own.shape
        self.rank, self.dtype = rank, own.dtype
        assert own.shape[0] == NUM_SLOTS and self.num_ranks == len(buffers)
        assert self.size * own.element_size() % 16 == 0, "rows begin where 16 bytes can be read at once"
        self._buffers, self._owner = list(buffers), owner  # kept alive: the kernel has only their addresses
        self._own = own.view(_WORDS[own.element_size()])
        self._addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], device=own.device)
        self._slots = torch.zeros(self.num_rows, dtype=torch.int32, device=own.device)  # the next slot of each row

    def takes(self, y: torch.Tensor) -> bool:
        """Return whether y can be summed through this symmetric buffer."""
        return y.dim() == 2 and len(y) <= self.num_rows and y.shape[1] == self.size and y.dtype == self.dtype

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """The arguments of `sum_over_ranks` in a kernel: addresses, buffer, slots, num_buffer_rows."""
        return self._addresses, self._own, self._slots, self.num_rows


class DeferredAllReduce(NamedTuple):
    """A deferred sum over ranks: the operation that reads it adds the parts up; this rank holds its own part.

    Attributes:
        part: [num_rows, size], which the symmetric buffer takes.
    """

    part: torch.Tensor
    symmetric_buffer: SymmetricBuffer

    def sum(self) -> torch.Tensor:
        """Return the sum, [num_rows, size]."""
        return one_shot_all_reduce(self.part, self.symmetric_buffer)


@triton.jit
def sum_over_ranks(
    own,
    addresses_ptr, buffer_ptr, slots_ptr,
    row, column, inside, num_buffer_rows, size,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr,
):  # fmt: skip
    """Return a row of the sum, in float32.

    Args:
        own: [BLOCK] of this rank's part.
        addresses_ptr, buffer_ptr, slots_ptr, num_buffer_rows: from a `SymmetricBuffer`.
        row, column, inside: the row, and [BLOCK] its columns and whether they exist.
    """
    WORD: tl.constexpr = buffer_ptr.dtype.element_ty
    EMPTY: tl.constexpr = -(1 << (WORD.primitive_bitwidth - 1))  # the bits of -0.0
    # Volatile, because other programs write the counters of neighbouring rows.
    slot = tl.load(slots_ptr + row, volatile=True)
    from_one = num_buffer_rows.to(tl.int64) * size
    at = row.to(tl.int64) * size + column
    sent = own.to(WORD, bitcast=True)
    sent = tl.where(sent == EMPTY, tl.zeros_like(sent), sent)
    for step in tl.static_range(1, NUM_RANKS):  # so that the ranks do not all write to the same one first
        address = tl.load(addresses_ptr + (RANK + step) % NUM_RANKS)
        other_buffer_ptr = tl.multiple_of(address.to(tl.pointer_type(WORD)), 16)
        tl.store(other_buffer_ptr + (slot * NUM_RANKS + RANK) * from_one + at, sent, mask=inside)
    total = tl.zeros(own.shape, tl.float32)
    before = (slot + _SLOTS - 1) % _SLOTS
    for rank in tl.static_range(NUM_RANKS):
        got = sent
        if rank != RANK:
            place_ptrs = buffer_ptr + (slot * NUM_RANKS + rank) * from_one + at
            got = tl.load(place_ptrs, mask=inside, other=0, volatile=True)
            while tl.max((got == EMPTY).to(tl.int32)) > 0:
                got = tl.load(place_ptrs, mask=inside, other=0, volatile=True)
            empty = tl.full(own.shape, EMPTY, WORD)
            tl.store(buffer_ptr + (before * NUM_RANKS + rank) * from_one + at, empty, mask=inside)
        total += got.to(own.dtype, bitcast=True).to(tl.float32)
    tl.store(slots_ptr + row, (slot + 1) % _SLOTS)
    return total


@triton.jit
def _one_shot_all_reduce(
    y_ptr, total_ptr, addresses_ptr, buffer_ptr, slots_ptr,
    num_buffer_rows, size,
    BLOCK: tl.constexpr, RANK: tl.constexpr, NUM_RANKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < size
    at = row.to(tl.int64) * size + column
    own = tl.load(y_ptr + at, mask=inside, other=0.0)
    whole = sum_over_ranks(
        own, addresses_ptr, buffer_ptr, slots_ptr,
        row, column, inside, num_buffer_rows, size,
        RANK=RANK, NUM_RANKS=NUM_RANKS,
    )  # fmt: skip
    tl.store(total_ptr + at, whole.to(total_ptr.dtype.element_ty), mask=inside)


def one_shot_all_reduce(y: torch.Tensor, symmetric_buffer: SymmetricBuffer) -> torch.Tensor:
    """Return the sum of all ranks' y. Every rank must call this.

    Args:
        y: [num_rows, size], contiguous, which the symmetric buffer takes.

    Returns:
        A tensor of the same shape and dtype, accumulated in float32.
    """
    assert symmetric_buffer.takes(y) and y.is_contiguous()
    total, block = torch.empty_like(y), triton.next_power_of_2(symmetric_buffer.size)
    addresses, buffer, slots, num_buffer_rows = symmetric_buffer.arguments
    _one_shot_all_reduce[(len(y),)](
        y_ptr=y,
        total_ptr=total,
        addresses_ptr=addresses,
        buffer_ptr=buffer,
        slots_ptr=slots,
        num_buffer_rows=num_buffer_rows,
        size=symmetric_buffer.size,
        BLOCK=block,
        RANK=symmetric_buffer.rank,
        NUM_RANKS=symmetric_buffer.num_ranks,
        num_warps=min(max(block // 256, 1), 16),
        **launch_options(y.device),
    )
    return total


def cost(num_rows: int, size: int, num_ranks: int, dtype_bytes: int = 2) -> tuple[int, int]:
    """Return (bytes, FLOPs): what one rank sends to the others, and as many additions."""
    elements = (num_ranks - 1) * num_rows * size
    return elements * dtype_bytes, elements
