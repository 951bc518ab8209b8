"""Prefill attention through block tables gives what the definition gives, and reads and writes nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm_kernels._hopper import has_hopper
from teachllm_kernels._triton import triton
from teachllm_kernels.attention import kv_quantization
from teachllm_kernels.attention.paged_prefill import paged_prefill_triton
from teachllm_kernels.attention.prefill_plan import plan_prefill
from tests.kernels.attention.prefill_cases import TOLERANCE, Shape, check, draw_inputs, expected, prefill_on_hopper
from tests.kernels.cases import DEVICE, FLOATS, HALF, ON_GPU, pairs, per_device
from tests.thorough import THOROUGH, times

# Rows of a tile past its sequence's end: in a window they see nothing, 0 / 0, and are never stored.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning"),
    *([pytest.mark.gpu] if ON_GPU else []),  # natively where there is a GPU, else interpreted
]
FP8, INT8 = torch.float8_e4m3fn, torch.int8


@st.composite
def shapes(draw: st.DrawFn, dtypes: list[torch.dtype], longest: int) -> Shape:
    num_seqs = draw(st.integers(1, 4))
    lengths = st.lists(st.integers(1, longest), min_size=num_seqs, max_size=num_seqs)
    contexts = st.lists(st.integers(0, longest), min_size=num_seqs, max_size=num_seqs)
    return Shape(
        query_lens=draw(lengths),
        context_lens=draw(contexts),
        block_size=draw(st.sampled_from([16, 32, 48])),
        num_kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 2, 3, 4])),
        head_size=draw(st.sampled_from([32, 64, 80, 128])),
        dtype=draw(st.sampled_from(dtypes)),
        window=draw(st.none() | st.integers(1, 2 * longest)),
        soft_cap=draw(st.sampled_from([None, 0.5, 30.0])),
        kv_dtype=draw(st.sampled_from([None, None, torch.float8_e4m3fn, torch.int8])),
    )


HAS_HOPPER = has_hopper(DEVICE)
ON_HOPPER = [prefill_on_hopper, partial(prefill_on_hopper, longest=10_000)]  # tiles of 64 and of 128 keys
needs_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
PREFILLS = [paged_prefill_triton, *(pytest.param(prefill, marks=needs_hopper) for prefill in ON_HOPPER)]


# What the kernel is compiled for, which takes longer than to run it: only lengths are drawn.
HOPPER_SHAPES = [
    {"head_size": 128, "group": 2, "num_kv_heads": 8, "dtype": torch.bfloat16},
    {"head_size": 128, "group": 4, "num_kv_heads": 2, "dtype": torch.float16, "block_size": 32, "window": 100},
    {"head_size": 128, "group": 64, "num_kv_heads": 1, "dtype": torch.bfloat16, "window": 1},
    {"head_size": 64, "group": 8, "num_kv_heads": 2, "dtype": torch.bfloat16, "block_size": 48},
    {"head_size": 64, "group": 1, "num_kv_heads": 3, "dtype": torch.float16, "window": 700},
    {"head_size": 128, "group": 4, "num_kv_heads": 8, "dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn},
    {"head_size": 64, "group": 8, "num_kv_heads": 2, "dtype": torch.float16, "kv_dtype": torch.int8, "window": 100},
]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("prefill", ON_HOPPER, ids=["64", "128"])
@pytest.mark.parametrize("shape", HOPPER_SHAPES, ids=str)
def test_any_ragged_batch_equals_the_reference_on_hopper(
    prefill: Callable[..., torch.Tensor], shape: dict[str, Any]
) -> None:
    lengths = st.tuples(st.integers(1, 700), st.integers(0, 700))

    @settings(max_examples=40)
    @given(st.lists(lengths, min_size=1, max_size=5), st.integers(0, 2**32 - 1))
    def run(sequences: list[tuple[int, int]], seed: int) -> None:
        query_lens, context_lens = zip(*sequences, strict=True)
        check(Shape(list(query_lens), list(context_lens), **shape), seed, prefill)

    run()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("prefill", ON_HOPPER, ids=["64", "128"])
@pytest.mark.parametrize("window", [None, 100])
def test_many_tiles_to_a_program(prefill: Callable[..., torch.Tensor], window: int | None) -> None:
    rng = random.Random(window)
    lens = [rng.randint(1, 700) for _ in range(60)]
    contexts = [rng.choice([0, rng.randint(1, 500)]) for _ in lens]
    shape = Shape(lens, contexts, num_kv_heads=8, group=4, head_size=128, dtype=torch.bfloat16, window=window)
    check(shape, prefill=prefill)


@pytest.mark.parametrize("seed", range(per_device(times(2, 30), 30)))
def test_a_plan_lists_every_tile_once_and_those_with_the_most_keys_first(seed: int) -> None:
    rng = random.Random(seed)
    sequences = [(rng.randint(1, 60), rng.randint(0, 60), rng.random() < 0.3) for _ in range(rng.randint(2, 9))]
    query_lens, contexts, is_padding = zip(*sequences, strict=True)
    rows = [-1 if padding else 3 * i for i, padding in enumerate(is_padding)]
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    lens = [query + context for query, context in zip(query_lens, contexts, strict=True)]
    plan = plan_prefill(
        torch.as_tensor(starts, dtype=torch.int32, device=DEVICE),
        torch.as_tensor(lens, dtype=torch.int32, device=DEVICE),
        torch.as_tensor(rows, dtype=torch.int32, device=DEVICE),
        num_tokens=int(starts[-1]),
        group=8,
    )
    items = plan.items[: plan.count.item()].tolist()
    wanted = [
        [start + first, min(query - first, 16), context + first, row]
        for start, query, context, row in zip(starts.tolist(), query_lens, contexts, rows, strict=False)
        for first in range(0, query, 16)
        if row >= 0
    ]
    assert sorted(items) == sorted(wanted)
    levels = [position // 16 for _, _, position, _ in items]
    assert levels == sorted(levels, reverse=True)


@pytest.mark.gpu
@pytest.mark.parametrize("prefill", PREFILLS)
def test_another_batch_compiles_nothing(prefill: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts stand behind any number of decodes, so what is the step's may begin at any address."""
    compiled: list[str] = []
    hook = "jit_post_compile_hook"
    for first, num_seqs in ((0, 3), (1, 1), (2, 16), (3, 17), (4, 33)):
        lens = [1] * first + [20] * num_seqs
        inputs = draw_inputs(Shape(lens, [0] * len(lens), dtype=torch.float16, head_size=64, group=2), seed=0)
        tokens = slice(first, None)
        inputs |= {name: inputs[name][tokens] for name in ("q", "out", "rows", "seq_lens")}
        inputs["query_start"] = inputs["query_start"][first:] - first
        prefill(**inputs)
        monkeypatch.setattr(triton.knobs.runtime, hook, lambda **what: compiled.append(what["repr"]))
    assert not compiled


