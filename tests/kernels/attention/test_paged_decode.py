"""Decode attention against the reference in float64: ragged lengths, windows, several queries, trees, fusion."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm_kernels.attention import decode_plan, hopper_decode, kv_quantization
from teachllm_kernels.attention.decode_plan import DecodePlan, plan_decode
from teachllm_kernels.attention.decode_tile import add_tile
from teachllm_kernels.attention.hopper_decode import fits_hopper_decode
from teachllm_kernels.attention.kv_quantization import (
    KVScales,
    as_bytes,
    dequantize_kv_reference,
    quantize_kv_reference,
)
from teachllm_kernels.attention.paged_attention import paged_attention_reference
from teachllm_kernels.attention.paged_decode import fused_paged_decode, paged_decode_triton
from teachllm_kernels.attention.rope_kv_write import rope_kv_write_reference

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []  # natively where there is a GPU, else interpreted
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LONGEST = 3000 if ON_GPU else 200


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:  # an interpreted program costs milliseconds even if it has nothing to do
        monkeypatch.setattr(decode_plan, "_MULTIPROCESSORS", 2)  # so that a few sequences are many
        monkeypatch.setattr(decode_plan, "_MAX_UNSORTED_SEQS", 2)


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
        """K and V in float64, what nobody wrote is 0."""
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
    """Blocks in random order; whatever no sequence wrote is NaN. `kv_dtype`: of a quantized cache."""
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
    moved = (t.to(DEVICE) for t in (tables, rows, starts, seq_lens))
    return Batch(wide[:, :num_heads], k_cache, v_cache, *moved, scales)  # tokens of q lie apart


def plan_for(
    batch: Batch,
    num_heads: int,
    max_query_len: int,
    window: int | None,
    fused: bool = False,
    on_hopper: bool = False,
    num_before: int = 0,
) -> DecodePlan:
    _, _, num_kv_heads, head_size = batch.k_cache.shape
    sizes = (len(batch.rows), num_heads, num_kv_heads, head_size)
    plan = DecodePlan.allocate(*sizes, DEVICE, max_query_len, on_hopper)
    seen = None if window is None else window + num_before + max_query_len - 1
    plan_decode(plan, batch.seq_lens, batch.query_start, batch.rows, num_kv_heads, seen, fused)
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
    """What a kernel is compiled for; few of them, since that takes longer than to run it."""

    heads: tuple[int, int]
    head_size: int
    dtype: torch.dtype
    block_size: int = 16
    window: int | None = None
    cap: float | None = None
    kv_dtype: torch.dtype | None = None


FP8, INT8 = torch.float8_e4m3fn, torch.int8
HALF = torch.bfloat16 if ON_GPU else torch.float16
KINDS = [
    Kind((1, 1), 32, torch.float32),
    Kind((4, 2), 128, HALF),
    Kind((6, 2), 64, torch.float16, 48, cap=20.0),
    Kind((4, 1), 80, torch.float32, window=50),
    Kind((4, 2), 64, HALF, window=1),
    Kind((2, 2), 256, HALF),
    Kind((1, 1), 32, torch.float32, kv_dtype=INT8),
    Kind((4, 2), 128, HALF, kv_dtype=FP8),
    Kind((6, 2), 64, torch.float16, 48, cap=20.0, kv_dtype=INT8),
    Kind((4, 1), 80, torch.float32, window=50, kv_dtype=FP8),
]
kinds = st.sampled_from(KINDS)
examples = settings(max_examples=12 if not ON_GPU else 80)


@examples
@given(st.lists(st.integers(1, LONGEST), min_size=1, max_size=4), kinds)
def test_one_token_a_sequence(lens: list[int], kind: Kind) -> None:
    check_one_token(lens, kind)


@pytest.mark.parametrize("has_fp8", [True, False], ids=["cast", "shifted"])
def test_quantized_kv_with_and_without_an_instruction_for_e4m3(has_fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_quantization, "has_fp8", lambda device: has_fp8)
    for kind in (Kind((4, 2), 64, HALF, kv_dtype=FP8), Kind((2, 1), 32, torch.float32, kv_dtype=FP8)):
        check_one_token([100, 3], kind)
        check_fused([40, 17], kind, has_norm=False)


def check_one_token(lens: list[int], kind: Kind) -> None:
    query_lens = [1] * len(lens)
    batch = make_batch(lens, query_lens, kind.heads, kind.head_size, kind.block_size, kind.dtype, kind.kv_dtype)
    plan = plan_for(batch, kind.heads[0], 1, kind.window)
    expected = reference(batch, query_lens, 0.3, kind.window, kind.cap)
    where = (batch.q, batch.k_cache, batch.v_cache, batch.tables, batch.query_start, plan, 0.3)
    for _ in range(2):  # the second launch finds the arrivals as the first left them
        out = torch.full(expected.shape, float("nan"), dtype=kind.dtype, device=DEVICE)
        paged_decode_triton(*where, kind.window, kind.cap, out=out, scales=batch.scales)
        assert_near(out, expected)
        assert not plan.finished.any()


@examples
@given(
    st.lists(st.tuples(st.integers(1, LONGEST), st.integers(1, 64)), min_size=1, max_size=3),
    st.sampled_from([8, 17, 64]),
    st.sampled_from([KINDS[1], KINDS[2], KINDS[3], KINDS[7], KINDS[9]]),
)
def test_several_tokens_a_sequence(sizes: list[tuple[int, int]], most: int, kind: Kind) -> None:
    query_lens = [min(count, most) for _, count in sizes]
    lens = [before + count - 1 for (before, _), count in zip(sizes, query_lens, strict=True)]
    batch = make_batch(lens, query_lens, kind.heads, kind.head_size, 16, kind.dtype, kind.kv_dtype)
    plan = plan_for(batch, kind.heads[0], most, kind.window)
    out = paged_decode_triton(
        *(batch.q, batch.k_cache, batch.v_cache, batch.tables, batch.query_start, plan, 0.3, kind.window),
        max_query_len=most,
        scales=batch.scales,
    )
    assert_near(out, reference(batch, query_lens, 0.3, kind.window, None))


def test_no_more_tokens_a_sequence_than_the_plan_has_room_for() -> None:
    batch = make_batch([20], [2], (2, 1), 32, 16, torch.float32)
    where = (batch.q, batch.k_cache, batch.v_cache, batch.tables, batch.query_start, plan_for(batch, 2, 1, None), 0.3)
    with pytest.raises(AssertionError):
        paged_decode_triton(*where, max_query_len=2)


@st.composite
def trees(draw: st.DrawFn) -> list[list[int]]:
    """What each node of a tree of drafts sees: its ancestors, the root first, and itself."""
    sees = [[0]]
    for node in range(1, draw(st.integers(2, 64))):
        sees.append([*sees[draw(st.integers(0, node - 1))], node])
    return sees


@examples
@given(
    trees(),
    st.lists(st.tuples(st.integers(0, LONGEST), st.integers(1, 64)), min_size=1, max_size=3),
    st.sampled_from([0, 0, 1, 5]),
    st.sampled_from(
        [
            KINDS[1],
            Kind((4, 1), 80, torch.float32, window=20),
            Kind((2, 2), 64, HALF, 48, window=2),
            Kind((2, 1), 64, HALF, kv_dtype=FP8),
        ]
    ),
)
def test_a_tree_of_drafts(tree: list[list[int]], sizes: list[tuple[int, int]], first: int, kind: Kind) -> None:
    """Of which some tokens may be in the cache, and each sequence has only the first few."""
    first = min(first, len(tree) - 1)
    most = len(tree) - first
    befores, query_lens = [before for before, _ in sizes], [min(count, most) for _, count in sizes]
    lens = [before + first + count for before, count in zip(befores, query_lens, strict=True)]
    batch = make_batch(lens, query_lens, kind.heads, kind.head_size, kind.block_size, kind.dtype, kind.kv_dtype)
    out = paged_decode_triton(
        *(batch.q, batch.k_cache, batch.v_cache, batch.tables, batch.query_start),
        *(plan_for(batch, kind.heads[0], most, kind.window, num_before=first), 0.3, kind.window),
        max_query_len=most,
        tree=torch.tensor([sum(1 << j for j in who) - ((who[-1] == 63) << 64) for who in tree], device=DEVICE),
        first_place=first,
        out=torch.full_like(batch.q, float("nan"), memory_format=torch.contiguous_format),
        scales=batch.scales,
    )
    nodes = [(seq, node) for seq, count in enumerate(query_lens) for node in tree[first : first + count]]
    expected = [
        attend_to(batch, kind, seq, token, seen(befores[seq], who, kind.window))
        for token, (seq, who) in enumerate(nodes)
    ]
    assert_near(out, torch.stack(expected))


def seen(before: int, who: list[int], window: int | None) -> list[int]:
    """Indices of the keys that a node sees: a path's tokens have positions one after the other, wherever they lie."""
    path = [*range(before), *(before + node for node in who)]
    return path if window is None else path[-window:]


