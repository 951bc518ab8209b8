"""The plan of decode attention: a step's KV is cut into splits, listed on the device once for all layers.

The time of decode attention is bytes over bandwidth if every multiprocessor reads until the end. A program takes one
split of one KV head, so the number of splits and their lengths matter:

    one wave   as many splits as run at once, of nearly the same length: all start together and end together, and
               nothing is left over. Half a wave more would take as long as a whole one
    two        if there are more sequences than places: the longest come first, so that short ones fill the gaps at the
               end. A cut sequence must be merged, so only those are cut that would still run when the others have ended

How many splits run at once is a choice: a program with fewer warps, or a shorter queue of tiles, leaves room for more
programs (`DecodeShape`). So the shape follows from the number of sequences, such that they make whole waves. A kernel
whose programs read fast at two per multiprocessor is best for any number of sequences (`hopper_decode.py`) except one:
beside a single sequence, the matrix products around attention must find room. The list has a fixed bound, and the
launch that a CUDA graph holds does not depend on lengths.

Sources: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969 (longest first); Ye et al., "FlashInfer", MLSys
2025 (balanced splits).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from teachllm_kernels._triton import tl, triton

TILE = 64  # keys; a split is a whole number of tiles, except a sequence's last split
LOG2_E = 1.4426950408889634  # converts scores to base 2 (as `DecodePlan.lse` is): the hardware computes exp2
_SPLITS_OF_ONE = 64  # splits per sequence at most, on average
_MAX_UNSORTED_SEQS = 8  # so few sequences have splits of nearly the same length in any order
_MULTIPROCESSORS = 128  # of 132: a few are left to other kernels
_SHORTEST = 16  # keys per tile at least: tensor cores multiply that many at once
_FIELDS = 8  # per item, see `DecodePlan`

FIELDS = tl.constexpr(_FIELDS)
SEQ, ROW, TOKEN, BEGIN, END, SEQ_LEN, FIRST_ITEM, NUM_SPLITS = map(tl.constexpr, range(_FIELDS))


DecodeKernel: TypeAlias = Literal["paged_decode", "fused_paged_decode", "hopper_decode"]  # that a plan is for


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The resources of one program of the attention kernel.

    Attributes:
        at_once: programs per multiprocessor.
        num_warps: warps per program.
        stages: tiles that are being copied or in use.
        tile: keys per step of the inner loop.
        maxnreg: registers per thread at most; on average, if warps have roles.
    """

    at_once: int
    num_warps: int
    stages: int
    tile: int
    maxnreg: int | None

    @property
    def places(self) -> int:
        """The number of programs that run at once."""
        return self.at_once * _MULTIPROCESSORS


_SHAPES = (
    DecodeShape(at_once=3, num_warps=4, stages=3, tile=64, maxnreg=None),
    DecodeShape(at_once=4, num_warps=4, stages=2, tile=64, maxnreg=None),
    DecodeShape(at_once=5, num_warps=2, stages=2, tile=64, maxnreg=168),
    DecodeShape(at_once=6, num_warps=2, stages=3, tile=32, maxnreg=168),
)
COMMON_SHAPE, _SPLITTING_SHAPE = _SHAPES[1], _SHAPES[2]
HOPPER_SHAPE = DecodeShape(at_once=2, num_warps=4, stages=3, tile=64, maxnreg=128)  # for `hopper_decode.py`
ALONE_SHAPE = DecodeShape(at_once=2, num_warps=4, stages=2, tile=64, maxnreg=None)  # for one sequence, fused


def decode_shape(num_seqs: int, num_kv_heads: int, kernel: DecodeKernel = "paged_decode") -> DecodeShape:
    """Return the best shape of a kernel for a number of sequences, as measured in benchmarks/NOTES.md."""
    programs = num_seqs * num_kv_heads
    if kernel == "hopper_decode":
        return HOPPER_SHAPE
    if kernel == "fused_paged_decode":
        return ALONE_SHAPE if num_seqs == 1 else COMMON_SHAPE
    if 2 * programs <= _SPLITTING_SHAPE.places:
        return _SPLITTING_SHAPE
    if programs <= COMMON_SHAPE.places:
        return next(shape for shape in _SHAPES if programs <= shape.places)
    return next((shape for shape in _SHAPES if programs <= 2 * shape.places), _SHAPES[-1])