@pairs(
    few=5,
    lens=[([40, 1], [0, 35]), ([5, 33], [30, 3])],
    block_size=[16, 48],
    num_kv_heads=[1, 2],
    group=[1, 3],
    head_size=[32, 80],
    dtype=FLOATS,
    window=[None, 20],
    soft_cap=[None, 0.5],
    kv_dtype=[None, FP8, INT8],
    is_fixed=[False, True],
)
def test_a_ragged_batch_equals_the_reference(
    lens: tuple[list[int], list[int]],
    block_size: int,
    num_kv_heads: int,
    group: int,
    head_size: int,
    dtype: torch.dtype,
    window: int | None,
    soft_cap: float | None,
    kv_dtype: torch.dtype | None,
    is_fixed: bool,
) -> None:
    shape = Shape(*lens, block_size, num_kv_heads, group, head_size, dtype, window, soft_cap, kv_dtype)
    check(shape, prefill=partial(paged_prefill_triton, is_fixed=is_fixed))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_any_long_ragged_batch_equals_the_reference_on_the_gpu(dtype: torch.dtype) -> None:
    @settings(max_examples=15)
    @given(shapes([dtype], longest=700), st.integers(0, 2**32 - 1), st.booleans())
    def run(shape: Shape, seed: int, is_fixed: bool) -> None:
        check(shape, seed, partial(paged_prefill_triton, is_fixed=is_fixed))

    run()


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_head_size_fits_on_the_gpu(head_size: int, dtype: torch.dtype) -> None:
    check(Shape([300, 1, 40], [50, 200, 0], head_size=head_size, group=4, dtype=dtype))