def attend_to(batch: Batch, kind: Kind, seq: int, token: int, keys: list[int]) -> torch.Tensor:
    """[num_heads, head_size] in float64: one token's attention to some of its sequence's keys."""
    table = batch.tables[batch.rows[seq].long()].tolist()
    slots = [table[i // kind.block_size] * kind.block_size + i % kind.block_size for i in keys]
    group = kind.heads[0] // kind.heads[1]
    k, v = (cache.flatten(0, 1)[slots].repeat_interleave(group, dim=1) for cache in batch.dequantized())
    weights = (torch.einsum("hd,khd->hk", batch.q[token].double(), k) * 0.3).softmax(dim=-1)
    return torch.einsum("hk,khd->hd", weights, v)


@examples
@given(st.lists(st.integers(1, LONGEST), min_size=1, max_size=3), kinds, st.booleans())
def test_fused_is_norm_rotation_write_and_attention(lens: list[int], kind: Kind, has_norm: bool) -> None:
    check_fused(lens, kind, has_norm)


HOPPER_KINDS = [
    Kind((4, 2), 128, torch.bfloat16),
    Kind((8, 1), 128, torch.float16, 48),
    Kind((6, 2), 64, torch.bfloat16, window=100),
    Kind((12, 1), 128, torch.bfloat16, window=1),
]


@pytest.mark.gpu
@pytest.mark.skipif(
    not ON_GPU or not fits_hopper_decode(DEVICE, torch.bfloat16, 128, 2, 16), reason="needs a Hopper card"
)
@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 150), min_size=1, max_size=20),
    st.integers(1, 2000),
    st.sampled_from(HOPPER_KINDS),
    st.booleans(),
    st.sampled_from([2, 128]),  # multiprocessors to plan for: more than one wave, or less
)
def test_fused_on_hopper(lens: list[int], longest: int, kind: Kind, has_norm: bool, multiprocessors: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_plan, "_MULTIPROCESSORS", multiprocessors)
        check_fused([*lens, longest], kind, has_norm, on_hopper=True)


