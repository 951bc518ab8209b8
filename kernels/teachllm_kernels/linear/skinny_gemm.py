"""Matrix products of 2 to 16 rows, the decode of a few requests: still bound by reading the weight.

The weight is the left operand (x^T the right one), so its rows fill the 64 rows of a tensor-core instruction, and x is
padded to only 16. A library's kernel does the same; what it cannot do is the work around the product:

    launch    with programmatic dependent launch, a product is ready to start when the previous one ends
    epilogue  bias and SiLU-and-multiply are applied before the result is written
    split K   a result with few columns would leave most multiprocessors idle, so several programs share its columns;
              the last to arrive adds their parts in a fixed order, so results repeat bit for bit

Sources: the roofline argument of Williams et al., "Roofline", 2009; Osama et al., "Stream-K", PPoPP 2023.
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, shared_memory, tl, triton
from teachllm_kernels.first_launch import kept
from teachllm_kernels.linear.dense_gemm import cost

__all__ = ["MAX_ROWS", "cost", "skinny_gemm_triton"]

MAX_ROWS = 16  # at 32 a library's kernel is as fast, at 64 faster, see benchmarks/NOTES.md
_BLOCK_N = 64
_BLOCKS_WANTED = 64  # programs; more programs, with less in flight each, read no faster


@triton.jit(do_not_specialize=["num_rows"])  # it differs from batch to batch
def _skinny_gemm(
    x_ptr, weight_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
    num_rows, num_out,
    NUM_IN: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block, split = tl.program_id(0), tl.program_id(1)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    is_n, is_m = n < num_out, m < num_rows
    w_row_ptrs = weight_ptr + n.to(tl.int64)[:, None] * NUM_IN
    up = num_out.to(tl.int64) * NUM_IN
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    acc_up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in tl.range(split * SPAN, split * SPAN + SPAN, BLOCK_K, num_stages=STAGES):
        column = start + k
        is_w, is_x = is_n[:, None], is_m[None, :]
        if SPAN * SPLITS != NUM_IN:
            is_w, is_x = is_w & (column < NUM_IN)[None, :], is_x & (column < NUM_IN)[:, None]
        x_t = tl.load(x_ptr + m[None, :] * NUM_IN + column[:, None], mask=is_x, other=0.0)
        w = tl.load(w_row_ptrs + column[None, :], mask=is_w, other=0.0, eviction_policy="evict_first")
        acc = tl.dot(w, x_t, acc, input_precision="ieee")
        if GATED:
            w_up = tl.load(w_row_ptrs + up + column[None, :], mask=is_w, other=0.0, eviction_policy="evict_first")
            acc_up = tl.dot(w_up, x_t, acc_up, input_precision="ieee")

    at = m[None, :] * num_out + n[:, None]  # in a result [num_rows, num_out]
    inside = is_n[:, None] & is_m[None, :]
    is_last = True
    if SPLITS > 1:
        size = num_rows * num_out
        tl.store(partial_ptr + split * size + at, acc, mask=inside)
        if GATED:
            tl.store(partial_ptr + (SPLITS + split) * size + at, acc_up, mask=inside)
        tl.debug_barrier()  # every thread's part is written before the arrival is counted
        is_last = tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            tl.store(arrived_ptr + block, 0)
            acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
            acc_up = tl.zeros([BLOCK_N, ROWS], tl.float32)
            for part in tl.static_range(SPLITS):  # past the L1 cache, which may hold older values
                acc += tl.load(partial_ptr + part * size + at, mask=inside, other=0.0, cache_modifier=".cg")
                if GATED:
                    other_half_ptrs = partial_ptr + (SPLITS + part) * size + at
                    acc_up += tl.load(other_half_ptrs, mask=inside, other=0.0, cache_modifier=".cg")
    if is_last:
        y = acc
        if HAS_BIAS:
            y += tl.load(bias_ptr + n, mask=is_n, other=0.0).to(tl.float32)[:, None]
        if GATED:
            y_up = acc_up
            if HAS_BIAS:
                y_up += tl.load(bias_ptr + num_out + n, mask=is_n, other=0.0).to(tl.float32)[:, None]
            y = y * tl.sigmoid(y) * y_up
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


def skinny_gemm_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """Compute `gemv_reference` without a norm, for up to `MAX_ROWS` rows of contiguous tensors; accumulate in float32.

    Launches on one device must follow each other: they share the arrival counters.
    """
    (num_rows, num_in), num_out = x.shape, weight.shape[0] // (2 if gated else 1)
    assert num_rows <= MAX_ROWS
    out = x.new_empty((num_rows, num_out))
    blocks, splits = _grid(num_in, num_out)
    block_k, stages = _tile(num_in, x.dtype.itemsize, gated, shared_memory(x.device))
    partial = arrived = None
    if splits > 1:
        partial = torch.empty((2 * splits, num_rows, num_out), dtype=torch.float32, device=x.device)
        arrived = _arrivals(x.device)
    _skinny_gemm[(blocks, splits)](
        x_ptr=x,
        weight_ptr=weight,
        bias_ptr=bias,
        out_ptr=out,
        partial_ptr=partial,
        arrived_ptr=arrived,
        num_rows=num_rows,
        num_out=num_out,
        NUM_IN=num_in,
        SPAN=triton.cdiv(num_in, splits * block_k) * block_k,
        ROWS=MAX_ROWS,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=block_k,
        STAGES=stages,
        SPLITS=splits,
        GATED=gated,
        HAS_BIAS=bias is not None,
        num_warps=4,
        **launch_options(x.device),
    )
    return out


def _tile(num_in: int, dtype_bytes: int, gated: bool, most_bytes: int) -> tuple[int, int]:
    """Return (columns per tile, stages), measured on an H200 and cut to what fits. One stage is not in shared
    memory.
    """

    def num_bytes(block_k: int) -> int:
        return ((2 if gated else 1) * _BLOCK_N + MAX_ROWS) * block_k * dtype_bytes

    if num_in >= 4096 and dtype_bytes == 2 and 2 * num_bytes(256) <= most_bytes:
        return 256, 3
    return 128, min(4 if dtype_bytes == 2 else 2, most_bytes // num_bytes(128) + 1)


def _grid(num_in: int, num_out: int) -> tuple[int, int]:
    """Return (blocks of columns, programs per block). Only blocks that have an arrival counter are shared."""
    blocks = -(-num_out // _BLOCK_N)
    if blocks > _BLOCKS_WANTED:
        return blocks, 1
    splits = -(-_BLOCKS_WANTED // blocks)
    return blocks, splits * 2 if num_in > 8192 else splits


@kept
def _arrivals(device: torch.device) -> torch.Tensor:
    """Return the counters of programs that have finished their part, per block of columns; 0 between launches."""
    return torch.zeros(_BLOCKS_WANTED, dtype=torch.int32, device=device)
