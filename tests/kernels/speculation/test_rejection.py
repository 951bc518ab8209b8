"""Rejection sampling: the reference is the rule.

That tokens drawn so follow the model's distribution is tested in `tests/spec_decode/test_losslessness.py`.
"""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm_kernels.sampling.philox import (
    STREAM_ACCEPT,
    STREAM_DRAFT,
    STREAM_SAMPLE,
    philox_uniform_reference,
)
from teachllm_kernels.sampling.random_sample import gumbel_sample_reference
from teachllm_kernels.speculation.rejection import cost
from teachllm_kernels.speculation.rejection_reference import draft_sample_reference, judge, rejection_sample_reference
from teachllm_lessons.helpers.lesson_10 import contract_judge
from tests.thorough import times

INFINITY = float("inf")


def names_of_draws(num_rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return seeds, output indices and child indices, all rows different."""
    seeds = torch.arange(num_rows) * 7919 + seed
    return seeds, torch.arange(num_rows) % 11, torch.arange(num_rows) % 3


def reject(
    logits: list[float], draft_logits: list[float], siblings: list[int], num_rows: int, temperature: float = 1.0
) -> torch.Tensor:
    """Return `num_rows` draws for one position."""
    return rejection_sample_reference(
        torch.tensor(logits).repeat(num_rows, 1),
        torch.full((num_rows,), temperature),
        torch.tensor([draft_logits]),
        torch.zeros(num_rows, dtype=torch.int64),
        torch.tensor(siblings).repeat(num_rows, 1),
        *names_of_draws(num_rows),
    )


def coins(num_rows: int, num_siblings: int) -> torch.Tensor:
    return philox_uniform_reference(*names_of_draws(num_rows), num_siblings, STREAM_ACCEPT)


def by_definition(
    p: list[float], q: list[float], siblings: list[int], coins: list[float], noise: list[float], replaced: bool
) -> int:
    """Apply the rule for one position, in Python's floats."""
    for token, coin in zip(siblings, coins, strict=True):
        if token < 0:
            break
        if p[token] > 0 and (q[token] == 0 or coin < p[token] / q[token]):
            return token
        rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        p = [r / sum(rest) for r in rest] if sum(rest) > 0 else p
        if not replaced:
            q = [0.0 if i == token else b for i, b in enumerate(q)]
            q = [b / sum(q) for b in q] if sum(q) > 0 else q
    scores = [math.log(a) + g if a > 0 else -INFINITY for a, g in zip(p, noise, strict=True)]
    return scores.index(max(scores))


@settings(max_examples=times(20, 500))
@given(st.integers(0, 10**6), st.integers(1, 6), st.booleans(), st.sampled_from([0.5, 1.0, 1.6]))
def test_the_reference_is_the_rule(seed: int, num_siblings: int, replaced: bool, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_rows, vocab_size = 8, 7
    logits, draft_logits = torch.randn(2, num_rows, vocab_size, generator=generator) * 1.5
    logits[torch.rand(logits.shape, generator=generator) < 0.2] = -INFINITY
    logits[:, 3] = 1.0  # something stays possible
    siblings = torch.stack([torch.randperm(vocab_size, generator=generator)[:num_siblings] for _ in range(num_rows)])
    if replaced:
        siblings = torch.randint(0, vocab_size, (num_rows, num_siblings), generator=generator)
    for row, num_given in enumerate(torch.randint(0, num_siblings + 1, (num_rows,), generator=generator)):
        siblings[row, num_given:] = -1
    draft_rows = torch.randint(-1, num_rows, (num_rows,), generator=generator)
    draws = names_of_draws(num_rows, seed)
    heat = torch.full((num_rows,), temperature)
    tokens = rejection_sample_reference(logits, heat, draft_logits, draft_rows, siblings, *draws, replaced)
    uniform = philox_uniform_reference(*draws, num_siblings, STREAM_ACCEPT)
    noise = -torch.log(-torch.log1p(-philox_uniform_reference(*draws, vocab_size, STREAM_SAMPLE)))
    for row, source in enumerate(draft_rows.tolist()):
        p = (logits[row].double() / temperature).softmax(0).tolist()
        q = (draft_logits[source].double() / temperature).softmax(0).tolist()
        proposed = siblings[row].tolist() if source >= 0 else [-1] * num_siblings
        expected = by_definition(p, q, proposed, uniform[row].tolist(), noise[row].tolist(), replaced)
        assert tokens[row] == expected


def test_the_rule_is_what_its_lesson_says() -> None:
    assert contract_judge(judge) > 20


def test_a_row_without_proposals_has_the_token_of_a_plain_draw() -> None:
    num_rows = 200
    logits = torch.randn(num_rows, 50, generator=torch.Generator().manual_seed(0)) * 3
    temperature, draws = torch.full((num_rows,), 0.7), names_of_draws(num_rows)
    plain = gumbel_sample_reference(logits, temperature, *draws)
    rows, some = torch.full((num_rows,), -1), torch.full((num_rows, 2), 3)
    nothing_drafted = torch.empty(0, 50)
    assert torch.equal(rejection_sample_reference(logits, temperature, nothing_drafted, rows, some, *draws), plain)
    rows, none = torch.zeros_like(rows), torch.full((num_rows, 2), -1)
    assert torch.equal(rejection_sample_reference(logits, temperature, logits[:1], rows, none, *draws), plain)


def test_what_the_model_itself_proposes_is_always_accepted() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2000, 40, generator=generator) * 4
    siblings = torch.randint(0, 40, (2000, 1), generator=generator)
    temperature, draws = torch.full((2000,), 0.9), names_of_draws(2000)
    tokens = rejection_sample_reference(logits, temperature, logits, torch.arange(2000), siblings, *draws)
    assert torch.equal(tokens, siblings[:, 0])


def test_what_the_model_never_says_is_always_rejected() -> None:
    tokens = reject([0.0, 1.0, -INFINITY, -INFINITY], [-INFINITY, -INFINITY, 0.0, 1.0], [2, 3], num_rows=1000)
    assert set(tokens.tolist()) == {0, 1}
    plain = gumbel_sample_reference(
        torch.tensor([[0.0, 1.0, -INFINITY, -INFINITY]]).expand(1000, -1), torch.ones(1000), *names_of_draws(1000)
    )
    assert torch.equal(tokens, plain)  # for nothing of p was taken away


def test_a_certain_drafter_is_accepted_as_often_as_the_model_agrees() -> None:
    share = math.exp(0.5 / 0.8) / (math.exp(0.5 / 0.8) + 2 + math.exp(-1 / 0.8))
    draft = [-INFINITY, -INFINITY, 0.0, -INFINITY]
    tokens = reject([0.0, 0.0, 0.5, -1.0], draft, [2], num_rows=1000, temperature=0.8)
    assert torch.equal(tokens == 2, coins(1000, 1)[:, 0] < share)
    assert set(tokens.tolist()) == {0, 1, 2, 3}


def test_a_token_that_the_drafter_held_impossible_is_accepted_if_it_is_possible() -> None:
    assert reject([0.0, 0.0, -9.0], [0.0, 0.0, -INFINITY], [2], num_rows=50).tolist() == [2] * 50
    tokens = reject([0.0, 0.0, -INFINITY], [0.0, 0.0, -INFINITY], [2], num_rows=50)
    assert set(tokens.tolist()) == {0, 1}  # nothing is left of p - q: it stays p


def test_what_a_sure_drafter_has_left_is_not_lost_to_rounding() -> None:
    """Once its first token is rejected, its second is all of q, however small it was before."""
    logits = [math.log(0.2), math.log(0.4), math.log(0.4)]
    tokens = reject(logits, [0.0, -1000.0, -2000.0], [0, 1], num_rows=1000)
    uniform = coins(1000, 2)
    is_rejected = uniform[:, 0] >= 0.2
    assert torch.equal(tokens[~is_rejected], torch.zeros_like(tokens[~is_rejected]))
    # p_1 is half token 1, half token 2
    is_accepted = uniform[is_rejected, 1] < 0.5
    assert (tokens[is_rejected][is_accepted] == 1).all()
    assert (tokens[is_rejected][~is_accepted] == 2).all()


def test_a_row_without_any_possible_token_gives_its_first() -> None:
    assert reject([-INFINITY] * 3, [0.0, 1.0, 2.0], [2, 1], num_rows=3).tolist() == [0, 0, 0]


def test_one_draft_is_a_plain_draw_of_its_own_stream() -> None:
    logits = torch.randn(500, 30, generator=torch.Generator().manual_seed(2)) * 2
    temperature, draws = torch.full((500,), 1.3), names_of_draws(500)
    drafts = draft_sample_reference(logits, temperature, *draws, num=1)
    assert torch.equal(drafts[:, 0], gumbel_sample_reference(logits, temperature, *draws, stream=STREAM_DRAFT))
    assert not torch.equal(drafts[:, 0], gumbel_sample_reference(logits, temperature, *draws))


def test_several_drafts_are_draws_from_what_is_left() -> None:
    logits = torch.randn(500, 9, generator=torch.Generator().manual_seed(3)) * 2
    temperature = torch.full((500,), 0.8)
    temperature[::5] = 0.0
    draws = names_of_draws(500)
    drafts = draft_sample_reference(logits, temperature, *draws, num=4)
    for place in range(4):
        first = draft_sample_reference(logits, temperature, *draws, num=1)
        assert torch.equal(drafts[:, place : place + 1], first)
        logits = logits.scatter(1, first, -INFINITY)


def test_greedy_drafts_are_the_most_likely_tokens_in_order_and_then_none() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -INFINITY, 2.0], [-INFINITY, -INFINITY, 0.0, 0.0, -INFINITY]])
    drafts = draft_sample_reference(logits, torch.zeros(2), *names_of_draws(2), num=5)
    assert drafts.tolist() == [[1, 2, 4, 0, -1], [2, 3, -1, -1, -1]]


def test_the_cost_counts_both_logits_once_and_a_draw_where_a_proposal_is_rejected() -> None:
    assert cost(num_rows=3, vocab_size=1000, dtype_bytes=2) == (2 * 2 * 3000 + 24, 10 * 3000)
    assert cost(num_rows=3, vocab_size=1000, dtype_bytes=2, num_rejected=1)[1] == 10 * 3000 + 250 * 70 + 18_000
