"""Verifying drafts changes how many tokens a step brings, and never which, or how often."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm.core.scheduler_output import NewRow
from teachllm.sampling.sampler import Sampler
from teachllm.sampling.verify import Proposals, synthetic_tokens
from teachllm.sampling_params import SamplingParams
from tests.thorough import times

VOCAB = 8
NUM_DRAWS = 12_000
CPU = torch.device("cpu")
TARGET = [2.0, 1.5, 1.5, 0.5, 0.0, -0.5, -1.0, -3.0]
DRAFT = [0.0, 2.5, -1.0, 0.5, 1.0, 0.0, -2.0, 1.0]  # what the drafter holds likely is another matter


# -- for benchmarks --------------------------------------------------------------------------------------------


@settings(max_examples=times(30, 500))
@given(
    positions=st.lists(
        st.tuples(st.integers(0, 3), st.integers(-1, 3), st.sampled_from([0.125, 0.5, 0.75])), min_size=1
    ),
    rate=st.sampled_from([0.0, 0.125, 0.25, 0.6, 0.75, 1.0]),
)
def test_a_synthetic_draft_holds_exactly_where_its_coin_is_below_the_rate(
    positions: list[tuple[int, int, float]], rate: float
) -> None:
    sampled, drafts, coins = (torch.tensor(column) for column in zip(*positions, strict=True))
    tokens = synthetic_tokens(sampled, drafts, coins, rate)
    for token, mine, draft, coin in zip(tokens.tolist(), sampled.tolist(), drafts.tolist(), coins, strict=True):
        if draft < 0:
            assert token == mine
        else:
            assert (token == draft) == bool(coin < rate)
            assert token in (draft, mine) or mine == draft
        assert token >= 0


def test_the_share_of_synthetic_drafts_that_hold_is_the_rate() -> None:
    coins = torch.rand(10_000, generator=torch.Generator().manual_seed(0))
    drafts, sampled = torch.full((10_000,), 3), torch.arange(10_000) % 5
    held = synthetic_tokens(sampled, drafts, coins, 0.8) == drafts
    assert held.float().mean().item() == pytest.approx(0.8, abs=0.02)


# -- through the sampler ---------------------------------------------------------------------------------------


def row_of(params: dict[str, Any], prompt: list[int], seed: int = 3) -> NewRow:
    stops = frozenset({2}) if params.get("min_tokens") else frozenset()
    return NewRow(prompt, len(prompt), SamplingParams(**{"max_tokens": None, **params}), 0, seed, stops)


def assert_follows(tokens: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with exact probabilities by chi-square, at 1 in 10,000; seeds are fixed, so this does not flicker."""
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    degrees = int(possible.sum()) - 1
    statistic = ((counts - len(tokens) * expected).square() / (len(tokens) * expected))[possible].sum().item()
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3  # Wilson and Hilferty
    assert statistic < limit, (counts / len(tokens), expected)


