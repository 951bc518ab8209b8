"""Prompt lookup: its rule, by hand and by definition, and the kernels, interpreted or native, against the reference."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm_kernels.speculation import prompt_lookup
from teachllm_kernels.speculation.prompt_lookup import cost, prompt_lookup_reference, prompt_lookup_triton
from tests.kernels.cases import DEVICE, ON_GPU, pairs, per_device
from tests.thorough import times

pytestmark = [pytest.mark.gpu] if ON_GPU else []  # natively where there is a GPU, else interpreted
UNTOUCHED = -7
TOKENS = st.integers(1, 4).flatmap(lambda vocab: st.lists(st.integers(0, vocab - 1), min_size=1, max_size=60))


def ints(values: list, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def proposals(tokens: list[int], max_ngram: int, min_ngram: int, num_drafts: int) -> list[int]:
    """Return the reference's proposals for one sequence."""
    rows, lengths = torch.zeros(1, dtype=torch.int64), torch.tensor([len(tokens)])
    drafts, counts = prompt_lookup_reference(torch.tensor([tokens]), rows, lengths, max_ngram, min_ngram, num_drafts)
    assert drafts[0, counts[0] :].tolist() == [tokens[-1]] * (num_drafts - int(counts[0]))
    return drafts[0, : counts[0]].tolist()


def by_definition(tokens: list[int], max_ngram: int, min_ngram: int, num_drafts: int) -> list[int]:
    matches = []
    for end in range(1, len(tokens)):
        sizes = [n for n in range(1, min(max_ngram, end) + 1) if tokens[end - n : end] == tokens[-n:]]
        if sizes and max(sizes) >= min_ngram:
            matches.append((max(sizes), len(tokens[end : end + num_drafts]), end))
    end = max(matches)[-1] if matches else len(tokens)
    return tokens[end : end + num_drafts]


def test_the_longest_match_wins_over_a_later_one() -> None:
    assert proposals([1, 2, 7, 8, 9, 2, 6, 5, 1, 2], 3, 1, 2) == [7, 8]


def test_no_more_than_the_largest_ngram_counts() -> None:
    tokens = [1, 2, 3, 8, 5, 2, 3, 9, 1, 2, 3]
    assert proposals(tokens, 3, 1, 1) == [8]
    assert proposals(tokens, 2, 1, 1) == [9]  # both match two tokens; this one is the later


def test_a_match_shorter_than_the_smallest_ngram_proposes_nothing() -> None:
    tokens = [2, 9, 1, 2]
    assert proposals(tokens, 3, 1, 2) == [9, 1]
    assert proposals(tokens, 3, 2, 2) == []


def test_of_equally_long_matches_the_latest_with_enough_behind_it_wins() -> None:
    tokens = [1, 4, 1, 5, 1, 6, 1]
    assert proposals(tokens, 3, 1, 2) == [6, 1]
    assert proposals(tokens, 3, 1, 3) == [5, 1, 6]
    assert proposals(tokens, 3, 1, 5) == [4, 1, 5, 1, 6]


def test_where_all_matches_are_cut_short_the_one_with_most_behind_it_wins() -> None:
    assert proposals([1, 4, 1, 5, 1], 3, 1, 16) == [4, 1, 5, 1]


def test_an_occurrence_may_overlap_the_end_of_the_sequence() -> None:
    assert proposals([7] * 3, 2, 2, 4) == [7]
    assert proposals([7] * 20, 3, 1, 4) == [7] * 4


def test_what_never_stood_before_has_no_proposals() -> None:
    assert proposals([1], 3, 1, 4) == []
    assert proposals([1, 2, 3, 4], 3, 1, 4) == []


@settings(max_examples=times(40, 500))
@given(TOKENS, st.integers(1, 8), st.integers(1, 8), st.integers(1, 16))
def test_the_reference_equals_the_definition(
    tokens: list[int], max_ngram: int, min_ngram: int, num_drafts: int
) -> None:
    min_ngram = min(min_ngram, max_ngram)
    expected = by_definition(tokens, max_ngram, min_ngram, num_drafts)
    assert proposals(tokens, max_ngram, min_ngram, num_drafts) == expected


def test_the_reference_takes_each_sequence_from_its_row_and_knows_its_length() -> None:
    token_ids = torch.tensor([[5, 6, 5, 0], [1, 1, 1, 1], [3, 4, 3, 4]], dtype=torch.int16)
    drafts, counts = prompt_lookup_reference(token_ids, torch.tensor([2, 0]), torch.tensor([4, 3]), 2, 1, 3)
    assert drafts.tolist() == [[3, 4, 4], [6, 5, 5]]
    assert counts.tolist() == [2, 2]


