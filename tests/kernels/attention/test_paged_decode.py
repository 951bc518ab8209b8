"""Decode attention against the reference in float64: ragged lengths, windows, several queries, trees, fusion."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm_kernels._hopper import has_hopper
from teachllm_kernels.attention import decode_plan, kv_quantization
from teachllm_kernels.attention.decode_tile import add_tile
from teachllm_kernels.attention.hopper_decode import takes_decode_heads
from tests.kernels.attention.decode_cases import (
    FP8,
    INT8,
    Kind,
    assert_near,
    attend_to,
    check_fused,
    check_one_token,
    decode,
    make_batch,
    plan_for,
    reference,
    seen,
)
from tests.kernels.cases import DEVICE, HALF, ON_GPU, per_device
from tests.thorough import THOROUGH, times

pytestmark = [pytest.mark.gpu] if ON_GPU else []  # natively where there is a GPU, else interpreted
LONGEST = per_device(200, 3000)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:  # an interpreted program costs milliseconds even if it has nothing to do
        monkeypatch.setattr(decode_plan, "_MULTIPROCESSORS", 1)  # so that a few sequences are many
        monkeypatch.setattr(decode_plan, "_MAX_UNSORTED_SEQS", 2)


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
ANY = THOROUGH or ON_GPU  # lengths are drawn, too


@pytest.mark.parametrize("kind", KINDS if ANY else [KINDS[i] for i in (1, 3, 5, 9)], ids=str)
@pytest.mark.parametrize("lens", [[70, 1]] + [[200], [64, 65, 3]] * ANY, ids=str)
def test_one_token_per_sequence(lens: list[int], kind: Kind) -> None:
    check_one_token(lens, kind)


def test_a_launch_leaves_the_plan_as_the_next_one_needs_it() -> None:
    check_one_token([200], KINDS[0], num_launches=2)


@pytest.mark.skipif(not ANY, reason="random lengths take time")
@settings(max_examples=40)
@given(st.lists(st.integers(1, LONGEST), min_size=1, max_size=4), st.sampled_from(KINDS), st.booleans())
def test_any_lengths(lens: list[int], kind: Kind, has_norm: bool) -> None:
    check_one_token(lens, kind)
    check_fused(lens, kind, has_norm)


@pytest.mark.parametrize("has_fp8", per_device([True], [True, False]))
def test_quantized_keys_with_and_without_an_instruction_for_e4m3(
    has_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_quantization, "has_fp8", lambda device: has_fp8)
    check_one_token([80], Kind((4, 2), 64, HALF, kv_dtype=FP8))
    check_fused([17], Kind((2, 1), 32, torch.float32, kv_dtype=FP8), has_norm=False)


SEVERAL = [
    (3, [(66, 3), (1, 1)], KINDS[1]),
    # More queries than one program takes.
    (9, [(3, 9), (1, 4)], KINDS[2] if ANY else Kind((3, 1), 64, torch.float16, 48, cap=20.0)),
    (9, [(130 if ANY else 66, 9)], Kind((4 if ANY else 1, 1), 80, torch.float32)),  # in several splits
    *[(2, [(40, 2)], KINDS[7])] * ANY,
    (5, [(100, 5), (2, 1)], KINDS[9]),
    *per_device([], [(most, [(1500, 64), (1, most), (70, 1)], KINDS[i]) for most in (8, 17, 64) for i in (1, 2, 3, 7)]),
]


@pytest.mark.parametrize(("most", "sizes", "kind"), SEVERAL, ids=str)
def test_several_tokens_per_sequence(most: int, sizes: list[tuple[int, int]], kind: Kind) -> None:
    query_lens = [min(count, most) for _, count in sizes]
    lens = [before + count - 1 for (before, _), count in zip(sizes, query_lens, strict=True)]
    batch = make_batch(lens, query_lens, kind.heads, kind.head_size, 16, kind.dtype, kind.kv_dtype)
    plan = plan_for(batch, kind.heads[0], most, kind.window)
    out = decode(batch, plan, kind.window, max_query_len=most)
    assert_near(out, reference(batch, query_lens, 0.3, kind.window, None))


def test_no_more_tokens_per_sequence_than_the_plan_has_room_for() -> None:
    batch = make_batch([20], [2], (2, 1), 32, 16, torch.float32)
    plan = plan_for(batch, 2, 1, None)
    with pytest.raises(AssertionError):
        decode(batch, plan, max_query_len=2)


def tree_of(parents: list[int]) -> list[list[int]]:
    """Return what each node of a tree of drafts sees: its ancestors, the root first, and itself."""
    sees = [[0]]
    for node, parent in enumerate(parents, start=1):
        sees.append([*sees[parent], node])
    return sees


SMALL, BUSHY = tree_of([0, 0, 1, 2]), tree_of([0, 1, 0, 3, 3, 2, 6, 6, 4])
LARGEST = tree_of([node // 2 for node in range(63)])  # the last node's bit is the sign
TREES = [
    (SMALL, [(70, 5), (3, 2)], 0, KINDS[1]),
    *[(BUSHY, [(40, 10), (0, 4)], 0, Kind((4, 1), 80, torch.float32, window=20))] * ANY,
    (BUSHY, [(70, 9)], 1, Kind((2, 2) if ANY else (1, 1), 64, HALF, 48, window=2)),
    (SMALL, [(30, 4)], 0, Kind((2, 1), 64, HALF, kv_dtype=FP8)),
    (LARGEST, [(5, 6)], 58, Kind((1, 1), 32, torch.float32)),
    *per_device([], [(LARGEST, [(1500, 64), (0, 30), (900, 1)], first, KINDS[1]) for first in (0, 1, 5)]),
]


@pytest.mark.parametrize(("tree", "sizes", "first", "kind"), TREES, ids=lambda x: str(len(x) if type(x) is list else x))
def test_a_tree_of_drafts(tree: list[list[int]], sizes: list[tuple[int, int]], first: int, kind: Kind) -> None:
    """The first `first` tokens are in the cache already, and each sequence has some of the others."""
    most = len(tree) - first
    befores, query_lens = [before for before, _ in sizes], [min(count, most) for _, count in sizes]
    lens = [before + first + count for before, count in zip(befores, query_lens, strict=True)]
    batch = make_batch(lens, query_lens, kind.heads, kind.head_size, kind.block_size, kind.dtype, kind.kv_dtype)
    out = decode(
        batch,
        plan_for(batch, kind.heads[0], most, kind.window, num_before=first),
        kind.window,
        max_query_len=most,
        tree=torch.tensor([sum(1 << j for j in who) - ((who[-1] == 63) << 64) for who in tree], device=DEVICE),
        first_place=first,
        out=torch.full_like(batch.q, float("nan"), memory_format=torch.contiguous_format),
    )
    nodes = [(seq, node) for seq, count in enumerate(query_lens) for node in tree[first : first + count]]
    expected = [
        attend_to(batch, kind, seq, token, seen(befores[seq], who, kind.window))
        for token, (seq, who) in enumerate(nodes)
    ]
    assert_near(out, torch.stack(expected))


# One sequence, whose splits programs share, or several.
FUSED = [([130], 0, True), ([66, 1], 1, True), ([66, 1], 3, False)]
FUSED += [([1, 70], 6, False), ([66, 1], 9, True)]
FUSED += [([66, 1], 8, False), ([70], 2, False), ([1, 66], 5, True), ([70], 7, True)] * ANY


@pytest.mark.parametrize(("lens", "kind", "has_norm"), FUSED, ids=str)
def test_fused_is_norm_rotation_write_and_attention(lens: list[int], kind: int, has_norm: bool) -> None:
    check_fused(lens, KINDS[kind], has_norm)


HOPPER_KINDS = [
    Kind((4, 2), 128, torch.bfloat16),
    Kind((8, 1), 128, torch.float16, 48),
    Kind((6, 2), 64, torch.bfloat16, window=100),
    Kind((12, 1), 128, torch.bfloat16, window=1),
]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU or not has_hopper(DEVICE), reason="needs a Hopper card")
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


def test_hopper_copies_do_not_cross_blocks() -> None:
    fitting = [size for size in (1, 8, 16, 20, 24, 32, 48, 100, 256) if takes_decode_heads(128, 2, size)]
    assert fitting == [16, 32, 48, 256]


@pytest.mark.parametrize("num_seqs", [5, 24, *([6, 8, 12, 16, 20] if ANY else [])])
def test_each_shape_of_programs(num_seqs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_plan, "_MULTIPROCESSORS", 2)
    lens = [i * 1237 % per_device(times(60, 130), 3000) + 1 for i in range(num_seqs)]
    lens[-1] = per_device(200, lens[-1])  # several tiles, and of few sequences several splits
    batch = make_batch(lens, [1] * num_seqs, (2, 1), 64, 16, torch.float16)
    plan = plan_for(batch, 2, 1, None)
    out = decode(batch, plan)
    assert_near(out, reference(batch, [1] * num_seqs, 0.3, None, None))


def test_padding_has_no_items_and_gets_no_output() -> None:
    batch = make_batch([20, 30], [1, 1], (2, 1), 32, 16, torch.float32)
    lens, rows = batch.seq_lens.clone(), batch.rows.clone()
    lens[1], rows[1] = 0, -1
    plan = plan_for(batch._replace(seq_lens=lens, rows=rows), 2, 1, None)
    out = torch.full((2, 2, 32), 7.0, device=DEVICE)
    decode(batch, plan, out=out)
    assert_near(out[:1], reference(batch, [1, 1], 0.3, None, None)[:1])
    assert (out[1] == 7.0).all()


def test_a_tile_is_added_as_the_lesson_asks_of_its_readers() -> None:
    from teachllm_lessons.helpers.lesson_08 import (
        contract_update,  # brings the whole engine: not for all that is run here
    )

    assert contract_update(add_tile) > 10
