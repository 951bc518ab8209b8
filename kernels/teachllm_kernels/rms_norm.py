"""RMS norm, with the residual added first if there is one.

Every sub-layer of a Llama-family model ends in `x = residual + y` and the next begins with `rms_norm(x)`, so the
two belong in one operation: done apart, each row travels to memory and back several times. Memory-bound: its speed
is bytes over bandwidth, see `cost`.

Between two norms a decode step reads more weights, keys and values than the L2 cache holds (50 MB on an H200). They
evict what was written there, and it goes to memory, though the next layer is going to overwrite it. `evict_last`
keeps it in the cache.

If the next product takes 8-bit operands, the norm writes quantized rows and never the row itself. If several GPUs have
parts of y, the norm also adds them up: a row is exchanged, added, normed and written in one kernel.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, tl, triton
from teachllm_kernels.comm.one_shot_all_reduce import DeferredAllReduce, sum_over_ranks
from teachllm_kernels.quantize_rows import GROUP, KEPT, QuantizedRows, empty_rows, store_row


def rms_norm_reference(
    y: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in float32 (float64 stays float64).

    Args:
        y: [..., size], any float dtype.
        residual: like `y`, or None where nothing is to be added.
        weight: broadcast over the leading dimensions; its last dimension is `size`. A weight of
            [num_heads, head_size] gives every head its own.
        eps: added to the mean square.

    Returns:
        (x / rms(x) * weight, x) with x = residual + y.
    """
    x = y if residual is None else residual + y
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight
    return normed.to(x.dtype), x


def prepare_rms_norm(weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weight * sqrt(size), sqrt(eps * size)): x / rms(x) = sqrt(size) x / hypot(|x|, root)."""
    size = weight.shape[-1]
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(wide) * size**0.5, torch.tensor((eps * size) ** 0.5, dtype=wide)


def rms_norm_cpu(
    y: torch.Tensor, residual: torch.Tensor | None, prepared: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `rms_norm_reference` with the result of `prepare_rms_norm`; equal up to rounding.

    A small model's row takes microseconds, so the number of operations counts: the length of x is one fused sum, and no
    Python number has to become a tensor.
    """
    scaled_weight, root = prepared
    x = y if residual is None else residual + y
    wide = x if x.dtype == root.dtype else x.to(root.dtype)
    normed = wide / torch.hypot(torch.linalg.vector_norm(wide, dim=-1, keepdim=True), root) * scaled_weight
    return normed if wide is x else normed.to(x.dtype), x


