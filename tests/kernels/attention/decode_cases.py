"""Batches for decode attention, and checks of its two forms against the reference in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from teachllm_kernels.attention import kv_quantization
from teachllm_kernels.attention.decode_plan import DecodeKernel, DecodePlan, plan_decode
from teachllm_kernels.attention.kv_quantization import (
    KVScales,
    as_bytes,
    dequantize_kv_reference,
    quantize_kv_reference,
)
from teachllm_kernels.attention.paged_attention import paged_attention_reference
from teachllm_kernels.attention.paged_decode import fused_paged_decode, paged_decode_triton
from teachllm_kernels.attention.rope_kv_write import rope_kv_write_reference
from tests.kernels.cases import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
FP8, INT8 = torch.float8_e4m3fn, torch.int8


class Batch(NamedTuple):
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: torch.Tensor
    rows: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    scales: KVScales | None = None

    def dequantized(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V in float64; what was never written is 0."""
        if self.scales is None:
            return self.k_cache.double().nan_to_num(), self.v_cache.double().nan_to_num()
        k, v = (
            dequantize_kv_reference(cache, scale, torch.float64)
            for cache, scale in zip(self[1:3], self.scales, strict=True)
        )
        return k.nan_to_num(), v.nan_to_num()


def make_batch(
    lens: list[int],
    query_lens: list[int],
    heads: tuple[int, int],
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> Batch:
    """Put blocks in random order, and NaN wherever no sequence wrote."""
    num_heads, num_kv_heads = heads
    counts = [-(-length // block_size) for length in lens]
    blocks = torch.randperm(sum(counts) + 3).int()
    rows = torch.randperm(len(lens) + 2)[: len(lens)].int()
    tables = torch.zeros((len(lens) + 2, max(counts)), dtype=torch.int32)
    caches = torch.full((2, sum(counts) + 3, block_size, num_kv_heads, head_size), float("nan"), dtype=dtype)
    first = 0
    for row, count, length in zip(rows, counts, lens, strict=True):
        own = blocks[first : first + count]
        tables[row, :count] = own
        first += count
        for i in range(length):
            caches[:, own[i // block_size], i % block_size] = torch.randn(2, num_kv_heads, head_size).to(dtype)
    wide = torch.randn(sum(query_lens), num_heads + 1, head_size).to(dtype).to(DEVICE)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    k_cache, v_cache = caches.to(DEVICE)
    scales = None
    if kv_dtype is not None:
        k_scale, v_scale = torch.rand(2, num_kv_heads, device=DEVICE).add(0.5) * 4 / kv_quantization.LARGEST[kv_dtype]
        scales = k_scale, v_scale
        k_cache, v_cache = (
            quantize_kv_reference(k_cache, k_scale, kv_dtype),
            quantize_kv_reference(v_cache, v_scale, kv_dtype),
        )
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    return Batch(
        q=wide[:, :num_heads],  # tokens lie apart
        k_cache=k_cache,
        v_cache=v_cache,
        tables=tables.to(DEVICE),
        rows=rows.to(DEVICE),
        query_start=starts.to(DEVICE),
        seq_lens=seq_lens.to(DEVICE),
        scales=scales,
    )


def plan_for(
    batch: Batch,
    num_heads: int,
    max_query_len: int,
    window: int | None,
    kernel: DecodeKernel = "paged_decode",
    num_before: int = 0,
) -> DecodePlan:
    """Plan a launch; `num_before` nodes of a draft tree are in the cache already."""
    _, _, num_kv_heads, head_size = batch.k_cache.shape
    plan = DecodePlan.allocate(len(batch.rows), num_heads, num_kv_heads, head_size, DEVICE, max_query_len)
    seen = None if window is None else window + num_before + max_query_len - 1
    plan_decode(plan, batch.seq_lens, batch.query_start, batch.rows, num_kv_heads, seen, kernel)
    return plan


def reference(batch: Batch, query_lens: list[int], scale: float, window: int | None, cap: float | None) -> torch.Tensor:
    k, v = batch.dequantized()
    lens, tables = batch.seq_lens.tolist(), batch.tables[batch.rows.long()]
    return paged_attention_reference(batch.q.double(), k, v, tables, query_lens, lens, scale, window, cap)


def assert_near(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.isfinite().all()
    error = (result.double() - expected).norm(dim=-1) / expected.norm(dim=-1)  # of each head of each token
    assert error.max() < TOLERANCE[result.dtype], f"{float(error.max()):.1e}"


class Kind(NamedTuple):
    """What a kernel is compiled for. Tests have few kinds, since compiling takes longer than running."""

    heads: tuple[int, int]
    head_size: int
    dtype: torch.dtype
    block_size: int = 16
    window: int | None = None
    cap: float | None = None
    kv_dtype: torch.dtype | None = None


def decode(batch: Batch, plan: DecodePlan, window: int | None = None, **options: Any) -> torch.Tensor:
    """Call `paged_decode_triton` with a batch."""
    return paged_decode_triton(
        q=batch.q,
        k_cache=batch.k_cache,
        v_cache=batch.v_cache,
        block_tables=batch.tables,
        query_start=batch.query_start,
        plan=plan,
        scale=0.3,
        window=window,
        scales=batch.scales,
        **options,
    )


def check_one_token(lens: list[int], kind: Kind, num_launches: int = 1) -> None:
    """Check `paged_decode_triton`; a second launch finds the arrivals as the first left them."""
    query_lens = [1] * len(lens)
    batch = make_batch(lens, query_lens, kind.heads, kind.head_size, kind.block_size, kind.dtype, kind.kv_dtype)
    plan = plan_for(batch, kind.heads[0], 1, kind.window)
    expected = reference(batch, query_lens, 0.3, kind.window, kind.cap)
    for _ in range(num_launches):
        out = torch.full(expected.shape, float("nan"), dtype=kind.dtype, device=DEVICE)
        decode(batch, plan, kind.window, soft_cap=kind.cap, out=out)
        assert_near(out, expected)
        assert not plan.finished.any()


def check_fused(lens: list[int], kind: Kind, has_norm: bool, on_hopper: bool = False) -> None:
    """Check `fused_paged_decode`: norm, rotation, write and attention, each step rounded as the two kernels round."""
    (num_heads, num_kv_heads), head_size, dtype, size, window, cap, kv_dtype = kind
    query_lens = [1] * len(lens)
    batch = make_batch(lens, query_lens, kind.heads, head_size, size, dtype, kv_dtype)
    qkv = torch.randn(len(lens), num_heads + 2 * num_kv_heads, head_size).to(dtype).to(DEVICE)
    angles = torch.rand(len(lens), 1, head_size // 2, device=DEVICE) * 6
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(dtype)
    signed_sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(dtype)
    weight = torch.rand(num_heads + num_kv_heads, head_size).add(0.5).to(dtype).to(DEVICE) if has_norm else None
    slots = torch.stack(
        [
            batch.tables[row, (n - 1) // size].long() * size + (n - 1) % size
            for row, n in zip(batch.rows, lens, strict=True)
        ]
    )
    k_cache, v_cache = batch.dequantized()
    turned, wide_weight = qkv.double(), None if weight is None else weight.double()
    rope_kv_write_reference(
        turned, cos.double(), signed_sin.double(), wide_weight, 1e-6, k_cache, v_cache, slot_mapping=slots
    )
    for cache in (batch.k_cache, batch.v_cache):  # what is written may not be read before
        as_bytes(cache).flatten(0, 1)[slots] = torch.nan if kv_dtype is None else 127
    plan = plan_for(batch, num_heads, 1, window, "hopper_decode" if on_hopper else "fused_paged_decode")
    before = qkv.clone()
    out = fused_paged_decode(
        qkv,
        cos,
        signed_sin,
        qk_weight=weight,
        eps=1e-6,
        k_cache=batch.k_cache,
        v_cache=batch.v_cache,
        block_tables=batch.tables,
        plan=plan,
        scale=0.3,
        window=window,
        soft_cap=cap,
        scales=batch.scales,
    )
    assert torch.equal(qkv, before) and not plan.finished.any()
    # What attention reads is of the dtype, fused or not: what this rounding costs is not its own error.
    written = batch._replace(q=turned[:, :num_heads].to(dtype))
    if batch.scales is None:
        written = written._replace(k_cache=k_cache.to(dtype), v_cache=v_cache.to(dtype))
    assert_near(out, reference(written, query_lens, 0.3, window, cap))
    for cache, expected in zip(
        (batch.k_cache, batch.v_cache) if kv_dtype is None else batch.dequantized(), (k_cache, v_cache), strict=True
    ):
        mine, theirs = cache.flatten(0, 1)[slots], expected.flatten(0, 1)[slots]
        if kv_dtype is None:
            assert_near(mine, theirs)
            continue
        scale = batch.scales[0 if expected is k_cache else 1].double()[:, None]
        assert_rounded(mine / scale, theirs / scale, kv_dtype, TOLERANCE[dtype])


def assert_rounded(quantized: torch.Tensor, dequantized: torch.Tensor, dtype: torch.dtype, tolerance: float) -> None:
    """Check that quantized values are next to the numbers, in steps; what is between two may go either way."""
    dequantized = dequantized.clamp(-kv_quantization.LARGEST[dtype], kv_quantization.LARGEST[dtype])
    step = torch.ones_like(dequantized)
    if dtype == FP8:
        step = torch.exp2(dequantized.abs().clamp(min=2.0**-6).log2().floor() - 3)
    assert ((quantized - dequantized).abs() <= 0.51 * step + tolerance * dequantized.abs()).all()


def seen(before: int, who: list[int], window: int | None) -> list[int]:
    """Return the keys that a node sees: a path's tokens have positions one after the other, wherever they lie."""
    path = [*range(before), *(before + node for node in who)]
    return path if window is None else path[-window:]


def attend_to(batch: Batch, kind: Kind, seq: int, token: int, keys: list[int]) -> torch.Tensor:
    """Return [num_heads, head_size] in float64: one token's attention to some of its sequence's keys."""
    table = batch.tables[batch.rows[seq].long()].tolist()
    slots = [table[i // kind.block_size] * kind.block_size + i % kind.block_size for i in keys]
    group = kind.heads[0] // kind.heads[1]
    k, v = (cache.flatten(0, 1)[slots].repeat_interleave(group, dim=1) for cache in batch.dequantized())
    weights = (torch.einsum("hd,khd->hk", batch.q[token].double(), k) * 0.3).softmax(dim=-1)
    return torch.einsum("hk,khd->hd", weights, v)