@pytest.mark.parametrize("has_fp8", per_device([True], [True, False]))
def test_quantized_keys_with_and_without_an_instruction_for_e4m3(
    has_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_quantization, "has_fp8", lambda device: has_fp8)
    check(Shape([40, 1, 7], [20, 30, 0], num_kv_heads=1, head_size=64, dtype=torch.float16, kv_dtype=FP8))


# Interpreted tiles of float32 have 32 queries and 32 keys.
@pytest.mark.parametrize(
    ("window", "block_size"),
    per_device([(1, 16), (32, 48), (33, 16)], [(1, 16), (16, 48), (64, 16), (65, 32), (1000, 16)]),
)
def test_windows_end_where_they_should_at_every_tile_edge(window: int, block_size: int) -> None:
    lens, contexts = per_device(([65, 33], [0, 31]), ([130, 65], [0, 127]))
    check(Shape(lens, contexts, block_size=block_size, num_kv_heads=1, group=1, window=window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_diagonal_is_right_on_either_side_of_every_tile_edge(dtype: torch.dtype) -> None:
    edges = per_device((32,) if dtype == torch.float32 else (128,), (32, 64, 128))
    contexts = [edge + offset for edge in edges for offset in (-3, -2, -1, 0)]
    check(Shape([3] * len(contexts), contexts, num_kv_heads=1, group=1, dtype=dtype))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("prefill", ON_HOPPER, ids=["64", "128"])
@pytest.mark.parametrize("shape", HOPPER_SHAPES, ids=str)
def test_tiles_of_keys_and_of_queries_end_where_they_should_on_hopper(
    prefill: Callable[..., torch.Tensor], shape: dict[str, Any]
) -> None:
    rows = 128 // shape["group"]  # tokens of a tile of queries
    lens = [1, 2, 63, 64, 65, 127, 128, 129, *(n * rows + offset for n in (1, 2) for offset in (-1, 0, 1))]
    check(Shape([n for n in lens if n], [0 for n in lens if n], **shape), prefill=prefill)
    contexts = [edge + offset for edge in (16, 64, 128, 256) for offset in (-3, -2, -1, 0, 1)]
    check(Shape([3] * len(contexts), contexts, **shape), prefill=prefill)


def test_a_prompt_in_chunks_equals_the_prompt_at_once() -> None:
    shape = Shape([150], [0], num_kv_heads=1, group=1)
    inputs = draw_inputs(shape, seed=1)
    whole = paged_prefill_triton(**inputs).clone()
    for begin, end in ((0, 37), (37, 128), (128, 150)):
        chunk = inputs | {"q": inputs["q"][begin:end], "out": None}
        chunk["query_start"] = torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE)
        chunk["seq_lens"] = torch.tensor([end], dtype=torch.int32, device=DEVICE)
        torch.testing.assert_close(paged_prefill_triton(**chunk), whole[begin:end], rtol=1e-5, atol=1e-5)


FIXED_KINDS = [
    *(Shape([], [], num_kv_heads=per_device(times(1, 2), 2), window=window) for window in per_device([40], [None, 40])),
    Shape([], [], num_kv_heads=1, group=4, head_size=64, dtype=HALF),
    *per_device([], [Shape([], [], num_kv_heads=1, group=3, dtype=torch.float16, window=100, soft_cap=30.0)]),
    *[Shape([], [], num_kv_heads=1, group=4, dtype=torch.float16, kv_dtype=FP8)] * (THOROUGH or ON_GPU),
]
FIXED_LENGTHS = per_device(
    [([38, 5], [19, 7])], [([700, 60, 1500], [100, 17, 60]), ([1100], [60] * 9), ([90, 1], [1, 60])]
)


@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize("kind", FIXED_KINDS, ids=str)
@pytest.mark.parametrize(("lengths", "chunk_sizes"), FIXED_LENGTHS, ids=str)
def test_with_a_fixed_order_neither_chunks_nor_neighbours_change_a_bit(
    kind: Shape, lengths: list[int], chunk_sizes: list[int]
) -> None:
    shape, chunks = replace(kind, query_lens=lengths, context_lens=[0] * len(lengths)), list(chunk_sizes)
    inputs = draw_inputs(shape, seed=1)
    together = paged_prefill_triton(**inputs, is_fixed=True).clone()
    begin, first = 0, lengths[0]
    while begin < first:  # the first sequence alone, in chunks; at its end as decodes
        end = min(begin + chunks.pop(), first) if chunks else begin + 1 if begin >= first - 2 else first - 2
        alone = inputs | {"q": inputs["q"][begin:end], "out": None, "rows": inputs["rows"][:1]}
        alone["query_start"] = torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE)
        alone["seq_lens"] = torch.tensor([end], dtype=torch.int32, device=DEVICE)
        assert torch.equal(paged_prefill_triton(**alone, is_fixed=True), together[begin:end])
        begin = end


