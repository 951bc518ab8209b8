"""Batch-invariant matrix products: every row's result is the same, bit for bit, whatever other rows there are.

Floating-point addition depends on its order, and a library picks the order by the shape: it uses other tiles for 8 rows
than for 800, and for some shapes it splits the inner dimension among processors. A token's logits then depend on what
runs beside it. Here the order is fixed: one tile shape per weight, however many rows, and one program computes an
element from the first input channel to the last. The cost is what the library gains: a few rows leave processors idle.

Source: He et al., "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025.
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, shared_memory, tl, triton
from teachllm_kernels.linear.dense_gemm import cost, linear_reference

__all__ = ["batch_invariant_gemm_triton", "cost", "linear_reference"]

_WIDE = 8192  # columns from which on wide tiles, which read x less often, still keep most multiprocessors busy


@triton.jit(do_not_specialize=["num_rows"])  # otherwise one row would get its own kernel
def _batch_invariant_gemm(
    x_ptr, weight_ptr, bias_ptr, out_ptr,
    num_rows, num_out,
    NUM_IN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    num_m, num_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_out, BLOCK_N)
    program = tl.program_id(0)
    # Programs that run side by side share rows of x and of the weight, in the L2 cache.
    block_m, block_n = tl.swizzle2d(program // num_n, program % num_n, num_m, num_n, GROUP)
    m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_m, is_n = m < num_rows, n < num_out
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * NUM_IN + k[None, :]
    w_ptrs = weight_ptr + n.to(tl.int64)[None, :] * NUM_IN + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, NUM_IN, BLOCK_K, num_stages=STAGES):
        is_x, is_w = is_m[:, None], is_n[None, :]
        if NUM_IN % BLOCK_K != 0:
            is_k = start + k < NUM_IN
            is_x, is_w = is_x & is_k[None, :], is_w & is_k[:, None]
        x_tile = tl.load(x_ptrs + start, mask=is_x, other=0.0)
        w_tile = tl.load(w_ptrs + start, mask=is_w, other=0.0)
        acc = tl.dot(x_tile, w_tile, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=is_n, other=0.0).to(tl.float32)[None, :]
    at = m.to(tl.int64)[:, None] * num_out + n[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=is_m[:, None] & is_n[None, :])


def batch_invariant_gemm_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `linear_reference` for contiguous tensors; accumulate in float32, each row as if it were alone."""
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    if x.data_ptr() % 16:
        x = x.clone()  # rows of a larger tensor: a kernel compiled for their alignment would be another one
    out = x.new_empty((num_rows, num_out))
    options = _tile(num_out, x.dtype, shared_memory(x.device))
    programs = triton.cdiv(num_rows, options["BLOCK_M"]) * triton.cdiv(num_out, options["BLOCK_N"])
    _batch_invariant_gemm[(programs,)](
        x_ptr=x,
        weight_ptr=weight,
        bias_ptr=bias,
        out_ptr=out,
        num_rows=num_rows,
        num_out=num_out,
        NUM_IN=num_in,
        GROUP=8,
        HAS_BIAS=bias is not None,
        **options,
        **launch_options(x.device),
    )
    return out


def _tile(num_out: int, dtype: torch.dtype, most_bytes: int) -> dict[str, int]:
    """Return tile sizes and launch options for a weight; they do not depend on the number of rows.

    As many bytes of the weight as possible are in flight, for the sake of few rows, within 96 KB of shared memory.

    Args:
        most_bytes: shared memory per program.
    """
    if dtype == torch.float32:
        return {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 32, "STAGES": 2, "num_warps": 4}
    if num_out >= _WIDE:
        stages = 4 if most_bytes >= 96 << 10 else 3
        return {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "STAGES": stages, "num_warps": 4}
    return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "STAGES": 3, "num_warps": 4}