def test_hopper_copies_do_not_cross_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_decode, "has_hopper", lambda device: True)
    fitting = [size for size in (1, 8, 16, 20, 24, 32, 48, 100, 256) if fits_hopper_decode(DEVICE, HALF, 128, 2, size)]
    assert fitting == [16, 32, 48, 256]


def check_fused(lens: list[int], kind: Kind, has_norm: bool, on_hopper: bool = False) -> None:
    (num_heads, num_kv_heads), head_size, dtype, size, window, _, kv_dtype = kind
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
    caches = batch.dequantized()
    turned = qkv.double()
    rope_kv_write_reference(
        turned, cos.double(), signed_sin.double(), None if weight is None else weight.double(), 1e-6, *caches, slots
    )
    for cache in (batch.k_cache, batch.v_cache):  # what is written may not be read before
        as_bytes(cache).flatten(0, 1)[slots] = torch.nan if kv_dtype is None else 127
    plan = plan_for(batch, num_heads, 1, window, True, on_hopper)
    before = qkv.clone()
    out = fused_paged_decode(
        *(qkv, cos, signed_sin, weight, 1e-6, batch.k_cache, batch.v_cache, batch.tables, plan, 0.3, window),
        scales=batch.scales,
    )
    assert torch.equal(qkv, before) and not plan.finished.any()
    # What attention reads is of the dtype, fused or not: what this rounding costs is not its own error.
    read = [tensor.to(dtype) for tensor in (turned[:, :num_heads], *caches)]
    written = batch._replace(q=read[0])
    if batch.scales is None:
        written = written._replace(k_cache=read[1], v_cache=read[2])
    assert_near(out, reference(written, query_lens, 0.3, window, None))
    for cache, expected in zip(
        (batch.k_cache, batch.v_cache) if kv_dtype is None else batch.dequantized(), caches, strict=True
    ):
        mine, theirs = cache.flatten(0, 1)[slots], expected.flatten(0, 1)[slots]
        if kv_dtype is None:
            assert_near(mine, theirs)
            continue
        scale = batch.scales[0 if expected is caches[0] else 1].double()[:, None]
        assert_rounded(mine / scale, theirs / scale, kv_dtype, TOLERANCE[dtype])