@pytest.mark.parametrize("prefill", PREFILLS)
def test_padding_sequences_and_surplus_tiles_are_harmless(prefill: Callable[..., torch.Tensor]) -> None:
    shape = Shape([40, 3], [20, 30], num_kv_heads=per_device(1, 2), head_size=64, dtype=torch.float16)
    inputs = draw_inputs(shape, seed=2)
    alone = prefill(**inputs).clone()
    num_tokens, num_padding = len(alone), 29

    def pad(tensor: torch.Tensor, *values: int) -> torch.Tensor:
        return torch.cat([tensor, torch.tensor(values, dtype=tensor.dtype, device=DEVICE)])

    def grow(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, torch.full_like(tensor[:1], 7.0).expand(num_padding, -1, -1)])

    # Two more sequences that are padding: one has the tokens up to the buffer's end, the other has none.
    padded = inputs | {"q": grow(inputs["q"]), "out": grow(inputs["out"].fill_(torch.nan))}
    padded["rows"] = pad(inputs["rows"], -1, -1)
    padded["query_start"] = pad(inputs["query_start"], num_tokens + num_padding, num_tokens + num_padding)
    padded["seq_lens"] = pad(inputs["seq_lens"], num_padding, 0)
    result = prefill(**padded)
    assert torch.equal(result[:num_tokens], alone)
    assert (result[num_tokens:] == 7).all()

    # A grid for more tokens than the sequences have: nothing is written past theirs.
    surplus = inputs | {"q": padded["q"], "out": torch.full_like(padded["out"], torch.nan)}
    result = prefill(**surplus)
    assert torch.equal(result[:num_tokens], alone)
    assert result[num_tokens:].isnan().all()


@pytest.mark.parametrize("prefill", PREFILLS)
def test_num_tokens_bounds_the_grid_and_leaves_the_rest_alone(prefill: Callable[..., torch.Tensor]) -> None:
    shape = Shape([40, 3], [20, 30], num_kv_heads=per_device(1, 2), head_size=64, dtype=torch.float16)
    inputs = draw_inputs(shape, seed=3)
    whole = prefill(**inputs).clone()
    wider = inputs | {"q": inputs["q"].repeat(3, 1, 1), "out": inputs["out"].repeat(3, 1, 1).fill_(torch.nan)}
    result = prefill(**wider, num_tokens=len(whole))
    assert torch.equal(result[: len(whole)], whole)
    assert result[len(whole) :].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("prefill", PREFILLS)
def test_a_captured_graph_replays_another_batch(prefill: Callable[..., torch.Tensor]) -> None:
    kind = Shape([], [], head_size=64, dtype=torch.float16)
    first = replace(kind, query_lens=[60, 4, 36], context_lens=[0, 10, 300])
    second = replace(kind, query_lens=[20, 50, 30], context_lens=[280, 0, 31])
    inputs = draw_inputs(first, seed=4)
    later = draw_inputs(second, seed=5)
    for name in ("k_cache", "v_cache", "block_tables"):  # room for either batch
        big = torch.zeros([max(a, b) for a, b in zip(inputs[name].shape, later[name].shape, strict=True)])
        inputs[name] = big.to(inputs[name]).contiguous()
    padding = inputs | {"rows": torch.full_like(inputs["rows"], -1)}
    prefill(**padding)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill(**inputs)
    for name in ("k_cache", "v_cache", "block_tables"):
        region = tuple(slice(size) for size in later[name].shape)
        inputs[name][region] = later[name]
    for name in ("q", "rows", "query_start", "seq_lens"):
        inputs[name].copy_(later[name])
    inputs["out"].fill_(torch.nan)
    graph.replay()
    reference = expected(second, later)
    assert (inputs["out"].double() - reference).norm() <= TOLERANCE[kind.dtype] * reference.norm()
