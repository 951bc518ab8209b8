"""Write the K and V of this step's tokens into their slots of the paged cache.

A slot is a token's place in the cache: `block * block_size + offset`. The tokens of a step scatter to wherever the
block tables put them; attention then reads them together with everything written before. A quantized cache
(`kv_quantization.py`) gets quantized values.

Source: Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", SOSP 2023.
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, tl, triton
from teachllm_kernels.attention.kv_quantization import (
    KVScales,
    as_bytes,
    for_kernel,
    quantize_kv,
    quantize_kv_reference,
)

_BLOCK = 1024


def kv_write_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales | None = None,
) -> None:
    """Write K and V in place.

    Args:
        k, v: [num_tokens, num_kv_heads, head_size], in the cache's dtype unless the cache is quantized.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_size], contiguous.
        slot_mapping: [num_tokens] int64; -1 means that the token is not written (padding).
        scales: scales of K and V, if the cache is quantized.
    """
    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    kv_write_cpu(k[kept], v[kept], k_cache, v_cache, slot_mapping[kept], scales)


def kv_write_cpu(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales | None = None,
) -> None:
    """Write like `kv_write_reference`, for batches without padding: batches on a CPU have none."""
    if scales is not None:
        k, v = (quantize_kv_reference(x, scale, k_cache.dtype) for x, scale in zip((k, v), scales, strict=True))
    for x, x_cache in ((k, k_cache), (v, v_cache)):
        as_bytes(x_cache).flatten(0, 1).index_copy_(0, slot_mapping, as_bytes(x))


@triton.jit
def _kv_write(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr, k_scale_ptr, v_scale_ptr,
    k_stride, v_stride, size,
    HEAD_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    written = (column < size) & (slot >= 0)
    if k_scale_ptr is None:
        tl.store(
            k_cache_ptr + slot * size + column, tl.load(k_ptr + token * k_stride + column, mask=written), mask=written
        )
        tl.store(
            v_cache_ptr + slot * size + column, tl.load(v_ptr + token * v_stride + column, mask=written), mask=written
        )
    else:
        head = column // HEAD_SIZE
        k = tl.load(k_ptr + token * k_stride + column, mask=written, other=0.0)
        v = tl.load(v_ptr + token * v_stride + column, mask=written, other=0.0)
        quantized_k = quantize_kv(k, tl.load(k_scale_ptr + head, mask=written, other=1.0), k_cache_ptr.dtype.element_ty)
        quantized_v = quantize_kv(v, tl.load(v_scale_ptr + head, mask=written, other=1.0), v_cache_ptr.dtype.element_ty)
        tl.store(k_cache_ptr + slot * size + column, quantized_k, mask=written)
        tl.store(v_cache_ptr + slot * size + column, quantized_v, mask=written)


def kv_write_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales | None = None,
) -> None:
    """Write like `kv_write_reference`; a token's heads lie side by side, tokens may lie apart."""
    num_tokens, num_kv_heads, head_size = k.shape
    size = num_kv_heads * head_size
    k_scale, v_scale = scales or (None, None)
    _kv_write[(num_tokens, triton.cdiv(size, _BLOCK))](
        k_ptr=k,
        v_ptr=v,
        k_cache_ptr=for_kernel(k_cache),
        v_cache_ptr=for_kernel(v_cache),
        slot_mapping_ptr=slot_mapping,
        k_scale_ptr=k_scale,
        v_scale_ptr=v_scale,
        k_stride=k.stride(0),
        v_stride=v.stride(0),
        size=size,
        HEAD_SIZE=head_size,
        BLOCK=_BLOCK,
        **launch_options(k.device),
    )


def cost(
    num_tokens: int, num_kv_heads: int, head_size: int, dtype_bytes: int = 2, kv_bytes: int | None = None
) -> tuple[int, int]:
    """Return (bytes, FLOPs) that any implementation must spend: K and V in and out, the slots once.

    Args:
        kv_bytes: bytes per element of the cache; None: as outside.
    """
    both = dtype_bytes + (dtype_bytes if kv_bytes is None else kv_bytes)
    return 2 * num_tokens * num_kv_heads * head_size * both + 8 * num_tokens, 0
