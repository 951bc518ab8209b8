"""Ragged batches of prompts, and a check of prefill attention against the reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from teachllm_kernels.attention.hopper_prefill import hopper_prefill
from teachllm_kernels.attention.kv_quantization import LARGEST, KVScales, dequantize_kv_reference, quantize_kv_reference
from teachllm_kernels.attention.paged_attention import paged_attention_reference
from teachllm_kernels.attention.paged_prefill import paged_prefill_triton
from teachllm_kernels.attention.prefill_plan import plan_prefill
from tests.kernels.cases import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of the norm


@dataclass(frozen=True)
class Shape:
    """A batch, and what the kernel is compiled for."""

    query_lens: list[int]
    context_lens: list[int]
    block_size: int = 16
    num_kv_heads: int = 2
    group: int = 2
    head_size: int = 32
    dtype: torch.dtype = torch.float32
    window: int | None = None
    soft_cap: float | None = None
    kv_dtype: torch.dtype | None = None  # the dtype of a quantized cache

    @property
    def kv_lens(self) -> list[int]:
        return [query + context for query, context in zip(self.query_lens, self.context_lens, strict=True)]


def draw_inputs(shape: Shape, seed: int) -> dict[str, Any]:
    """Return the launcher's arguments: blocks in random order, sequences in random rows, NaN wherever no token lies."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_tokens = shape.num_kv_heads * shape.group, sum(shape.query_lens)
    num_blocks = [-(-kv_len // shape.block_size) for kv_len in shape.kv_lens]
    num_seqs, max_blocks = len(num_blocks), max(num_blocks) + 1

    wide = torch.randn(num_tokens, num_heads + 2 * shape.num_kv_heads, shape.head_size, generator=generator)
    caches = torch.full((2, sum(num_blocks) + 3, shape.block_size, shape.num_kv_heads, shape.head_size), torch.nan)
    free = torch.randperm(caches.shape[1], generator=generator).int()
    rows = torch.randperm(num_seqs + 2, generator=generator)[:num_seqs].int()
    tables = torch.full((num_seqs + 2, max_blocks), 10**8, dtype=torch.int32)  # a look at an unset entry would crash
    for row, kv_len, count in zip(rows.tolist(), shape.kv_lens, num_blocks, strict=True):
        blocks, free = free[:count], free[count:]
        tables[row, :count] = blocks
        token = torch.arange(kv_len)
        content = torch.randn(2, kv_len, shape.num_kv_heads, shape.head_size, generator=generator)
        caches[:, blocks[token // shape.block_size].long(), token % shape.block_size] = content
    lens = torch.tensor([0, *shape.query_lens]).cumsum(0, dtype=torch.int32)
    scales, kept = None, (caches[0].to(shape.dtype), caches[1].to(shape.dtype))
    if shape.kv_dtype is not None:
        k_scale, v_scale = torch.rand(2, shape.num_kv_heads, generator=generator).add(0.5) * 4 / LARGEST[shape.kv_dtype]
        kept = (
            quantize_kv_reference(kept[0], k_scale, shape.kv_dtype),
            quantize_kv_reference(kept[1], v_scale, shape.kv_dtype),
        )
        scales = (k_scale.to(DEVICE), v_scale.to(DEVICE))
    inputs = {
        "q": wide.to(shape.dtype).to(DEVICE)[:, :num_heads],
        "k_cache": kept[0],
        "v_cache": kept[1],
        "block_tables": tables,
        "rows": rows,
        "query_start": lens,
        "seq_lens": torch.tensor(shape.kv_lens, dtype=torch.int32),
    }
    return {name: tensor.to(DEVICE) for name, tensor in inputs.items()} | {
        "scale": shape.head_size**-0.5,
        "window": shape.window,
        "soft_cap": shape.soft_cap,
        "scales": scales,
        "out": torch.full((num_tokens, num_heads, shape.head_size), torch.nan, dtype=shape.dtype, device=DEVICE),
    }


def expected(shape: Shape, inputs: dict[str, Any]) -> torch.Tensor:
    """Compute the reference in float64 for what the kernel was given; it reads whole blocks, so their ends lose NaN."""
    q, k_cache, v_cache = (inputs[name].double() for name in ("q", "k_cache", "v_cache"))
    if inputs["scales"] is not None:
        k_scale, v_scale = inputs["scales"]
        k_cache = dequantize_kv_reference(k_cache, k_scale, torch.float64)
        v_cache = dequantize_kv_reference(v_cache, v_scale, torch.float64)
    k_cache, v_cache = k_cache.nan_to_num(), v_cache.nan_to_num()
    tables = inputs["block_tables"][inputs["rows"].long()].where(
        torch.arange(inputs["block_tables"].shape[1], device=DEVICE)
        < torch.tensor([-(-n // shape.block_size) for n in shape.kv_lens], device=DEVICE)[:, None],
        0,
    )
    return paged_attention_reference(
        q,
        k_cache,
        v_cache,
        block_tables=tables,
        query_lens=shape.query_lens,
        kv_lens=shape.kv_lens,
        scale=inputs["scale"],
        window=shape.window,
        soft_cap=shape.soft_cap,
    )


def prefill_on_hopper(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    soft_cap: None,
    out: torch.Tensor | None,
    num_tokens: int | None = None,
    longest: int = 0,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Call `hopper_prefill` with the arguments of `paged_prefill_triton`."""
    most = q.shape[0] if num_tokens is None else num_tokens
    plan = plan_prefill(query_start, seq_lens, rows, most, q.shape[1] // k_cache.shape[2], longest)
    return hopper_prefill(q, k_cache, v_cache, block_tables, plan, scale, window, out, scales)


def check(shape: Shape, seed: int = 0, prefill: Callable[..., torch.Tensor] = paged_prefill_triton) -> None:
    """Check every head of every token."""
    inputs = draw_inputs(shape, seed)
    result = prefill(**inputs)
    assert result is inputs["out"]
    reference = expected(shape, inputs)
    error = (result.double() - reference).norm(dim=-1) / reference.norm(dim=-1)
    assert error.max() <= TOLERANCE[shape.dtype], float(error.max())
