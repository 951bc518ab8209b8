"""SwiGLU's activation: `silu(gate) * up`, on the output of the merged gate and up projection.

The two projections are one matrix product (one read of the input, one launch), so their results lie side by side
in each row. Memory-bound: done as two operations, the gate travels to memory and back once more, and once more again if
the down projection takes 8-bit operands and a separate kernel quantizes them.

Source: Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, tl, triton
from teachllm_kernels.quantize_rows import GROUP, QuantizedRows, empty_rows, store_row

_BLOCK = 1024


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up: [num_tokens, 2 * size] (gate, then up) -> [num_tokens, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@triton.jit
def _silu_and_mul(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up_ptr + row * 2 * size + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + column, mask=inside).to(tl.float32)
    tl.store(out_ptr + row * size + column, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])  # it differs from batch to batch
def _silu_and_mul_quantized(
    gate_up_ptr, values_ptr, scales_ptr, given_scale_ptr,
    num_rows, size,
    BLOCK: tl.constexpr, GROUPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < size
    gate_ptrs = gate_up_ptr + row.to(tl.int64) * 2 * size + column
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + size, mask=inside, other=0.0).to(tl.float32)
    y = (
        (gate * tl.sigmoid(gate) * up).to(gate_up_ptr.dtype.element_ty).to(tl.float32)
    )  # rounded as if it had been stored
    store_row(y, values_ptr, scales_ptr, given_scale_ptr, row, num_rows, size, BLOCK, GROUPED, "")


def silu_and_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute `silu_and_mul_reference` in float32. One program per row and 1024 columns."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    grid = (num_tokens, triton.cdiv(size, _BLOCK))
    _silu_and_mul[grid](gate_up_ptr=gate_up, out_ptr=out, size=size, BLOCK=_BLOCK, **launch_options(gate_up.device))
    return out


def silu_and_mul_quantized_triton(
    gate_up: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None, grouped: bool = False
) -> QuantizedRows:
    """Compute `silu_and_mul_triton`, then `quantize_rows`, with the same quantized values. One program per row."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    quantized = empty_rows((num_tokens, size), dtype, grouped, gate_up.device)
    block = triton.next_power_of_2(max(size, GROUP))
    _silu_and_mul_quantized[(num_tokens,)](
        gate_up_ptr=gate_up,
        values_ptr=quantized.values,
        scales_ptr=quantized.scales,
        given_scale_ptr=scale,
        num_rows=num_tokens,
        size=size,
        BLOCK=block,
        GROUPED=grouped,
        num_warps=min(max(block // 512, 1), 16),
        **launch_options(gate_up.device),
    )
    return quantized


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, the fastest way: [num_tokens, 2 * size], contiguous -> [num_tokens, size]."""
    return silu_and_mul_reference(gate_up) if gate_up.is_cpu else silu_and_mul_triton(gate_up)


def cost(num_tokens: int, size: int, dtype_bytes: int = 2) -> tuple[int, int]:
    """Return (bytes, FLOPs) that any implementation must spend: both halves in, one out."""
    return 3 * num_tokens * size * dtype_bytes, 5 * num_tokens * size
