"""Which tiles of queries Hopper's prefill attention computes, listed on the device once per step for all layers.

A tile is a few consecutive tokens of one sequence. The list is sorted: tiles that see the most keys come first, so that
the programs, which take the tiles in turn, all end at about the same time. `hopper_tasks.py` deals them out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from teachllm_kernels._triton import tl, triton
from teachllm_kernels.attention.hopper_tasks import FIELDS, NUM_FIELDS, NUM_QUERIES, POSITION, ROW, TOKEN

__all__ = ["ROWS", "PrefillPlan", "plan_prefill"]

ROWS = 128  # per tile of queries: tokens times the query heads of a KV head
# Tiles of 64 keys compute less beyond the diagonal; tiles of 128 make longer products, which wins from here on.
_SHORT = 2048  # tokens of the longest sequence


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """A step's tiles of queries, on the device.

    Attributes:
        items: [max_items, 4] int32, one tile each. TOKEN: its first token in the batch; NUM_QUERIES: its number of
            tokens; POSITION: the first token's position in its sequence; ROW: the sequence's row of the block tables.
        count: [1] int32, the number of tiles.
        group: query heads per KV head, for which the plan was made.
        tile: keys per step of the loop, 64 or 128.
    """

    items: torch.Tensor
    count: torch.Tensor
    group: int
    tile: int


@triton.jit(do_not_specialize=["seq_lens_ptr", "rows_ptr", "num_seqs"])  # they differ from batch to batch
def _plan_prefill(
    items_ptr, count_ptr, query_start_ptr, seq_lens_ptr, rows_ptr, num_seqs, QUERIES: tl.constexpr, SEQS: tl.constexpr
):
    seq = tl.arange(0, SEQS)
    is_seq = seq < num_seqs
    token = tl.load(query_start_ptr + seq, mask=is_seq, other=0)
    num_tokens = tl.load(query_start_ptr + seq + 1, mask=is_seq, other=0) - token
    row = tl.load(rows_ptr + seq, mask=is_seq, other=-1)
    context = tl.load(seq_lens_ptr + seq, mask=is_seq, other=0) - num_tokens
    num_tiles = tl.where(row >= 0, tl.cdiv(num_tokens, QUERIES), 0)
    # A level is the set of tiles, of any sequence, that see about the same number of keys. Highest level first.
    lowest = context // QUERIES
    highest = lowest + num_tiles - 1
    level = tl.max(tl.where(num_tiles > 0, highest, -1))
    end = 0
    while level >= 0:
        tile = level - lowest
        has_tile = (tile >= 0) & (tile < num_tiles)
        item_ptrs = items_ptr + (end + tl.cumsum(has_tile.to(tl.int32), 0) - 1) * FIELDS
        first = tile * QUERIES
        tl.store(item_ptrs + TOKEN, token + first, mask=has_tile)
        tl.store(item_ptrs + NUM_QUERIES, tl.minimum(num_tokens - first, QUERIES), mask=has_tile)
        tl.store(item_ptrs + POSITION, context + first, mask=has_tile)
        tl.store(item_ptrs + ROW, row, mask=has_tile)
        end += tl.sum(has_tile.to(tl.int32))
        level = tl.max(tl.where((tile > 0) & (num_tiles > 0), tl.minimum(level - 1, highest), -1))
    tl.store(count_ptr, end)


def plan_prefill(
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    num_tokens: int,
    group: int,
    longest: int = 0,
) -> PrefillPlan:
    """List the tiles of a batch's queries, in one launch, without a transfer to the host.

    Args:
        query_start: [num_seqs + 1] int32, first token of each sequence in the flat batch.
        seq_lens: [num_seqs] int32, this step's tokens included.
        rows: [num_seqs] int32, each sequence's row of the block tables; -1 is padding, which has no tiles.
        num_tokens: no sequence ends later than this.
        group: query heads per KV head, a power of two.
        longest: about how many tokens the longest sequence has, this step's included, if the host knows it.
    """
    num_seqs, queries = rows.shape[0], ROWS // group
    items = torch.empty((num_tokens // queries + num_seqs, NUM_FIELDS), dtype=torch.int32, device=rows.device)
    count = torch.empty(1, dtype=torch.int32, device=rows.device)
    seqs = max(triton.next_power_of_2(num_seqs), 64)  # a floor, or every few sequences would get a kernel of their own
    _plan_prefill[(1,)](
        items_ptr=items,
        count_ptr=count,
        query_start_ptr=query_start,
        seq_lens_ptr=seq_lens,
        rows_ptr=rows,
        num_seqs=num_seqs,
        QUERIES=queries,
        SEQS=seqs,
    )
    return PrefillPlan(items, count, group, tile=64 if longest <= _SHORT else 128)
