"""Matrix products of many weights in one launch: every expert multiplies the tokens that were routed to it.

One launch per expert would be hundreds of small launches, and the host would have to wait for each expert's token
count. Here the (token, expert) pairs are sorted by expert (`moe_routing.py`), and a tile is a few rows of one expert.
The launch has as many programs as there can be tiles. Each program adds up the counts to find its expert and rows, or
that it has none.

    gated   reads a pair's token; multiplies by gate and up; writes silu(gate) * up at the pair's sorted place
    down    reads that; writes the product times the router's weight at the pair's own place

The weight is the left operand, as in `skinny_gemm.py`: in a decode an expert has few rows, or one.

Source: Gale et al., "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", MLSys 2023.
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, shared_memory, tl, triton
from teachllm_kernels.linear.dense_gemm import linear_reference
from teachllm_kernels.moe.moe_routing import Groups, Routes
from teachllm_kernels.silu_and_mul import silu_and_mul_reference

_FIXED_ROWS = 64  # rows per expert for which tiles are chosen if they may not depend on the number of rows
_SIDE_BY_SIDE = 8  # tiles of rows that run at once, so that one expert's tiles read its weight together


def grouped_gated_reference(x: torch.Tensor, weight: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return silu(gate) * up of each pair, computed by the pair's expert.

    Args:
        x: [num_tokens, num_in].
        weight: [num_experts, 2 * num_out, num_in]; per expert, gate above up.

    Returns:
        [num_pairs, num_out] sorted by expert; rows after the last expert's are undefined.
    """
    top_k = groups.pairs.shape[0] // x.shape[0]
    out = x.new_empty(groups.pairs.shape[0], weight.shape[1] // 2)
    for expert, rows in _rows_of(groups):
        tokens = groups.pairs[rows] // top_k
        out[rows] = silu_and_mul_reference(linear_reference(x[tokens], weight[expert]))
    return out


def grouped_down_reference(h: torch.Tensor, weight: torch.Tensor, groups: Groups, routes: Routes) -> torch.Tensor:
    """Return each pair's product of h and its expert's weight, times the router's weight.

    Args:
        h: [num_pairs, num_in] sorted by expert.
        weight: [num_experts, num_out, num_in].

    Returns:
        [num_pairs, num_out] in the order of tokens; rows of experts that are not held are undefined.
    """
    out = h.new_empty(h.shape[0], weight.shape[1])
    counts_as = routes.weights.flatten()
    for expert, rows in _rows_of(groups):
        pairs = groups.pairs[rows]
        out[pairs] = (linear_reference(h[rows], weight[expert]) * counts_as[pairs, None]).to(out.dtype)
    return out


def _rows_of(groups: Groups) -> list[tuple[int, slice]]:
    """Return (expert, its rows in the sorted order) for every expert that has any."""
    counts, ends = groups.counts.tolist(), groups.counts.cumsum(0).tolist()
    return [(expert, slice(ends[expert] - count, ends[expert])) for expert, count in enumerate(counts) if count]


@triton.jit(do_not_specialize=["num_tiles"])  # it differs from batch to batch
def _grouped_gemm(
    x_ptr, weight_ptr, counts_ptr, pairs_ptr, routing_weights_ptr, out_ptr,
    num_tiles, num_out, num_experts,
    NUM_IN: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SIDE_BY_SIDE: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    num_n = tl.cdiv(num_out, BLOCK_N)
    program = tl.program_id(0)
    tile, block = tl.swizzle2d(program // num_n, program % num_n, num_tiles, num_n, SIDE_BY_SIDE)

    each = tl.arange(0, EXPERTS)
    count = tl.load(counts_ptr + each, mask=each < num_experts, other=0)
    tiles = (count + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32))  # experts whose tiles all come before this one
    if expert >= num_experts:
        return
    begin = tl.sum(tl.where(each < expert, count, 0))
    first = begin + (tile - tl.sum(tl.where(each < expert, tiles, 0))) * ROWS
    m = first + tl.arange(0, ROWS)
    is_m = m < begin + tl.sum(tl.where(each == expert, count, 0))

    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_n = n < num_out
    k = tl.arange(0, BLOCK_K)
    pair = tl.load(pairs_ptr + m, mask=is_m, other=0)
    x_row_ptrs = x_ptr + (pair // TOP_K if GATED else m).to(tl.int64)[None, :] * NUM_IN
    num_weights = num_out.to(tl.int64) * NUM_IN  # per matrix: gate, up, or the only one
    w_row_ptrs = weight_ptr + expert.to(tl.int64) * num_weights * (2 if GATED else 1) + n.to(tl.int64)[:, None] * NUM_IN
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    acc_up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in tl.range(0, NUM_IN, BLOCK_K, num_stages=STAGES):
        column = start + k
        is_w, is_x = is_n[:, None], is_m[None, :]
        if NUM_IN % BLOCK_K != 0:
            is_w, is_x = is_w & (column < NUM_IN)[None, :], is_x & (column < NUM_IN)[:, None]
        x_t = tl.load(x_row_ptrs + column[:, None], mask=is_x, other=0.0)
        w = tl.load(w_row_ptrs + column[None, :], mask=is_w, other=0.0)
        acc = tl.dot(w, x_t, acc, input_precision="ieee")
        if GATED:
            w_up = tl.load(w_row_ptrs + num_weights + column[None, :], mask=is_w, other=0.0)
            acc_up = tl.dot(w_up, x_t, acc_up, input_precision="ieee")

    if GATED:
        y, row = acc * tl.sigmoid(acc) * acc_up, m
    else:
        y, row = acc * tl.load(routing_weights_ptr + pair, mask=is_m, other=0.0)[None, :], pair
    at = row.to(tl.int64)[None, :] * num_out + n[:, None]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=is_n[:, None] & is_m[None, :])


def grouped_gated_triton(x: torch.Tensor, weight: torch.Tensor, groups: Groups, is_fixed: bool = False) -> torch.Tensor:
    """Compute `grouped_gated_reference` for contiguous tensors; accumulate in float32.

    Args:
        is_fixed: a row of the result does not depend, by one bit, on the number of other rows.
    """
    return _launch(x, weight, groups, None, groups.pairs.shape[0] // x.shape[0], is_fixed)


def grouped_down_triton(
    h: torch.Tensor, weight: torch.Tensor, groups: Groups, routes: Routes, is_fixed: bool = False
) -> torch.Tensor:
    """Compute `grouped_down_reference` for contiguous tensors; accumulate in float32. `is_fixed` as above."""
    return _launch(h, weight, groups, routes.weights, routes.weights.shape[1], is_fixed)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: Groups,
    routing_weights: torch.Tensor | None,
    top_k: int,
    is_fixed: bool,
) -> torch.Tensor:
    gated, num_pairs = routing_weights is None, groups.pairs.shape[0]
    num_experts, num_out, num_in = weight.shape
    num_out = num_out // 2 if gated else num_out
    out = torch.empty((num_pairs, num_out), dtype=x.dtype, device=x.device)
    rows_each = _FIXED_ROWS if is_fixed else -(-num_pairs // num_experts)
    tile = _tile(rows_each, gated, x.element_size(), shared_memory(x.device))
    num_tiles = _most_tiles(num_pairs, num_experts, tile["ROWS"])
    _grouped_gemm[(num_tiles * triton.cdiv(num_out, tile["BLOCK_N"]),)](
        x_ptr=x,
        weight_ptr=weight,
        counts_ptr=groups.counts,
        pairs_ptr=groups.pairs,
        routing_weights_ptr=routing_weights,
        out_ptr=out,
        num_tiles=num_tiles,
        num_out=num_out,
        num_experts=num_experts,
        NUM_IN=num_in,
        TOP_K=top_k,
        EXPERTS=triton.next_power_of_2(num_experts),
        SIDE_BY_SIDE=_SIDE_BY_SIDE,
        GATED=gated,
        **tile,
        **launch_options(x.device),
    )
    return out


def _most_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """Return the most tiles that the pairs can fill: an expert's last tile may hold a single row."""
    return (num_pairs + min(num_pairs, num_experts) * (rows - 1)) // rows


def _tile(rows_each: int, gated: bool, dtype_bytes: int, most_bytes: int) -> dict[str, int]:
    """Return tile sizes and launch options for an average number of rows per expert."""
    if dtype_bytes == 4:
        return {"ROWS": 16 if rows_each <= 16 else 32, "BLOCK_N": 64, "BLOCK_K": 32, "STAGES": 2, "num_warps": 4}
    rows = next((rows for rows in (16, 32, 64) if rows_each <= rows), 128)
    block_n, block_k = (64, 128) if rows <= 32 else (128, 64)
    stage = ((2 if gated else 1) * block_n + rows) * block_k * dtype_bytes
    stages = min(96 << 10, most_bytes) // stage + 1  # all but one are in shared memory
    options = {"ROWS": rows, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": min(max(stages, 2), 4)}
    return options | {"num_warps": 4 if block_n == 64 else 8}


def cost(
    num_pairs: int, num_in: int, num_out: int, num_experts: int, dtype_bytes: int = 2, gated: bool = False
) -> tuple[int, int]:
    """Return (bytes, FLOPs) that any implementation must spend: x in, the result out, once the weights that have rows.

    Args:
        num_experts: the experts that have any rows.
        gated: a weight has [2 * num_out, num_in] elements, gate above up.
    """
    num_weights = num_in * num_out * (2 if gated else 1)
    num_bytes = (num_experts * num_weights + num_pairs * (num_in + num_out)) * dtype_bytes
    return num_bytes, 2 * num_pairs * num_weights
