"""Attention by this project's kernels: `paged_decode`, and `paged_prefill` or, on Hopper, `hopper_prefill`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from teachllm.layers.attention_backends.base import AttentionNeeds, AttentionSettings, KVCache
from teachllm.layers.dtypes import torch_dtype
from teachllm_kernels.attention.hopper_prefill import hopper_prefill
from teachllm_kernels.attention.paged_decode import paged_decode_triton
from teachllm_kernels.attention.paged_prefill import paged_prefill_triton, tile_options
from teachllm_kernels.attention.prefill_plan import PrefillPlan, plan_prefill
from teachllm_kernels.selection import SHORT, Op, Operands, card_of, case_of

if TYPE_CHECKING:
    from teachllm.layers.attention import AttentionMetadata

# By the names of `selection.CASES`: whether prompts are planned for `hopper_prefill`.
_PREFILLS = {"rope_kv_write + hopper_prefill": True, "rope_kv_write + paged_prefill": False}


@dataclass(slots=True)
class TritonMetadata:
    """Hold the plans of a step's prompts, by (first request, last one + 1, whether scores are capped).

    None: `paged_prefill` computes them, which needs no plan.
    """

    prompts: dict[tuple[int, int, bool], PrefillPlan | None] = field(default_factory=dict)


class TritonBackend:
    """Decodes, which lead the batch, by one kernel, what follows them by another."""

    name = "triton"
    in_graphs = True
    splits_decodes = True
    workspace_bytes = 0

    @staticmethod
    def check(needs: AttentionNeeds) -> None:
        """Raises ValueError where heads are of a size, or so many on a KV head, that no kernel takes them."""
        check_heads(needs.num_heads, needs.num_kv_heads, needs.head_size, needs.dtype)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        settings: AttentionSettings,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = q.new_empty(q.shape) if out is None else out
        count, rows = metadata.num_decodes, metadata.rows
        assert rows is not None
        attend_decodes(q, kv_cache, metadata, settings, out)
        if count < rows.shape[0]:
            assert metadata.prefill_start is not None
            requests, token = slice(count, rows.shape[0]), metadata.first_prompt_token
            attend_prompts(q[token:], kv_cache, metadata, settings, requests, metadata.prefill_start, out[token:])
        return out


def attend_decodes(
    q: torch.Tensor, kv_cache: KVCache, metadata: AttentionMetadata, settings: AttentionSettings, out: torch.Tensor
) -> None:
    """The decodes at the head of a batch, if there are any, into the head of `out`."""
    count = metadata.num_decodes
    if count:
        tokens = slice(0, metadata.first_prompt_token)
        paged_decode_triton(
            q[tokens],
            *kv_cache,
            block_tables=metadata.block_tables,
            query_start=metadata.query_start[: count + 1],
            plan=metadata.decode_plans[settings.window],
            scale=settings.scale,
            window=settings.window,
            soft_cap=settings.soft_cap,
            max_query_len=metadata.decode_len,
            tree=metadata.tree,
            first_place=metadata.first_place,
            out=out[tokens],
            scales=settings.kv_scales,
        )


def attend_prompts(
    q: torch.Tensor,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    settings: AttentionSettings,
    requests: slice,
    query_start: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Some of the batch's requests, neighbours.

    Args:
        q: [num_tokens, num_heads, head_size], theirs.
        requests: which they are.
        query_start: [num_requests + 1] int32, of each the first token in `q`.
        out: like `q`, contiguous.
    """
    assert metadata.rows is not None
    kv_lens = metadata.kv_lens[requests]
    if metadata.kv_lens and not kv_lens:
        return  # padding alone
    rows, seq_lens = metadata.rows[requests], metadata.seq_lens[requests]
    scale, window, soft_cap = settings.scale, settings.window, settings.soft_cap
    plans, key = metadata.prepared(TritonMetadata).prompts, (requests.start, requests.stop, soft_cap is not None)
    if key not in plans:  # the first layer
        plans[key] = _plan(q, kv_cache[0], rows, query_start, seq_lens, kv_lens, has_soft_cap=key[2])
    plan = plans[key]
    if plan is not None:
        hopper_prefill(q, *kv_cache, metadata.block_tables, plan, scale, window, out, settings.kv_scales)
        return
    paged_prefill_triton(
        q,
        *kv_cache,
        block_tables=metadata.block_tables,
        rows=rows,
        query_start=query_start,
        seq_lens=seq_lens,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        out=out,
        scales=settings.kv_scales,
    )


def _plan(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    rows: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_lens: list[int],
    has_soft_cap: bool,
) -> PrefillPlan | None:
    """For `hopper_prefill`, where it is taken.

    No `kv_lens`: it is for a graph, which is launched in no time, or for the same step without one, which takes the
    same kernels for the same bits. How long its few sequences are is not known.
    """
    _, block_size, num_kv_heads, head_size = k_cache.shape
    group, longest = q.shape[1] // num_kv_heads, max(kv_lens, default=0)
    op: Op = "short_prefill" if kv_lens and longest <= SHORT else "prefill"
    heads = heads_of(q.device, q.dtype, head_size, group, block_size, has_soft_cap=has_soft_cap)
    if not _PREFILLS[case_of(op, heads, q.shape[0]).kernel]:
        return None
    return plan_prefill(query_start, seq_lens, rows, q.shape[0], group, longest)


def heads_of(
    device: torch.device, dtype: torch.dtype, head_size: int, group: int, block_size: int, has_soft_cap: bool = False
) -> Operands:
    """Return what the choice of attention's kernels depends on.

    Args:
        group: query heads per KV head.
        block_size: tokens per KV block.
    """
    return Operands(
        form="heads",
        card=card_of(device),
        dtype=dtype,
        head_size=head_size,
        group=group,
        block_size=block_size,
        has_soft_cap=has_soft_cap,
    )


def check_heads(num_heads: int, num_kv_heads: int, head_size: int, dtype: str) -> None:
    """Refuses what the kernels of a GPU cannot take.

    Raises:
        ValueError: in one line, with what they can.
    """
    group, most = num_heads // num_kv_heads, tile_options(head_size, torch_dtype(dtype), 0)["BLOCK_M"]
    if head_size % 2 or not 16 <= head_size <= 256:
        raise ValueError(f"heads of {head_size}: the GPU's attention takes even sizes from 16 to 256; use device=cpu")
    if group > most:
        fix = "use dtype=bfloat16 or device=cpu" if dtype == "float32" else "use device=cpu"
        raise ValueError(f"{group} query heads on a KV head: the GPU's attention takes up to {most} in {dtype}; {fix}")
