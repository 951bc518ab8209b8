"""A quantized KV cache: kernels round as the definition does, bit by bit, and attention reads nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm_kernels._triton import tl, triton
from teachllm_kernels.attention import kv_quantization
from teachllm_kernels.attention.kv_move import KVMover
from teachllm_kernels.attention.kv_quantization import (
    LARGEST,
    as_bytes,
    dequantize_kv_reference,
    dequantize_unscaled,
    for_kernel,
    multiplicand,
    quantize_kv,
    quantize_kv_reference,
)
from teachllm_kernels.attention.kv_write import kv_write_reference, kv_write_triton
from teachllm_kernels.attention.paged_attention import paged_attention_cpu, paged_attention_reference
from teachllm_kernels.attention.rope_kv_write import rope_kv_write_reference, rope_kv_write_triton
from tests.kernels.cases import DEVICE, ON_GPU, pairs, per_device
from tests.thorough import times

pytestmark = [pytest.mark.gpu] if ON_GPU else []  # natively where there is a GPU, else interpreted
FP8, INT8 = torch.float8_e4m3fn, torch.int8
both = pytest.mark.parametrize("dtype", [FP8, INT8], ids=["fp8", "int8"])
BLOCK = per_device(8192, 1024)


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """Return all values that a byte can hold, in order."""
    found = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    found = found[found.isfinite() & (found.abs() <= LARGEST[dtype])]
    return found.unique()


def around_every_value(dtype: torch.dtype) -> torch.Tensor:
    """Return all values, all midpoints, the numbers next to these, and others, within the range and beyond."""
    quantized = every_value(dtype)
    between = (quantized[1:] + quantized[:-1]) / 2
    drawn = torch.randn(3000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 3000)
    nexts = [torch.nextafter(between, torch.tensor(limit)) for limit in (1e9, -1e9)]
    return torch.cat([quantized, between, *nexts, drawn, torch.tensor([1e9, -1e9, 0.0, -0.0, 1e-30])]).to(DEVICE)


@triton.jit
def _quantize_kv(x_ptr, scale_ptr, out_ptr, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    quantized = quantize_kv(tl.load(x_ptr + i, mask=i < size), tl.load(scale_ptr), out_ptr.dtype.element_ty)
    tl.store(out_ptr + i, quantized, mask=i < size)


@triton.jit
def _dequantize_unscaled(quantized_ptr, out_ptr, size, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(
        out_ptr + i,
        dequantize_unscaled(tl.load(quantized_ptr + i, mask=i < size), out_ptr.dtype.element_ty),
        mask=i < size,
    )


@triton.jit
def _multiplicand(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, multiplicand(tl.load(x_ptr + i), out_ptr.dtype.element_ty))


@pairs(dtype=[FP8, INT8], scale=[1.0, 0.037, 3.3], has_fp8=[True, False])
def test_kernels_round_as_the_definition_does(
    dtype: torch.dtype, scale: float, has_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_quantization, "has_fp8", lambda device: has_fp8)
    x = around_every_value(dtype) * scale
    found = torch.zeros(x.shape, dtype=dtype, device=DEVICE)
    scales = torch.tensor([scale], device=DEVICE)
    grid = (triton.cdiv(len(x), BLOCK),)
    _quantize_kv[grid](x_ptr=x, scale_ptr=scales, out_ptr=for_kernel(found), size=len(x), BLOCK=BLOCK)
    expected = quantize_kv_reference(x[:, None, None], scales, dtype).flatten()
    assert torch.equal(as_bytes(found), as_bytes(expected))


@both
def test_the_definition_takes_the_nearest_value_and_of_two_the_even_one(dtype: torch.dtype) -> None:
    quantized = every_value(dtype).to(DEVICE)
    x = around_every_value(dtype)
    found = quantize_kv_reference(x[:, None, None], torch.ones(1, device=DEVICE), dtype).flatten()
    distance = (x.double()[:, None].clamp(-LARGEST[dtype], LARGEST[dtype]) - quantized.double()).abs()
    nearest = distance.min(dim=1)
    assert torch.equal((found.double() - x.double().clamp(-LARGEST[dtype], LARGEST[dtype])).abs(), nearest.values)
    is_tie = (distance == nearest.values[:, None]).sum(dim=1) == 2
    assert is_tie.sum() > 100 and (as_bytes(found)[is_tie] % 2 == 0).all()


@pairs(dtype=[FP8, INT8], operand=[torch.float16, torch.float32], has_fp8=[True, False])
def test_quantized_values_multiply_as_the_numbers_that_they_are(
    dtype: torch.dtype, operand: torch.dtype, has_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_quantization, "has_fp8", lambda device: has_fp8)
    quantized = every_value(dtype).to(dtype).to(DEVICE)
    out = torch.zeros(quantized.shape, dtype=operand, device=DEVICE)
    _dequantize_unscaled[(1,)](quantized_ptr=for_kernel(quantized), out_ptr=out, size=len(quantized), BLOCK=256)
    assert torch.equal(out.float(), every_value(dtype).to(DEVICE))


def test_queries_beyond_float16_are_clamped_to_it() -> None:
    x = torch.tensor([1.5, -3e-5, 65504.0, 1e6, -1e30, 0.0, -7.25, 300.0], device=DEVICE)
    out = torch.zeros(8, dtype=torch.float16, device=DEVICE)
    _multiplicand[(1,)](x_ptr=x, out_ptr=out, BLOCK=8)
    assert torch.equal(out, x.clamp(-65504, 65504).half())


@pairs(
    dtype=[FP8, INT8],
    x_dtype=[torch.float32, torch.float16],
    has_fp8=[True, False],
    heads=[(1, 8), (3, 80), (2, 512)],
)
def test_quantized_values_are_written_to_their_slots_and_no_other(
    dtype: torch.dtype, x_dtype: torch.dtype, has_fp8: bool, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_quantization, "has_fp8", lambda device: has_fp8)
    num_kv_heads, head_size = heads
    wide = torch.randn(4, 3 * num_kv_heads, head_size, device=DEVICE).to(x_dtype)  # k and v as they lie beside q
    k, v = wide[:, num_kv_heads : 2 * num_kv_heads], wide[:, 2 * num_kv_heads :]
    k_scale, v_scale = (torch.rand(2, num_kv_heads, device=DEVICE) + 0.1) * 2 / LARGEST[dtype]  # some are clamped
    caches = torch.full((2, 3, 16, num_kv_heads, head_size), 0x41, dtype=torch.uint8, device=DEVICE).view(dtype)
    expected = caches.clone()
    slots = torch.tensor([17, -1, 0, 47], device=DEVICE)
    kv_write_triton(k, v, *caches, slots, (k_scale, v_scale))
    kv_write_reference(k, v, *expected, slots, (k_scale, v_scale))
    assert torch.equal(as_bytes(caches), as_bytes(expected))
    found = dequantize_kv_reference(caches[0].flatten(0, 1)[0], k_scale)
    most = (k_scale * LARGEST[dtype])[:, None]
    assert (found - k[2].float().clamp(-most, most)).abs().max() < 0.07 * most.max()


@pairs(
    few=4,
    dtype=[FP8, INT8],
    heads=per_device([(4, 2), (3, 1)], [(1, 1), (4, 2), (9, 3), (16, 8)]),
    head_size=per_device([16, 80], [16, 80, 128]),
    has_norm=[False, True],
)
def test_norm_and_rotation_come_before_quantization(
    dtype: torch.dtype, heads: tuple[int, int], head_size: int, has_norm: bool
) -> None:
    (num_heads, num_kv_heads), num_tokens, x_dtype = heads, 3, torch.float16
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_size, device=DEVICE).to(x_dtype)
    angles = torch.rand(num_tokens, 1, head_size // 2, device=DEVICE) * 6
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(x_dtype)
    signed_sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(x_dtype)
    weight = torch.randn(num_heads + num_kv_heads, head_size, device=DEVICE).to(x_dtype) if has_norm else None
    k_scale, v_scale = (torch.rand(2, num_kv_heads, device=DEVICE) + 0.5) * 4 / LARGEST[dtype]
    caches = torch.full((2, 2, 16, num_kv_heads, head_size), 0x41, dtype=torch.uint8, device=DEVICE).view(dtype)
    unquantized = torch.full((2, 2, 16, num_kv_heads, head_size), 0.0, dtype=x_dtype, device=DEVICE)
    slots = torch.tensor([31, -1, 4], device=DEVICE)
    turned = qkv.clone()
    rope_kv_write_triton(turned, cos, signed_sin, weight, 1e-6, *unquantized, slots)
    rope_kv_write_triton(qkv, cos, signed_sin, weight, 1e-6, *caches, slots, (k_scale, v_scale))
    assert torch.equal(qkv, turned)  # q, k and v are as without quantization; only the cache is quantized
    expected = torch.full_like(as_bytes(caches), 0x41).view(dtype)
    kv_write_reference(
        turned[:, num_heads : num_heads + num_kv_heads], turned[:, num_heads + num_kv_heads :],
        *expected, slots, (k_scale, v_scale),
    )  # fmt: skip
    assert torch.equal(as_bytes(caches), as_bytes(expected))
    by_definition = torch.full_like(as_bytes(caches), 0x41).view(dtype)
    rope_kv_write_reference(
        turned.float(), cos * 0 + 1, signed_sin * 0, None, 1e-6, *by_definition, slots, (k_scale, v_scale)
    )
    assert torch.equal(as_bytes(by_definition), as_bytes(expected))


@both
@settings(max_examples=times(8, 60))
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=5),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([None, 5]),
    st.sampled_from([None, 2.0]),
    st.integers(0, 1000),
)
def test_attention_to_quantized_keys_is_attention_to_the_values_that_they_stand_for(
    dtype: torch.dtype,
    sizes: list[tuple[int, int]],
    block_size: int,
    window: int | None,
    soft_cap: float | None,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query_lens, kv_lens = [n for n, _ in sizes], [n + before for n, before in sizes]
    counts = [-(-n // block_size) for n in kv_lens]
    tables = torch.nn.utils.rnn.pad_sequence(
        list(torch.randperm(sum(counts), generator=generator).int().split(counts)), batch_first=True
    )
    k_scale, v_scale = (torch.rand(2, 2, generator=generator) + 0.5) * 4 / LARGEST[dtype]
    k, v = torch.randn(2, sum(counts), block_size, 2, 8, generator=generator)
    k, v = quantize_kv_reference(k, k_scale, dtype), quantize_kv_reference(v, v_scale, dtype)
    exact_k, exact_v = (dequantize_kv_reference(x, scale).double() for x, scale in ((k, k_scale), (v, v_scale)))
    q = torch.randn(sum(query_lens), 4, 8, generator=generator)
    expected = paged_attention_reference(
        q.double(), exact_k, exact_v, tables, query_lens, kv_lens, 0.3, window, soft_cap
    )
    for attend in (paged_attention_reference, paged_attention_cpu):
        found = attend(q, k, v, tables, query_lens, kv_lens, 0.3, window, soft_cap, scales=(k_scale, v_scale))
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


@both
@pytest.mark.parametrize("heads", [(2, 16), (1, 18)], ids=["words of four values", "of two"])
def test_quantized_keys_of_drafts_are_moved_as_they_are(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    cache, other = (
        torch.randint(256, (6, 4, *heads), dtype=torch.uint8, generator=generator).view(dtype).to(DEVICE)
        for _ in range(2)
    )
    expected = as_bytes(cache).clone().flatten(0, 1)
    table, num_known, path = [3, 5, 1], 6, [1, 3, -1]  # two of the drafts hold: 1 and 3 become 0 and 1

    def slot(position: int) -> int:
        return table[position // 4] * 4 + position % 4

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    for place, node in enumerate(path[:2]):
        expected[slot(num_known + place)] = expected[slot(num_known + node)].clone()
    now_known = ints(num_known + 2 + 1)  # and the token that was sampled after them
    KVMover([(cache, other)]).move(ints(*path)[None], ints(0, 1), ints(0), now_known, ints(*table)[None])
    assert torch.equal(as_bytes(cache).flatten(0, 1), expected)
