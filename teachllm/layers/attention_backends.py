"""Who computes attention: one small interface, a class for each way.

cpu      PyTorch on the host: plans rectangles once a step, computes them as batches of matrices
triton   this project's kernels: split decode for requests with one token, tiles for the others
sdpa     the same, but for a long prompt that is computed whole: PyTorch's attention, which takes cuDNN's kernel.
         That is 1.2 times as fast (one prompt of 16,384 tokens on an H200: 580 against 475 TFLOP/s)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from teachllm_kernels.paged_attention import attend, plan_attention
from teachllm_kernels.paged_decode import paged_decode_triton
from teachllm_kernels.paged_prefill import paged_prefill_triton, tile_options

if TYPE_CHECKING:
    from teachllm.layers.attention import AttentionMetadata

KVCache = tuple[torch.Tensor, torch.Tensor]


class AttentionBackend(Protocol):
    """Computes attention over the paged cache."""

    name: str

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `layers.attention.paged_attention`; writes to `out`, [num_tokens, num_heads, head_size], if given."""


class CPUBackend:
    """For any host. Its plan depends on the batch alone, so that all layers of a kind share it."""

    name = "cpu"

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        k_cache, v_cache = kv_cache
        block_size, num_kv_heads = k_cache.shape[1:3]
        kind = (q.shape[1], num_kv_heads, window)
        plan = metadata.plans.get(kind)
        if plan is None:
            plan = plan_attention(metadata.block_tables, metadata.query_lens, metadata.kv_lens, block_size, *kind)
            metadata.plans[kind] = plan
        result = attend(q, k_cache, v_cache, plan, scale, soft_cap)
        return result if out is None else out.copy_(result)


class TritonBackend:
    """Decodes, which lead the batch, by `paged_decode`, what follows them by `paged_prefill`."""

    name = "triton"

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = q.new_empty(q.shape) if out is None else out
        tables, rows = metadata.block_tables, metadata.rows
        assert rows is not None
        count = metadata.num_decodes
        self._attend_decodes(q, kv_cache, metadata, scale, window, soft_cap, out)
        if count < rows.shape[0]:
            assert metadata.prefill_start is not None
            paged_prefill_triton(
                q[count:], *kv_cache, tables, rows[count:], metadata.prefill_start, metadata.seq_lens[count:],
                scale, window, soft_cap, out[count:],
            )  # fmt: skip
        return out

    @staticmethod
    def _attend_decodes(
        q: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        out: torch.Tensor,
    ) -> None:
        """The decodes at the head of a batch, if there are any."""
        count = metadata.num_decodes
        if count:
            starts, plan = metadata.query_start[: count + 1], metadata.decode_plans[window]
            where = (*kv_cache, metadata.block_tables, starts, plan)
            paged_decode_triton(q[:count], *where, scale, window, soft_cap, out=out[:count])


class SDPABackend(TritonBackend):
    """For a step whose last request is a prompt from its first token on, the only one with more than one token."""

    name = "sdpa"

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if window is not None or soft_cap is not None or q.dtype == torch.float32:
            return super().attend(q, k, v, kv_cache, metadata, scale, window, soft_cap, out)
        count = metadata.num_decodes
        query, key, value = (x[count:].transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, tokens, head_size]
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            result = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        result = result.squeeze(0).transpose(0, 1)
        if count == 0 and out is None:
            return result
        out = q.new_empty(q.shape) if out is None else out
        out[count:] = result
        self._attend_decodes(q, kv_cache, metadata, scale, window, soft_cap, out)
        return out


def check_heads(num_heads: int, num_kv_heads: int, head_size: int, dtype: str) -> None:
    """Refuses what the kernels of a GPU cannot take.

    Raises:
        ValueError: in one line, with what they can.
    """
    group, most = num_heads // num_kv_heads, tile_options(head_size, getattr(torch, dtype))["BLOCK_M"]
    if head_size % 2 or not 16 <= head_size <= 256:
        raise ValueError(f"heads of {head_size}: the GPU's attention takes even sizes from 16 to 256; use device=cpu")
    if group > most:
        fix = "use dtype=bfloat16 or device=cpu" if dtype == "float32" else "use device=cpu"
        raise ValueError(f"{group} query heads on a KV head: the GPU's attention takes up to {most} in {dtype}; {fix}")


CPU_BACKEND = CPUBackend()
TRITON_BACKEND = TritonBackend()
SDPA_BACKEND = SDPABackend()