def check_kernel(
    sequences: list[list[int]], order: list[int], max_ngram: int, min_ngram: int, num_drafts: int, room: int = 0
) -> None:
    """Compare the kernels with the reference. The batch names the sequences' rows in this order; -1 is padding."""
    max_len = max(map(len, sequences)) + room
    # What lies after a sequence's end would match, were it looked at.
    token_ids = ints([tokens + [tokens[-1]] * (max_len - len(tokens)) for tokens in sequences])
    num_known = ints([len(tokens) for tokens in sequences])
    drafts = torch.full((len(order), num_drafts), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    counts = torch.full((len(order),), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    before = token_ids.clone()
    prompt_lookup_triton(token_ids, ints(order), num_known, drafts, counts, max_ngram, min_ngram)
    rows = ints([row for row in order if row >= 0], torch.int64)
    expected = prompt_lookup_reference(token_ids, rows, num_known[rows], max_ngram, min_ngram, num_drafts)
    is_row = ints(order) >= 0
    for result, of_rows in zip((drafts, counts), expected, strict=True):
        assert torch.equal(result[is_row].long(), of_rows)
        assert (result[~is_row] == UNTOUCHED).all()
    assert torch.equal(token_ids, before)


@pairs(
    most=per_device(60, 200),
    few=7,
    vocab_size=[1, 3],
    lengths=[[60, 1, 7], [23, 40]],
    ngrams=[(1, 1), (3, 2), (8, 4)],
    num_drafts=[1, 4, 16],
    block_and_programs=[(1024, 2048), (16, 2048), (8, 4)],  # several blocks to a sequence, then several to a program
    seed=per_device([0], range(50)),
)
def test_the_kernels_equal_the_reference(
    vocab_size: int,
    lengths: list[int],
    ngrams: tuple[int, int],
    num_drafts: int,
    block_and_programs: tuple[int, int],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(seed)
    sequences = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    monkeypatch.setattr(prompt_lookup, "_BLOCK", block_and_programs[0])
    monkeypatch.setattr(prompt_lookup, "_FIND_PROGRAMS", block_and_programs[1])
    check_kernel(sequences, [1, -1, 0], *ngrams, num_drafts, room=5)


def text_like(length: int, seed: int) -> list[int]:
    """Return ids of which few are frequent and most are rare, and a passage that comes again at the end."""
    rng = random.Random(seed)
    tokens = [int(150_000 * rng.random() ** 6) for _ in range(length)]
    passage, size = rng.randrange(length // 2), rng.randrange(2, 12)
    return tokens + tokens[passage : passage + size]


@pytest.mark.parametrize("num_programs", [2048, 12])  # a block each; several
def test_the_kernels_equal_the_reference_over_many_blocks(num_programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lookup, "_FIND_PROGRAMS", num_programs)
    if not ON_GPU:
        monkeypatch.setattr(prompt_lookup, "_BLOCK", 128)
    small = per_device(8, 1)
    sequences = [text_like(length // small, seed) for seed, length in enumerate([5000, 1023, 2500])]
    check_kernel([*sequences, [3] * (4100 // small)], [3, 1, -1, 0, 2], 4, 2, 8)


def test_launchers_refuse_what_they_would_compute_wrongly() -> None:
    row, token_ids = ints([0]), ints([[1, 1, 1]])
    for max_ngram, min_ngram, num_drafts in [(2, 3, 4), (2, 0, 4), (2, 1, 256), (2, 1, 0)]:
        drafts = torch.zeros(1, num_drafts, dtype=torch.int32, device=DEVICE)
        with pytest.raises(AssertionError):
            prompt_lookup_triton(token_ids, row, ints([3]), drafts, row.clone(), max_ngram, min_ngram)


def test_cost_counts_tokens_rows_and_lengths_in_drafts_and_counts_out() -> None:
    assert cost([100, 7], 4) == (4 * (107 + 2 + 2 + 2 * 4 + 2), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 7, 64, 300])
def test_long_rows_equal_the_reference_at_full_size(num_rows: int) -> None:
    rng = random.Random(num_rows)
    sequences = [text_like(rng.randrange(100, 40_900), seed) for seed in range(num_rows)]
    sequences[0] = [3] * 40_960
    order = [-1, *range(num_rows), -1]
    rng.shuffle(order)
    check_kernel(sequences, order, 8, 1, 16)
    check_kernel(sequences, order, 3, 3, 5)


@pytest.mark.gpu
def test_a_captured_graph_replays_other_rows_and_lengths() -> None:
    sequences = [text_like(20_000, seed) for seed in range(4)]
    width = max(map(len, sequences))
    token_ids = ints([tokens + [0] * (width - len(tokens)) for tokens in sequences])
    rows, num_known = ints([-1, -1, -1]), ints([1, 1, 1, 1])
    drafts, counts = ints([[UNTOUCHED] * 8] * 3), ints([UNTOUCHED] * 3)

    def call() -> None:
        prompt_lookup_triton(token_ids, rows, num_known, drafts, counts, 4, 1)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    lengths = [len(tokens) for tokens in sequences]
    for order, known in [([0, 1, 2], lengths), ([3, 0, 1], [17_000, 40, 3, 1]), ([2, 3, 0], lengths)]:
        rows.copy_(ints(order))
        num_known.copy_(ints(known))
        graph.replay()
        at = rows.long()
        expected = prompt_lookup_reference(token_ids, at, num_known[at], 4, 1, 8)
        assert torch.equal(drafts.long(), expected[0]) and torch.equal(counts.long(), expected[1])