def assert_rounded(quantized: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, tolerance: float) -> None:
    """Quantized values are next to the exact ones, in steps; what is between two may go either way."""
    exact = exact.clamp(-kv_quantization.LARGEST[dtype], kv_quantization.LARGEST[dtype])
    step = torch.ones_like(exact)
    if dtype == FP8:
        step = torch.exp2(exact.abs().clamp(min=2.0**-6).log2().floor() - 3)
    assert ((quantized - exact).abs() <= 0.51 * step + tolerance * exact.abs()).all()


@pytest.mark.parametrize("num_seqs", [5, 6, 8, 12, 16, 20, 24])
def test_each_shape_of_programs(num_seqs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_plan, "_MULTIPROCESSORS", 2)
    lens = [i * 1237 % LONGEST + 1 for i in range(num_seqs)]
    batch = make_batch(lens, [1] * num_seqs, (2, 1), 64, 16, torch.float16)
    plan = plan_for(batch, 2, 1, None)
    out = paged_decode_triton(batch.q, batch.k_cache, batch.v_cache, batch.tables, batch.query_start, plan, 0.3)
    assert_near(out, reference(batch, [1] * num_seqs, 0.3, None, None))


def test_padding_has_no_items_and_gets_no_output() -> None:
    batch = make_batch([20, 30], [1, 1], (2, 1), 32, 16, torch.float32)
    lens, rows = batch.seq_lens.clone(), batch.rows.clone()
    lens[1], rows[1] = 0, -1
    plan = plan_for(batch._replace(seq_lens=lens, rows=rows), 2, 1, None)
    out = torch.full((2, 2, 32), 7.0, device=DEVICE)
    paged_decode_triton(batch.q, batch.k_cache, batch.v_cache, batch.tables, batch.query_start, plan, 0.3, out=out)
    assert_near(out[:1], reference(batch, [1, 1], 0.3, None, None)[:1])
    assert (out[1] == 7.0).all()


def test_a_tile_is_added_as_the_lesson_asks_of_its_readers() -> None:
    from teachllm_lessons.helpers.lesson_08 import (
        contract_update,  # brings the whole engine: not for all that is run here
    )

    assert contract_update(add_tile) > 10
