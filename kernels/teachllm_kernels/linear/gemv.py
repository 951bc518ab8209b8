"""A matrix-vector product for one row, fused with what surrounds it in a layer: norm, bias, SiLU, residual.

A single request decodes one row at a time: every weight of the model is read for two FLOPs each, so the time is bytes
over bandwidth if nothing stands between the products. Here nothing does:

    one shot       a program loads all of its few rows of the weight at once, so no loop waits for memory
    weights first  with programmatic dependent launch, the loads start before the previous kernel has ended; only x
                   must wait
    fused          every program computes the norm before the product for itself from x, which is a few kilobytes;
                   SiLU, bias and residual are applied to the result on its way out

A layer is then five kernels: QKV, attention, output, gate and up, down.

Source: the roofline argument of Williams et al., "Roofline", 2009; Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, tl, triton
from teachllm_kernels.linear.dense_gemm import cost
from teachllm_kernels.rms_norm import rms_norm_reference

__all__ = ["cost", "gemv_reference", "gemv_triton"]

_WEIGHTS_PER_PROGRAM = 8192  # weights held by one program of four warps


def gemv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """The definition: residual + act(rms_norm(x) W^T + b).

    Args:
        x: [num_rows, in]; one row for the kernel below.
        weight: [out, in]; with `gated` [2 * out, in], gate above up.
        bias: [rows of weight].
        norm: (weight [in], eps) of the norm that x passes first.
        residual: [num_rows, out], added last.
        gated: the result is silu(gate) * up.

    Returns:
        [num_rows, out].
    """
    y = F.linear(x if norm is None else rms_norm_reference(x, None, *norm)[0], weight, bias)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y


@triton.jit
def _gemv(
    x_ptr, weight_ptr, bias_ptr, norm_weight_ptr, residual_ptr, out_ptr,
    eps, num_out,
    NUM_IN: tl.constexpr, IN_PADDED: tl.constexpr, ROWS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, IN_PADDED)
    is_row, is_k = row < num_out, k < NUM_IN
    inside = is_row[:, None] & is_k[None, :]
    weight_ptrs = weight_ptr + row.to(tl.int64)[:, None] * NUM_IN + k[None, :]
    w = tl.load(weight_ptrs, mask=inside, other=0.0, eviction_policy="evict_first")
    if GATED:
        up_ptrs = weight_ptrs + num_out.to(tl.int64) * NUM_IN
        w_up = tl.load(up_ptrs, mask=inside, other=0.0, eviction_policy="evict_first")
    if HAS_NORM:
        scale = tl.load(norm_weight_ptr + k, mask=is_k, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    h = tl.load(x_ptr + k, mask=is_k, other=0.0).to(tl.float32)
    if HAS_NORM:
        h = h * scale * tl.rsqrt(tl.sum(h * h) / NUM_IN + eps)
    y = tl.sum(w.to(tl.float32) * h[None, :], axis=1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(w_up.to(tl.float32) * h[None, :], axis=1)
        if HAS_BIAS:
            up += tl.load(bias_ptr + num_out + row, mask=is_row, other=0.0).to(tl.float32)
        y = y * tl.sigmoid(y) * up
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=is_row)


def gemv_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """Compute `gemv_reference` for one row and contiguous tensors, in float32 from input to output."""
    assert x.shape[0] == 1
    num_in, num_out = weight.shape[1], weight.shape[0] // (2 if gated else 1)
    out = x.new_empty((1, num_out))
    norm_weight, eps = norm or (None, 0.0)
    padded = triton.next_power_of_2(num_in)
    rows = max(_WEIGHTS_PER_PROGRAM // padded, 1)
    _gemv[(triton.cdiv(num_out, rows),)](
        x_ptr=x,
        weight_ptr=weight,
        bias_ptr=bias,
        norm_weight_ptr=norm_weight,
        residual_ptr=residual,
        out_ptr=out,
        eps=eps,
        num_out=num_out,
        NUM_IN=num_in,
        IN_PADDED=padded,
        ROWS=rows,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        num_warps=max(rows * padded // 2048, 4),
        **launch_options(x.device),
    )
    return out