def _wave(num_seqs: int, num_kv_heads: int, shape: DecodeShape) -> int:
    """Return the number of splits that run at once, with all of their KV heads."""
    return min(max(shape.places // num_kv_heads, 1), num_seqs * _SPLITS_OF_ONE)


def max_splits(num_seqs: int, num_kv_heads: int, shape: DecodeShape) -> int:
    """Return the number of items that a launch is sized for: a bound for any batch of `num_seqs` sequences."""
    wave = _wave(num_seqs, num_kv_heads, shape)
    return wave if num_seqs <= wave else wave + num_seqs


def fitting_tile(
    shape: DecodeShape, rows: int, head_padded: int, stored_bytes: int, operand_bytes: int, most_bytes: int
) -> int:
    """Return the keys per tile: the shape's, or fewer if its tiles do not fit in shared memory.

    Shared memory holds the queries, K and V of all stages but one, one tile's weights and one value per row; with a
    quantized cache also the dequantized values of one tile. Hopper's products of 64 rows and more need the last stage
    as well, but no weights: there is room for it.

    Args:
        rows: query rows per program, padded.
        head_padded: head size, padded.
        stored_bytes: bytes per element of the cache.
        operand_bytes: bytes per element of the operands of a matrix product.
        most_bytes: shared memory per program.
    """

    def num_bytes(tile: int) -> int:
        tiles = 2 * tile * head_padded
        dequantized = tiles * operand_bytes if stored_bytes < operand_bytes else 0
        operands = (rows * head_padded + rows * tile) * operand_bytes + dequantized
        return operands + (shape.stages - 1) * tiles * stored_bytes + 4 * rows

    tile = 32 if head_padded > 128 and operand_bytes > 2 else shape.tile  # room for two programs on a Hopper processor
    while num_bytes(tile) > most_bytes and tile > _SHORTEST:
        tile //= 2
    return tile


@dataclass(slots=True)
class DecodePlan:
    """The work of one step's decode attention, on the device, and room for its partial results.

    Attributes:
        items: [max_items, 8] int32, one split each. SEQ: its sequence; ROW: the sequence's row of the block tables;
            TOKEN: its first token in the batch; BEGIN: the split's first key; END: one past its last; SEQ_LEN: the
            sequence's length; FIRST_ITEM: the first item of the sequence; NUM_SPLITS: how many items it has. Unused
            items have keys 0 to 0.
        partial: [max_items, num_heads * max_query_len, head_size] float32, each split's normalised sum.
        lse: [max_items, num_heads * max_query_len] float32, each split's log-sum-exp, base 2.
        spans: [max_seqs, 2] int32, each sequence's first item and its number of items.
        finished: [max_seqs * num_kv_heads] int32, the number of finished splits; 0 between launches.
        kernel: for which the plan was last filled: the caller's choice, by the table of `selection.py`.
        filled_for: (number of sequences, shape) of the batch that the plan was last filled for.
    """

    items: torch.Tensor
    partial: torch.Tensor
    lse: torch.Tensor
    spans: torch.Tensor
    finished: torch.Tensor
    kernel: DecodeKernel = field(default="paged_decode", init=False)
    filled_for: tuple[int, DecodeShape] | None = field(default=None, init=False)

    @staticmethod
    def allocate(
        max_seqs: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        device: torch.device,
        max_query_len: int = 1,
    ) -> DecodePlan:
        """Allocate room for any batch of up to `max_seqs` sequences.

        Args:
            max_query_len: the most tokens per sequence that a launch may have; each has its own results.
        """
        most_at_once = max(_SHAPES[-1].places // num_kv_heads, 1)
        max_items, rows = most_at_once + max_seqs, num_heads * max_query_len
        return DecodePlan(
            items=torch.zeros((max_items, _FIELDS), dtype=torch.int32, device=device),
            partial=torch.empty((max_items, rows, head_size), dtype=torch.float32, device=device),
            lse=torch.empty((max_items, rows), dtype=torch.float32, device=device),
            spans=torch.zeros((max_seqs + 1, 2), dtype=torch.int32, device=device),
            finished=torch.zeros(max_seqs * num_kv_heads, dtype=torch.int32, device=device),
        )


@triton.jit
def _tiles_of_a_split(tiles, num_seqs, wave):
    """Return the fewest tiles per split such that the splits do not exceed one wave."""
    total = tl.sum(tiles)
    low = tl.maximum(tl.cdiv(total, wave), 1)
    if num_seqs <= wave:
        high = tl.maximum(tl.minimum(tl.max(tiles), tl.cdiv(total, tl.maximum(wave - num_seqs, 1))), low)
        while low < high:
            middle = (low + high) // 2
            fits = tl.sum(tl.cdiv(tiles, middle)) <= wave
            low = tl.where(fits, low, middle + 1)
            high = tl.where(fits, middle, high)
    return low  # with more sequences than places: the work per place


# They differ from batch to batch: prompts begin anywhere after the decodes.
@triton.jit(do_not_specialize=["num_seqs", "wave", "max_items", "query_start_ptr"])
def _plan_decode(
    items_ptr, spans_ptr, seq_lens_ptr, query_start_ptr, rows_ptr,
    num_seqs, wave, max_items, window,
    SEQS: tl.constexpr, SORTED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    seq = tl.arange(0, SEQS)
    if SORTED:  # the longest first: only short ones are left at the end, and all programs end at about the same time
        tiles = tl.cdiv(tl.minimum(tl.load(seq_lens_ptr + seq, mask=seq < num_seqs, other=0), window), TILE)
        seq = SEQS - 1 - tl.sort(tiles * SEQS + SEQS - 1 - seq, descending=True) % SEQS
    is_seq = seq < num_seqs
    length = tl.load(seq_lens_ptr + seq, mask=is_seq, other=0)
    token = tl.load(query_start_ptr + seq, mask=is_seq, other=0)
    row = tl.load(rows_ptr + seq, mask=is_seq, other=0)
    seen = tl.minimum(length, window)
    tiles = tl.cdiv(seen, TILE)
    most = _tiles_of_a_split(tiles, num_seqs, wave)
    # A sequence's splits are of equal length; otherwise its last one could hold next to nothing.
    split_len = tl.maximum(tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, most), 1)), 1) * TILE
    num_splits = tl.cdiv(seen, split_len)
    last = tl.cumsum(num_splits, 0)
    first = last - num_splits
    tl.store(spans_ptr + 2 * seq, first, mask=is_seq)
    tl.store(spans_ptr + 2 * seq + 1, num_splits, mask=is_seq)
    for split in range(tl.max(num_splits)):
        item_ptrs = items_ptr + (first + split) * FIELDS
        begin = length - seen + split * split_len
        has_split = split < num_splits
        tl.store(item_ptrs + SEQ, seq, mask=has_split)
        tl.store(item_ptrs + ROW, row, mask=has_split)
        tl.store(item_ptrs + TOKEN, token, mask=has_split)
        tl.store(item_ptrs + BEGIN, begin, mask=has_split)
        tl.store(item_ptrs + END, tl.minimum(begin + split_len, length), mask=has_split)
        tl.store(item_ptrs + SEQ_LEN, length, mask=has_split)
        tl.store(item_ptrs + FIRST_ITEM, first, mask=has_split)
        tl.store(item_ptrs + NUM_SPLITS, num_splits, mask=has_split)
    for start in range(tl.sum(num_splits), max_items, SEQS):
        unused = start + seq
        tl.store(items_ptr + unused * FIELDS + BEGIN, 0, mask=unused < max_items)
        tl.store(items_ptr + unused * FIELDS + END, 0, mask=unused < max_items)


def plan_decode(
    plan: DecodePlan,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    rows: torch.Tensor,
    num_kv_heads: int,
    window: int | None = None,
    kernel: DecodeKernel = "paged_decode",
) -> None:
    """Fill `plan` for a batch in one launch, without a transfer to the host.

    Args:
        seq_lens: [num_seqs] int32, this step's tokens included; 0 for padding.
        query_start: [num_seqs + 1] int32, first token of each sequence in the flat batch.
        rows: [num_seqs] int32, each sequence's row of the block tables.
        window: the number of last keys that any of a sequence's new tokens sees: a layer's window, `max_query_len` - 1,
            and the tokens of a draft tree that were there before.
        kernel: the plan is for it; the launcher `fused_paged_decode` launches what its plan is for.
    """
    num_seqs = seq_lens.shape[0]
    shape = decode_shape(num_seqs, num_kv_heads, kernel)
    plan.kernel, plan.filled_for = kernel, (num_seqs, shape)
    _plan_decode[(1,)](
        items_ptr=plan.items,
        spans_ptr=plan.spans,
        seq_lens_ptr=seq_lens,
        query_start_ptr=query_start,
        rows_ptr=rows,
        num_seqs=num_seqs,
        wave=_wave(num_seqs, num_kv_heads, shape),
        max_items=max_splits(num_seqs, num_kv_heads, shape),
        window=window if window is not None else 2**31 - 1,
        SEQS=triton.next_power_of_2(num_seqs),
        SORTED=num_seqs > _MAX_UNSORTED_SEQS,
        TILE=TILE,
    )


def cost(num_seqs: int, num_splits: int) -> tuple[int, int]:
    """Return (bytes, FLOPs): per sequence three values in, per split its item out. Latency-bound."""
    return num_seqs * 3 * 4 + num_splits * _FIELDS * 4, 0
