"""Move the K and V of accepted drafts together: they are a path in the draft tree, and its nodes lie between others.

Node i was computed at the i-th slot after the known tokens. The accepted nodes move, in order, to the first of those
slots, where the tokens of their positions belong. No node lies before its new place, so a program that moves them one
after the other, each thread its own channels, overwrites nothing that it still needs. The nodes of a chain are already
in place.

Source: Miao et al., "SpecInfer", ASPLOS 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, tl, triton

_BLOCK = 512  # words


@triton.jit
def _move_kv(
    addresses_ptr, widths_ptr, path_ptr, first_ptr, rows_ptr, num_known_ptr, block_tables_ptr,
    table_stride,
    LEVELS: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq = tl.program_id(0)
    level = tl.arange(0, PADDED)
    nodes = tl.load(path_ptr + seq * LEVELS + level, mask=level < LEVELS, other=-1)
    if tl.sum((nodes > level).to(tl.int32)) == 0:
        return
    cache_ptr = tl.load(addresses_ptr + tl.program_id(1)).to(tl.pointer_type(WORD))
    width = tl.load(widths_ptr + tl.program_id(1))
    row = tl.load(rows_ptr + tl.load(first_ptr + seq)).to(tl.int64)
    table_ptr = block_tables_ptr + row * table_stride
    behind = tl.load(num_known_ptr + row) - 1 - tl.sum((nodes >= 0).to(tl.int32))
    for begin in range(0, width, BLOCK):
        word = begin + tl.arange(0, BLOCK)
        for place in range(LEVELS):
            node = tl.load(path_ptr + seq * LEVELS + place)
            if node > place:
                source, target = behind + node, behind + place
                source_slot = tl.load(table_ptr + source // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + source % BLOCK_SIZE
                target_slot = tl.load(table_ptr + target // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + target % BLOCK_SIZE
                moved = tl.load(cache_ptr + source_slot * width + word, mask=word < width)
                tl.store(cache_ptr + target_slot * width + word, moved, mask=word < width)


class KVMover:
    """Moves K and V of some layers.

    Args:
        caches: K and V of each layer, [num_blocks, block_size, num_kv_heads, head_size]; their memory must not move.
    """

    def __init__(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        tensors = [tensor for cache in caches for tensor in cache]
        self._caches = list(caches)  # kept alive: the kernel has only their addresses
        self._block_size, device = tensors[0].shape[1], tensors[0].device
        sizes = [tensor[0, 0].numel() * tensor.element_size() for tensor in tensors]
        word_bytes = 4 if all(size % 4 == 0 for size in sizes) else 2  # head sizes are even
        self._word = {4: tl.int32, 2: tl.int16}[word_bytes]
        self._addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], device=device)
        self._widths = torch.tensor([size // word_bytes for size in sizes], dtype=torch.int32, device=device)

    def move(
        self,
        path: torch.Tensor,
        first: torch.Tensor,
        rows: torch.Tensor,
        num_known: torch.Tensor,
        block_tables: torch.Tensor,
    ) -> None:
        """Move K and V after `accept`, which returned `path`, `first`, `rows` and `num_known`.

        Args:
            block_tables: [max_rows, max_blocks] int32.
        """
        num_seqs, num_levels = path.shape
        _move_kv[(num_seqs, self._widths.shape[0])](
            addresses_ptr=self._addresses,
            widths_ptr=self._widths,
            path_ptr=path,
            first_ptr=first,
            rows_ptr=rows,
            num_known_ptr=num_known,
            block_tables_ptr=block_tables,
            table_stride=block_tables.stride(0),
            LEVELS=num_levels,
            PADDED=triton.next_power_of_2(num_levels),
            BLOCK_SIZE=self._block_size,
            WORD=self._word,
            BLOCK=_BLOCK,
            **launch_options(path.device),
        )


def cost(num_moved: int, bytes_per_token: int) -> tuple[int, int]:
    """Return (bytes, FLOPs): K and V of all layers in and out, for each token that moves."""
    return 2 * num_moved * bytes_per_token, 0