def verified_draws(params: dict[str, Any], prompt: list[int], num: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the drafts, `num` each, and the tokens of many output positions, all with the logits above."""
    sampler = Sampler(2, VOCAB, CPU)
    sampler.open_rows([(1, row_of(params, prompt))])
    rows, lengths = [1] * NUM_DRAWS, len(prompt) + torch.arange(NUM_DRAWS)
    draft_logits = torch.tensor(DRAFT).repeat(NUM_DRAWS, 1)
    drafts = sampler.draw_drafts(draft_logits, rows, lengths, num)
    proposals = Proposals(drafts, draft_logits, torch.arange(NUM_DRAWS))
    token_ids = torch.tensor([[0] * len(prompt), prompt])
    logits = torch.tensor(TARGET).repeat(NUM_DRAWS, 1)
    return drafts, sampler.sample(logits, rows, lengths, token_ids, proposals).token_ids


@pytest.mark.parametrize(
    ("params", "changed", "kept"),
    [
        ({}, {}, range(VOCAB)),
        ({"temperature": 0.5}, {}, range(VOCAB)),
        ({"temperature": 1.8}, {}, range(VOCAB)),
        ({"top_k": 3}, {}, [0, 1, 2]),
        ({"top_p": 0.5}, {}, [0, 1]),
        ({"min_p": 0.2, "temperature": 0.8}, {}, [0, 1, 2]),
        ({"allowed_token_ids": [1, 4, 7]}, {}, [1, 4, 7]),
        ({"logit_bias": {1: -4.0, 6: 2.0}}, {1: -2.5, 6: 1.0}, range(VOCAB)),
    ],
    ids=lambda each: str(each) if each and isinstance(each, dict) else "-",
)
def test_tokens_follow_the_distribution_of_the_model_whatever_the_drafter_prefers(
    params: dict[str, Any], changed: dict[int, float], kept: list[int]
) -> None:
    params = {"temperature": 1.0} | params
    drafts, tokens = verified_draws(params, [1, 2])
    logits = torch.full((VOCAB,), -math.inf, dtype=torch.float64)
    for token in kept:
        logits[token] = changed.get(token, TARGET[token])
    target = (logits / params["temperature"]).softmax(dim=0)
    drafter = (torch.tensor(DRAFT, dtype=torch.float64) / params["temperature"]).softmax(dim=0)
    assert_follows(drafts[:, 0], drafter)  # by its temperature alone
    assert_follows(tokens, target)
    as_often_as_it_can = torch.minimum(target, drafter).sum().item()
    assert (tokens == drafts[:, 0]).double().mean().item() == pytest.approx(as_often_as_it_can, abs=0.02)


@pytest.mark.parametrize(
    ("params", "num"),
    [({}, 2), ({"top_k": 3, "temperature": 1.4}, 3), ({"allowed_token_ids": [0, 2, 5, 7]}, 2), ({}, 3)],
    ids=str,
)
def test_several_drafts_for_one_token_change_its_distribution_no_more_than_one(
    params: dict[str, Any], num: int
) -> None:
    params = {"temperature": 1.0} | params
    drafts, tokens = verified_draws(params, [1, 2], num)
    assert all(len(set(row)) == num for row in drafts.tolist())
    kept = params.get("allowed_token_ids", range(params.get("top_k", VOCAB)))
    logits = torch.tensor([TARGET[i] if i in kept else -math.inf for i in range(VOCAB)], dtype=torch.float64)
    assert_follows(tokens, (logits / params["temperature"]).softmax(dim=0))
    _, alone = verified_draws(params, [1, 2])
    held, held_alone = (tokens[:, None] == drafts).any(dim=1), alone == drafts[:, 0]
    assert held.double().mean() > held_alone.double().mean() + 0.05  # that is what they are for


def test_a_stop_token_that_may_not_come_yet_is_never_accepted() -> None:
    sampler = Sampler(1, VOCAB, CPU)
    sampler.open_rows([(0, row_of({"temperature": 1.0, "min_tokens": 3}, [1]))])
    sure = torch.tensor([[9.0 if i == 2 else -9.0 for i in range(VOCAB)]]).repeat(4, 1)
    proposals = Proposals(torch.full((4, 1), 2), sure, torch.arange(4))
    lengths = torch.tensor([1, 2, 3, 4])
    tokens = sampler.sample(sure.clone(), [0] * 4, lengths, torch.ones(1, 8, dtype=torch.int64), proposals).token_ids
    assert (tokens == 2).tolist() == [False, False, False, True]


def test_a_greedy_request_takes_its_best_token_beside_a_random_one_that_verifies() -> None:
    sampler = Sampler(2, VOCAB, CPU)
    sampler.open_rows([(0, row_of({"temperature": 0.0}, [1, 2])), (1, row_of({"temperature": 1.0}, [1, 2]))])
    rows, lengths = [0, 0, 1, 1], torch.tensor([2, 3, 2, 3])
    logits = torch.tensor([TARGET] * 4)
    drafts = sampler.draw_drafts(torch.tensor([DRAFT] * 4), rows, lengths)
    assert drafts[:2, 0].tolist() == [1, 1]  # its best as well
    proposals = Proposals(
        siblings=torch.tensor([[-1], [-1], [int(drafts[2, 0])], [-1]]),
        draft_logits=torch.tensor([DRAFT]),
        draft_rows=torch.tensor([-1, -1, 0, -1]),
    )
    token_ids = torch.ones(2, 8, dtype=torch.int64)
    tokens = sampler.sample(logits.clone(), rows, lengths, token_ids, proposals).token_ids
    assert tokens[:2].tolist() == [0, 0]
    # The position after the draft was proposed nothing: its own noise, as without drafts.
    assert tokens[3] == sampler.sample(logits[:1].clone(), [1], torch.tensor([3]), token_ids).token_ids[0]


def test_a_request_draws_the_same_drafts_whatever_runs_beside_it() -> None:
    sampler = Sampler(3, VOCAB, CPU)
    sampler.open_rows([(row, row_of({"temperature": 1.0}, [1] * (row + 1), seed=7)) for row in range(3)])
    logits, lengths = torch.zeros(3, VOCAB), torch.tensor([5, 6, 7])  # the same output position of each
    together = sampler.draw_drafts(logits, [0, 1, 2], lengths)[:, 0]
    assert len(set(together.tolist())) == 1
    assert sampler.draw_drafts(logits[:1], [2], torch.tensor([7]))[0].tolist() == together[:1].tolist()
    others = [int(sampler.draw_drafts(logits[:1], [2], torch.tensor([7 + i]))) for i in range(20)]
    assert len(set(others)) > 3
