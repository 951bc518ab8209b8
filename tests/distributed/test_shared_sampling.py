"""Ranks that have some columns of the logits each sample what one sampler with all of them does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm.core.scheduler_output import NewRow, TokenLogprobs
from teachllm.distributed.group import ALONE, Group
from teachllm.distributed.layout import Layout
from teachllm.distributed.ranks import Ranks
from teachllm.sampling import shared_filters
from teachllm.sampling.sampler import Sampler, SamplerOutput
from teachllm.sampling.shared_vocabulary import Columns
from teachllm.sampling.verify import Proposals
from teachllm.sampling_params import SamplingParams
from tests.distributed.threads import on_ranks
from tests.pairwise import pairwise
from tests.request_kinds import SAMPLING_KINDS
from tests.thorough import times

VOCAB, PROMPT_LEN = 72, 3  # of 4 and 8 ranks' first columns some are no multiple of four
CPU = torch.device("cpu")
EVERY = SAMPLING_KINDS | {
    "all but one": {"temperature": 1.2, "top_k": VOCAB - 1},
    "small p": {"temperature": 1.0, "top_p": 0.01},
    "k and p": {"temperature": 1.0, "top_k": 20, "top_p": 0.8},
    "p and min-p": {"temperature": 2.0, "top_p": 0.9, "min_p": 0.05},
    "weak filters": {"temperature": 2.0, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    # Of the first rank and the last.
    "logit_bias": {"temperature": 0.0, "logit_bias": {70: 3.0, 1: 2.9, 33: -4.0}},
    "allowed_token_ids": {"temperature": 1.0, "allowed_token_ids": [70, 71, 3]},
    "logprobs": {"temperature": 0.0, "logprobs": 20},
}


def logits_of(seed: int, num_rows: int, *, has_ties: bool = False) -> torch.Tensor:
    logits = 3 * torch.randn((num_rows, VOCAB), generator=torch.Generator().manual_seed(seed))
    return logits.round() if has_ties else logits


def sample(
    group: Group,
    asked: list[dict[str, Any]],
    logits: torch.Tensor,
    proposals: Proposals | None = None,
) -> SamplerOutput:
    """One step of one rank, in which request i asks for `asked[i]` and is at its own length."""
    generator = torch.Generator().manual_seed(len(asked))
    token_ids = torch.randint(VOCAB, (len(asked), 20), generator=generator)
    lengths = PROMPT_LEN + 1 + torch.arange(len(asked)) % 7
    sampler = Sampler(len(asked), VOCAB, CPU, group)
    for row, params in enumerate(asked):
        ending = tuple(token_ids[row, lengths[row] - 1 : lengths[row]].tolist())
        new_row = NewRow(
            token_ids[row, : lengths[row]].tolist(),
            *(PROMPT_LEN, SamplingParams(**{"max_tokens": None, **params}), row % 3, 100 + row),
            frozenset({int(logits[row].argmax())}),
            ((*ending, int(logits[row].topk(2).indices[1])),),  # what is second best would complete a bad word
        )
        sampler.open_rows([(row, new_row)])
    width = VOCAB // group.size
    own = logits[:, group.rank * width : (group.rank + 1) * width].clone()
    return sampler.sample(own, list(range(len(asked))), lengths, token_ids, proposals)


def assert_alike(asked: list[dict[str, Any]], logits: torch.Tensor, sizes: tuple[int, ...] = (2, 4, 8)) -> None:
    expected = sample(ALONE, asked, logits)
    for size in sizes:
        for found in on_ranks(Layout(tensor=size), lambda ranks: sample(ranks.tensor, asked, logits)):
            assert found.token_ids.tolist() == expected.token_ids.tolist()
            assert_same_logprobs(found.logprobs or [], expected.logprobs or [])


def assert_same_logprobs(found: list[TokenLogprobs | None], expected: list[TokenLogprobs | None]) -> None:
    """All but the last digits of numbers that end in a sum."""
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert replace(ours, logprob=0.0, top_logprobs=[]) == replace(theirs, logprob=0.0, top_logprobs=[])
            values = [theirs.logprob, *theirs.top_logprobs]
            assert [ours.logprob, *ours.top_logprobs] == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize(
    "case", pairwise(kind=list(EVERY), size=[2, times(4, 8)], has_ties=[False, True], most=[4, 1024]), ids=repr
)
def test_rows_of_one_kind_are_sampled_as_by_one(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_filters, "MOST_CANDIDATES", case["most"])
    kind, logits = case["kind"], logits_of(1, 24, has_ties=case["has_ties"])
    assert_alike([EVERY[kind]] * 24, logits, sizes=(case["size"],))
    if not EVERY[kind]["temperature"]:
        return
    found = sample(ALONE, [EVERY[kind]] * 24, logits).token_ids
    assert kind in ("small p", "allowed_token_ids") or (found != logits.argmax(dim=-1)).any()  # noise decides something


@settings(max_examples=times(6, 100))
@given(
    st.lists(st.sampled_from(list(EVERY)), min_size=1, max_size=8),
    st.integers(0, 2**16),
    st.booleans(),
    st.sampled_from([2, 7, 1024]),
)
def test_rows_beside_each_other_are_sampled_as_by_one(kinds: list[str], seed: int, has_ties: bool, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_filters, "MOST_CANDIDATES", most)
        assert_alike([EVERY[kind] for kind in kinds], logits_of(seed, len(kinds), has_ties=has_ties), sizes=(2, 4))


def test_only_a_nucleus_that_is_not_among_the_candidates_is_looked_for_in_all_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_filters, "MOST_CANDIDATES", 4)
    peaked, flat = torch.zeros(VOCAB), torch.zeros(VOCAB)
    peaked[[3, 40]] = 9.0

    def sent(ranks: Ranks, logits: torch.Tensor, params: dict[str, Any]) -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = []
        gather = ranks.tensor.all_gather
        monkeypatch.setattr(ranks.tensor, "all_gather", lambda x: shapes.append(tuple(x.shape)) or gather(x))
        sample(ranks.tensor, [params, {"temperature": 0.5, "top_k": 2}], torch.stack([logits, logits]))
        return shapes

    plain = [(2, 1), (2, 5), (2, 2)]  # the best, the candidates and a sum, winners and their ids
    whole = [*plain[:2], (1, VOCAB // 2), plain[2]]
    for logits, params, expected in (
        (peaked, {"temperature": 1.0, "top_p": 0.9}, plain),
        (flat, {"temperature": 1.0, "top_p": 0.9}, whole),
        (flat, {"temperature": 1.0, "min_p": 0.9}, plain),
        (flat, {"temperature": 1.0, "top_k": 5}, whole),
        (peaked, {"temperature": 1.0, "top_k": 5, "min_p": 0.5}, plain),
    ):
        for shapes in on_ranks(Layout(tensor=2), lambda ranks, *of: sent(ranks, logits, params)):  # noqa: B023
            assert shapes == expected


def test_what_a_rejection_leaves_is_drawn_as_by_one() -> None:
    logits, drafted = logits_of(5, 16), logits_of(6, 16)
    asked = [EVERY["k and p"], EVERY["random"]] * 8
    siblings = drafted.topk(2, dim=-1).indices
    proposals = Proposals(siblings, drafted, torch.arange(16))
    expected = sample(ALONE, asked, logits, proposals)
    assert (expected.token_ids != siblings[:, 0]).any()
    for found in on_ranks(Layout(tensor=4), lambda ranks: sample(ranks.tensor, asked, logits, proposals)):
        assert found.token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_given_tokens_have_the_log_probabilities_and_ranks_that_one_finds(num_top: int) -> None:
    logits, targets = logits_of(2, 30, has_ties=True), list(range(0, 60, 2))

    def scored(group: Group) -> list[TokenLogprobs | None]:
        width = VOCAB // group.size
        own = logits[:, group.rank * width : (group.rank + 1) * width]
        return [*Sampler(1, VOCAB, CPU, group).prompt_logprobs(own, targets, num_top)]

    for found in on_ranks(Layout(tensor=8), lambda ranks: scored(ranks.tensor)):
        assert_same_logprobs(found, scored(ALONE))


def test_some_rank_may_have_no_token() -> None:
    def has_some(ranks: Ranks) -> tuple[bool, int]:
        columns = Columns(9, ranks.tensor)
        return columns.each_has_some, columns.num_own

    assert on_ranks(Layout(tensor=8), has_some) == [(False, count) for count in (2, 2, 2, 2, 1, 0, 0, 0)]
    assert on_ranks(Layout(tensor=3), has_some) == [(True, 3)] * 3
