"""The torch references equal the definitions, written here as loops over tokens and heads."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm.layers.linear import Linear
from teachllm.layers.weights.dense_weight import DenseWeight
from teachllm_kernels import rms_norm, silu_and_mul, step_inputs
from teachllm_kernels.attention import decode_plan, hopper_decode, kv_write, paged_attention, rope_kv_write, rotary
from teachllm_kernels.attention.kv_write import kv_write_reference
from teachllm_kernels.attention.paged_attention import paged_attention_cpu, paged_attention_reference
from teachllm_kernels.attention.rotary import rotary_reference
from teachllm_kernels.linear import dense_gemm
from teachllm_kernels.moe import grouped_gemm, moe_routing
from teachllm_kernels.rms_norm import prepare_rms_norm, rms_norm_cpu, rms_norm_reference
from teachllm_kernels.silu_and_mul import silu_and_mul_reference
from teachllm_lessons.helpers.lesson_01 import contract_attend
from tests.thorough import times

ROOT = Path(__file__).resolve().parents[2]


def _attention_by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, soft_cap: float | None
) -> torch.Tensor:
    """One sequence, a token and a head at a time: q [num_queries, heads, size], k and v [kv_len, kv_heads, size]."""
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for row in range(q.shape[0]):
        position = k.shape[0] - q.shape[0] + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            scores = k[first : position + 1, head // group] @ q[row, head] * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            out[row, head] = scores.softmax(dim=0) @ v[first : position + 1, head // group]
    return out


@st.composite
def _batches(draw: st.DrawFn) -> dict:
    kv_lens = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    return {
        "kv_lens": kv_lens,
        "query_lens": [draw(st.sampled_from([1, draw(st.integers(1, n))])) for n in kv_lens],
        "block_size": draw(st.sampled_from([1, 3, 16, 64])),
        "kv_heads": draw(st.sampled_from([1, 2])),
        "group": draw(st.sampled_from([1, 3])),
        "window": draw(st.sampled_from([None, 1, 5, 100])),
        "soft_cap": draw(st.sampled_from([None, 2.0])),
        "tile": draw(st.sampled_from([1, 4, 128])),
        "padding": draw(st.sampled_from([0, 50, 1024])),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=times(40, 400))
@given(_batches())
def test_paged_attention_equals_the_definition_for_every_batch_and_layout(batch: dict) -> None:
    generator = torch.Generator().manual_seed(batch["seed"])
    size, block_size, kv_heads = 8, batch["block_size"], batch["kv_heads"]
    counts = [-(-n // block_size) for n in batch["kv_lens"]]
    blocks = torch.randperm(sum(counts), generator=generator).int().split(counts)
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    caches = [torch.full((sum(counts), block_size, kv_heads, size), torch.nan, dtype=torch.float64) for _ in "kv"]
    queries, expected = [], []
    for row, (num_queries, kv_len) in enumerate(zip(batch["query_lens"], batch["kv_lens"], strict=True)):
        tables[row, : counts[row]] = blocks[row]
        k, v = torch.randn(2, kv_len, kv_heads, size, generator=generator, dtype=torch.float64)
        for index in range(kv_len):
            place = (int(blocks[row][index // block_size]), index % block_size)
            caches[0][place], caches[1][place] = k[index], v[index]
        shape = (num_queries, kv_heads * batch["group"], size)
        queries.append(torch.randn(shape, generator=generator, dtype=torch.float64))
        expected.append(_attention_by_definition(queries[-1], k, v, 0.4, batch["window"], batch["soft_cap"]))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(paged_attention, "_QUERY_TILE", batch["tile"])
        monkeypatch.setattr(paged_attention, "_PADDING_WORTH_A_LAUNCH", batch["padding"])
        for attention in (paged_attention_reference, paged_attention_cpu):
            got = attention(
                torch.cat(queries),
                k_cache=caches[0],
                v_cache=caches[1],
                block_tables=tables,
                query_lens=batch["query_lens"],
                kv_lens=batch["kv_lens"],
                scale=0.4,
                window=batch["window"],
                soft_cap=batch["soft_cap"],
            )
            torch.testing.assert_close(got, torch.cat(expected), rtol=1e-12, atol=1e-12)


def test_paged_attention_keeps_the_contract_that_readers_of_lesson_01_are_given() -> None:
    def of_one_block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        table = torch.zeros((1, 1), dtype=torch.int32)
        return paged_attention_cpu(q, k.unsqueeze(0), v.unsqueeze(0), table, [len(q)], [len(k)], scale)

    assert contract_attend(of_one_block) > 10


def test_paged_attention_cost_counts_every_pair_of_query_and_key() -> None:
    query_lens, kv_lens = [1, 5, 3], [9, 5, 10]
    pairs = sum(kv - n + i + 1 for n, kv in zip(query_lens, kv_lens, strict=True) for i in range(n))
    num_bytes, flops = paged_attention.cost(query_lens, kv_lens, num_heads=4, num_kv_heads=2, head_size=8)
    assert flops == pairs * 4 * (2 * 8 + 2 * 8)
    assert num_bytes == 2 * (2 * 9 * 4 * 8 + 2 * 24 * 2 * 8)


def test_kv_write_fills_its_slots_and_no_other() -> None:
    k, v = torch.randn(2, 4, 2, 8)
    k_cache, v_cache = torch.zeros(2, 3, 4, 2, 8)
    kv_write_reference(k, v, k_cache, v_cache, torch.tensor([5, -1, 0, 11]))
    for cache, source in ((k_cache, k), (v_cache, v)):
        rows = cache.view(12, 2, 8)
        assert torch.equal(rows[[5, 0, 11]], source[[0, 2, 3]])
        unwritten = [slot for slot in range(12) if slot not in (5, 0, 11)]
        assert not rows[unwritten].any()


def test_kv_write_of_padding_alone_writes_nothing() -> None:
    k_cache, v_cache = torch.zeros(2, 3, 4, 2, 8)
    kv_write_reference(torch.ones(2, 2, 8), torch.ones(2, 2, 8), k_cache, v_cache, torch.tensor([-1, -1]))
    assert not k_cache.any() and not v_cache.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm_adds_then_divides_by_the_root_mean_square(dtype: torch.dtype) -> None:
    y, residual = torch.randn(2, 5, 16, dtype=torch.float64).to(dtype)
    weight = torch.randn(16, dtype=torch.float64).to(dtype)
    on_cpu = rms_norm_cpu(y, residual, prepare_rms_norm(weight, 1e-5))
    for normed, total in (rms_norm_reference(y, residual, weight, 1e-5), on_cpu):
        assert torch.equal(total, y + residual) and normed.dtype == dtype
        for row, x in zip(normed, total.double(), strict=True):
            rms = math.sqrt(sum(float(e) ** 2 for e in x) / 16 + 1e-5)
            tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
            torch.testing.assert_close(row.double(), x / rms * weight.double(), rtol=tolerance, atol=tolerance)


def test_rms_norm_takes_a_weight_per_head() -> None:
    x, weight = torch.randn(5, 3, 8), torch.randn(3, 8)
    normed, total = rms_norm_reference(x, None, weight, 1e-5)
    assert total is x
    for head in range(3):
        torch.testing.assert_close(normed[:, head], rms_norm_reference(x[:, head], None, weight[head], 1e-5)[0])


@settings(max_examples=times(20, 200))
@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_rotated_dot_products_depend_on_distance_alone(a: int, b: int, shift: int) -> None:
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 16, 2, dtype=torch.float64) / 16)

    def turn(x: torch.Tensor, position: int) -> torch.Tensor:
        cos, sin = (position * frequencies).cos(), (position * frequencies).sin()
        return rotary_reference(x, torch.cat((cos, cos)).view(1, 1, -1), torch.cat((-sin, sin)).view(1, 1, -1))

    there, elsewhere = (turn(q, a + s).mul(turn(k, b + s)).sum() for s in (0, shift))
    torch.testing.assert_close(there, elsewhere)
    torch.testing.assert_close(turn(q, a).norm(), q.norm())


def test_silu_and_mul_gates_the_second_half_by_the_first() -> None:
    gate_up = torch.randn(3, 10, dtype=torch.float64)
    expected = [[g / (1 + math.exp(-g)) * u for g, u in zip(r[:5], r[5:], strict=True)] for r in gate_up.tolist()]
    torch.testing.assert_close(silu_and_mul_reference(gate_up), torch.tensor(expected, dtype=torch.float64))


def test_costs_count_each_number_once() -> None:
    assert dense_gemm.cost(2, 3, 5, 4) == ((2 * 3 + 2 * 5 + 15) * 4, 2 * 2 * 15)
    assert dense_gemm.cost(2, 3, 5, 4, gated=True) == ((2 * 3 + 2 * 5 + 30) * 4, 2 * 2 * 30)
    # Six rows in and out of three experts' weights; ten tokens' sums of two parts each.
    assert grouped_gemm.cost(6, 3, 5, 3, 4) == ((6 * 3 + 6 * 5 + 3 * 15) * 4, 2 * 6 * 15)
    assert grouped_gemm.cost(6, 3, 5, 3, 4, gated=True) == ((6 * 3 + 6 * 5 + 3 * 30) * 4, 2 * 6 * 30)
    assert moe_routing.cost(10, 64, 2, 4) == ((2 * 640 + 640) * 4, 2 * 640)
    assert rms_norm.cost(10, 64, 4) == ((4 * 640 + 64) * 4, 3200)  # y and residual in, both out, the weight
    assert silu_and_mul.cost(10, 64, 4) == (3 * 640 * 4, 3200)  # gate and up in, the product out
    assert kv_write.cost(10, 2, 8, 4) == (4 * 160 * 4 + 80, 0)  # k and v in and out, the slots
    assert rotary.cost(10, 2, 8, 4) == (10 * (16 + 16 + 4 + 4) * 4, 480)  # x in and out, cos and sin of four angles
    # q of four heads, k and v of two: 64 numbers a token.
    assert rope_kv_write.cost(10, 4, 2, 8, 4) == (10 * ((64 + 64 + 4 + 4) * 4 + 8), 10 * 6 * 8 * 7)
    # A token: those in, the angles in, k and v out, the result out. And K and V of 2 + 4 older ones in.
    num_bytes, flops = hopper_decode.cost([3, 5], 4, 2, 8, 4)
    assert num_bytes == (2 * (64 + 8 + 32 + 32) + 6 * 32) * 4
    assert flops == 2 * 6 * 8 * 7 + (3 + 5) * 4 * (2 * 8 + 2 * 8)
    assert step_inputs.cost(10) == (320, 0)  # a token: id and block in, 4 bytes each; id, position and slot out, 8 each
    assert decode_plan.cost(3, 5) == (3 * 12 + 5 * 32, 0)
    assert step_inputs.cost(10, 2, 5) == (320 + 2 * 28 + 5 * 8, 0)


def test_references_and_models_import_where_triton_is_not_installed() -> None:
    folder = ROOT / "kernels"
    paths = [path.relative_to(folder).with_suffix("") for path in (folder / "teachllm_kernels").rglob("*.py")]
    compiling = {"variants", "compile_pool", "kernel_cache"}  # what Triton is needed for
    names = [".".join(path.parts) for path in paths if path.stem not in compiling | {"__init__"}]
    with patch.dict(sys.modules):
        for name in list(sys.modules):
            if name.split(".")[0] in ("teachllm", "teachllm_kernels", "triton"):
                del sys.modules[name]
        sys.modules["triton"] = None  # type: ignore[assignment]
        for name in [*names, "teachllm.loading.loader"]:
            importlib.import_module(name)
        assert sys.modules["teachllm_kernels.rms_norm"] is not rms_norm


@settings(max_examples=times(20, 200))
@given(rows=st.integers(1, 130), num_in=st.integers(1, 40), num_out=st.integers(1, 70), bias=st.booleans())
def test_a_packed_layer_equals_the_plain_one(rows: int, num_in: int, num_out: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    layer = Linear(num_in, {"proj": num_out}, bias).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_(generator=generator)
    x = torch.randn(rows, num_in, generator=generator)
    assert isinstance(layer.weight, DenseWeight)
    plain = dense_gemm.linear_reference(x, layer.weight.weight, layer.bias)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dense_gemm, "SMALLEST", 0)
        layer.finish()
    assert (layer.weight.packed is not None) == torch.backends.mkldnn.is_available()
    torch.testing.assert_close(layer(x), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of PyTorch lacks oneDNN")
@pytest.mark.parametrize("num_in", [255, 256])
def test_a_layer_is_packed_where_that_pays(num_in: int) -> None:
    layer = Linear(num_in, {"proj": 256}, bias=False).requires_grad_(False)
    assert isinstance(layer.weight, DenseWeight)
    layer.finish()
    assert (layer.weight.packed is not None) == (256 * num_in >= dense_gemm.SMALLEST)