@triton.jit(do_not_specialize=["num_tokens"])  # it differs from batch to batch
def _rms_norm(
    y_ptr, residual_ptr, weight_ptr, normed_ptr, x_ptr,
    eps, num_tokens, size,
    normed_scales_ptr, given_scale_ptr,
    addresses_ptr, buffer_ptr, slots_ptr, num_buffer_rows,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GROUPED: tl.constexpr, EVICTION: tl.constexpr,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    column = tl.arange(0, BLOCK)
    inside = column < size
    at = tl.program_id(0).to(tl.int64) * size + column
    scale = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    own = tl.load(y_ptr + at, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        before = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if NUM_RANKS > 1:
        total = sum_over_ranks(
            own, addresses_ptr, buffer_ptr, slots_ptr,
            tl.program_id(0), column, inside, num_buffer_rows, size, RANK, NUM_RANKS,
        )  # fmt: skip
    else:
        total = own.to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(y_ptr + part * num_tokens * size + at, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        total += before
        tl.store(x_ptr + at, total.to(x_ptr.dtype.element_ty), mask=inside, eviction_policy=EVICTION)
        total = total.to(x_ptr.dtype.element_ty).to(tl.float32)  # the norm's input is what was stored
    rms = tl.sqrt(tl.sum(total * total) / size + eps)
    if normed_scales_ptr is None:
        normed_ptrs = normed_ptr + at
        normed = (total / rms * scale).to(normed_ptr.dtype.element_ty)
        tl.store(normed_ptrs, normed, mask=inside, eviction_policy=EVICTION)
    else:
        unquantized = (
            (total / rms * scale).to(x_ptr.dtype.element_ty).to(tl.float32)
        )  # rounded as if it had been stored
        row = tl.program_id(0)
        store_row(
            unquantized, normed_ptr, normed_scales_ptr, given_scale_ptr, row, num_tokens, size, BLOCK, GROUPED, EVICTION
        )


def rms_norm_triton(
    y: torch.Tensor | DeferredAllReduce, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `rms_norm_reference` for contiguous y and residual, [num_tokens, size]. One program per row.

    y may also be parts that must be added up: [num_parts, num_tokens, size] float32, or parts at several ranks. Then
    there must be a residual.
    """
    normed = torch.empty_like(_part(y) if residual is None else residual)
    return normed, _launch(y, residual, weight, eps, normed=normed)


def rms_norm_quantized_triton(
    y: torch.Tensor | DeferredAllReduce,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    scale: torch.Tensor | None = None,
    grouped: bool = False,
) -> tuple[QuantizedRows, torch.Tensor]:
    """Compute `rms_norm_triton`, then `quantize_rows`, with the same quantized values."""
    own = _part(y)
    normed = empty_rows((own.shape[-2], own.shape[-1]), dtype, grouped, own.device)
    x = _launch(
        y,
        residual,
        weight,
        eps,
        normed=normed.values,
        normed_scales=normed.scales,
        given_scale=scale,
        grouped=grouped,
    )
    return normed, x


def _part(y: torch.Tensor | DeferredAllReduce) -> torch.Tensor:
    """Return this rank's tensor: all of y, or its part."""
    return y.part if isinstance(y, DeferredAllReduce) else y


def _launch(
    y: torch.Tensor | DeferredAllReduce,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    normed: torch.Tensor,
    normed_scales: torch.Tensor | None = None,
    given_scale: torch.Tensor | None = None,
    grouped: bool = False,
) -> torch.Tensor:
    """Fill `normed`, or its quantized values and scales. Return the norm's input."""
    symmetric_buffer = y.symmetric_buffer if isinstance(y, DeferredAllReduce) else None
    y = _part(y)
    assert (y.dim() == 2 and symmetric_buffer is None) or residual is not None
    assert symmetric_buffer is None or symmetric_buffer.takes(y)
    num_tokens, size = y.shape[-2:]
    x = y if residual is None else torch.empty_like(residual)
    block, num_parts = triton.next_power_of_2(size), y.shape[0] if y.dim() == 3 else 1
    if grouped:
        block = max(block, GROUP)
    addresses, buffer, slots, num_buffer_rows = (
        (None, None, None, 0) if symmetric_buffer is None else symmetric_buffer.arguments
    )
    _rms_norm[(num_tokens,)](
        y_ptr=y,
        residual_ptr=residual,
        weight_ptr=weight,
        normed_ptr=normed,
        x_ptr=x,
        eps=eps,
        num_tokens=num_tokens,
        size=size,
        normed_scales_ptr=normed_scales,
        given_scale_ptr=given_scale,
        addresses_ptr=addresses,
        buffer_ptr=buffer,
        slots_ptr=slots,
        num_buffer_rows=num_buffer_rows,
        BLOCK=block,
        PARTS=num_parts,
        HAS_RESIDUAL=residual is not None,
        GROUPED=grouped,
        EVICTION="evict_last" if num_tokens <= KEPT else "",
        RANK=0 if symmetric_buffer is None else symmetric_buffer.rank,
        NUM_RANKS=1 if symmetric_buffer is None else symmetric_buffer.num_ranks,
        num_warps=min(
            max(block // (256 if num_parts == 1 else 128), 1), 16
        ),  # with parts, more warps for more loads at once
        **launch_options(y.device),
    )
    return x


def cost(num_tokens: int, hidden_size: int, dtype_bytes: int = 2) -> tuple[int, int]:
    """Return (bytes, FLOPs) that any implementation must spend: y and residual in, both out, weight once."""
    elements = num_tokens * hidden_size
    return (4 * elements + hidden_size) * dtype_bytes, 5 * elements
