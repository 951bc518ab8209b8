"""Rejection sampling: the reference is the rule, and the Triton kernel draws the reference's tokens.

That tokens drawn so follow the model's distribution is tested in `tests/spec_decode/test_losslessness.py`.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm_kernels._triton import tl, triton
from teachllm_kernels.sampling import random_sample
from teachllm_kernels.sampling.philox import (
    STREAM_ACCEPT,
    STREAM_DRAFT,
    STREAM_SAMPLE,
    gumbel_noise,
    philox_uniform_reference,
)
from teachllm_kernels.sampling.random_sample import gumbel_sample_reference, sample_triton
from teachllm_kernels.speculation import rejection
from teachllm_kernels.speculation.rejection import cost, rejection_sample_triton, workspace_bytes
from teachllm_kernels.speculation.rejection_reference import draft_sample_reference, judge, rejection_sample_reference
from teachllm_lessons.helpers.lesson_10 import contract_judge
from tests.kernels.sampling.test_sampling_triton import DEVICE, make_table, one_by_one
from tests.thorough import times

on_device = pytest.mark.gpu if torch.cuda.is_available() else lambda test: test  # natively there, else interpreted
EXAMPLES = times(50, 300) if DEVICE == "cuda" else 50  # which all but compiles anew for each
INFINITY = float("inf")
FILTERS = ("top_k", "top_p", "min_p")


def names_of_draws(num_rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seeds, output indices and child indices, all rows different."""
    seeds = torch.arange(num_rows) * 7919 + seed
    return seeds, torch.arange(num_rows) % 11, torch.arange(num_rows) % 3


def reject(
    logits: list[float], draft_logits: list[float], siblings: list[int], num_rows: int, temperature: float = 1.0
) -> torch.Tensor:
    """`num_rows` draws for one position."""
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
    """The rule for one position, in Python's floats."""
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


def test_what_the_model_would_never_say_is_always_rejected() -> None:
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


# Triton, interpreted or on a GPU


def expected_tokens(batch: dict, table: dict[str, torch.Tensor]) -> list[int]:
    def draw(i: int, one: torch.Tensor, p: dict[str, torch.Tensor]) -> torch.Tensor:
        proposals = (batch["draft_rows"][i : i + 1].long(), batch["siblings"][i : i + 1].long())
        draws = (p["seed"], batch["output_index"][i : i + 1], p["child_index"])
        given = (one, p["temperature"], batch["draft_logits"], *proposals, *draws)
        return rejection_sample_reference(*given, batch["replaced"])

    return one_by_one(batch["logits"], batch["rows"], table, draw)


def sample(batch: dict, table: dict[str, torch.Tensor]) -> list[int]:
    before = batch["logits"].clone(), batch["draft_logits"].clone()
    tokens = rejection_sample_triton(
        batch["logits"],
        torch.tensor(batch["rows"], dtype=torch.int32, device=DEVICE),
        **table,
        output_index=batch["output_index"],
        draft_logits=batch["draft_logits"],
        draft_rows=batch["draft_rows"],
        siblings=batch["siblings"],
        any_filtered=batch["any_filtered"],
        replaced=batch["replaced"],
    )
    assert torch.equal(batch["logits"], before[0]) and torch.equal(batch["draft_logits"], before[1])
    return tokens.tolist()


def propose(batch: dict, table: dict[str, torch.Tensor], num_siblings: int) -> torch.Tensor:
    """[R, num_siblings] what a drafter draws for each row, from the rows of `draft_logits` that it is told."""
    siblings = torch.full((len(batch["rows"]), num_siblings), -1)
    for i, (row, source) in enumerate(zip(batch["rows"], batch["draft_rows"].tolist(), strict=True)):
        if row >= 0 and source >= 0:
            one = batch["draft_logits"][source : source + 1].float()
            heat, seed, child = (table[name][row : row + 1] for name in ("temperature", "seed", "child_index"))
            at = batch["output_index"][i : i + 1]
            if batch["replaced"]:
                several = [draft_sample_reference(one, heat, seed + j, at, child, 1) for j in range(num_siblings)]
                siblings[i] = torch.cat(several, dim=1)[0]
            else:
                siblings[i] = draft_sample_reference(one, heat, seed, at, child, num_siblings)[0]
    return siblings.int().to(DEVICE)


@st.composite
def batches(draw: st.DrawFn) -> dict:
    vocab_size = draw(st.sampled_from([50, 61, 64, 513, 700]))
    request = st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]), "seed": st.integers(-(2**62), 2**62)},
        optional={
            "top_k": st.sampled_from([1, 2, 5, 20, vocab_size - 1]),
            # No fraction that equal tokens add up to: on whose very edge the sum reaches p, rounding decides.
            "top_p": st.sampled_from([0.0, 0.1037, 0.5071, 0.9013, 0.9991]),
            "min_p": st.sampled_from([0.001, 0.1, 0.7, 1.0]),
            "child_index": st.integers(0, 5),
        },
    )
    requests = draw(st.lists(request, min_size=1, max_size=4))
    rows = draw(st.lists(st.integers(-1, len(requests) - 1), min_size=1, max_size=4))
    num_drafted = draw(st.integers(1, 4))
    return {
        "vocab_size": vocab_size,
        "requests": requests,
        "rows": rows,
        "sources": [draw(st.integers(-1, num_drafted - 1)) for _ in rows],
        "num_siblings": draw(st.sampled_from([1, 1, 2, 3, 5])),
        "num_given": [draw(st.integers(0, 5)) for _ in rows],
        "replaced": draw(st.booleans()),
        "dtypes": draw(st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16, torch.float16])] * 2)),
        "likeness": draw(st.sampled_from([0.0, 0.7, 1.0])),
        "spread": draw(st.sampled_from([0.1, 1.0, 5.0])),
        "quantum": draw(st.sampled_from([0.0, 0.0, 0.75])),
        "padding": draw(st.sampled_from([0, 3])),
        "seed": draw(st.integers(0, 10**6)),
        "masked": draw(st.booleans()),
        # Small ones, so that a small vocabulary takes every path of a large one.
        "is_small": draw(st.booleans()),
    }


@on_device
@settings(max_examples=EXAMPLES)
@given(batches())
def test_tokens_equal_the_references_for_every_mixture_of_rows(case: dict) -> None:
    generator = torch.Generator().manual_seed(case["seed"])
    rows, vocab_size, padding = case["rows"], case["vocab_size"], case["padding"]
    num_drafted = max(max(case["sources"]) + 1, len(rows))
    noise, other = torch.randn(2, num_drafted, vocab_size + padding, generator=generator)
    logits, drafted = noise * case["spread"], (case["likeness"] * noise + (1 - case["likeness"]) * other)
    drafted = drafted.roll(1, dims=0) * case["spread"]  # a drafter's rows need not be in the model's order
    if case["quantum"]:  # exact ties everywhere
        logits, drafted = ((t / case["quantum"]).round() * case["quantum"] for t in (logits, drafted))
    if case["masked"]:
        for some in (logits, drafted):
            some[torch.rand(some.shape, generator=generator) < 0.3] = -INFINITY
    table = make_table(vocab_size, case["requests"])
    batch = {
        "logits": logits[: len(rows)].to(DEVICE, case["dtypes"][0])[:, :vocab_size],
        "draft_logits": drafted.to(DEVICE, case["dtypes"][1])[:, :vocab_size],
        "rows": rows,
        "draft_rows": torch.tensor(case["sources"], dtype=torch.int32, device=DEVICE),
        "output_index": torch.randint(0, 5000, (len(rows),), generator=generator).to(DEVICE),
        "replaced": case["replaced"],
        "any_filtered": any(name in request for request in case["requests"] for name in FILTERS),
    }
    batch["siblings"] = propose(batch, table, case["num_siblings"])
    for i, num_given in enumerate(case["num_given"]):
        batch["siblings"][i, num_given:] = -1
    expected = expected_tokens(batch, table)
    with pytest.MonkeyPatch.context() as patch:
        if case["is_small"]:
            for module, name, size in (
                *((rejection, "_BLOCK", 128), (rejection, "_PROGRAMS", 5)),
                *((random_sample, "_TILE", 2), (random_sample, "_CANDIDATES", 16)),
            ):
                patch.setattr(module, name, size)
        assert sample(batch, table) == expected


def one_request(num_rows: int, vocab_size: int, **request: float) -> tuple[dict, dict[str, torch.Tensor]]:
    """A batch of one request's positions, whose drafter is no good, and its parameters."""
    generator = torch.Generator().manual_seed(11)
    logits, drafted = (torch.randn(2, num_rows, vocab_size, generator=generator) * 2).to(DEVICE)
    batch = {
        "logits": logits,
        "draft_logits": drafted,
        "rows": [0] * num_rows,
        "draft_rows": torch.arange(num_rows, dtype=torch.int32, device=DEVICE),
        "output_index": torch.arange(num_rows, device=DEVICE),
        "replaced": False,
        "any_filtered": any(name in request for name in FILTERS),
    }
    return batch, make_table(vocab_size, [{"temperature": 1.0, "seed": 5} | request])


@on_device
@pytest.mark.parametrize("filters", [{}, {"top_k": 9}])
@pytest.mark.parametrize("num_siblings", [1, 2, 5])
def test_accepted_and_rejected_proposals_both_come_out_as_the_reference_has_them(
    num_siblings: int, filters: dict
) -> None:
    batch, table = one_request(120 if DEVICE == "cuda" else 8, 60, **filters)
    batch["siblings"] = propose(batch, table, num_siblings)
    tokens = sample(batch, table)
    assert tokens == expected_tokens(batch, table)
    hits = [token in row for token, row in zip(tokens, batch["siblings"].tolist(), strict=True)]
    assert any(hits) and not all(hits)


@on_device
def test_rows_without_proposals_have_the_tokens_of_a_plain_draw_and_greedy_ones_the_best() -> None:
    batch, table = one_request(6, 517, top_k=40)
    table = make_table(517, [{"temperature": 0.8, "seed": -3}, {}, {"temperature": 1.0, "top_p": 0.7, "seed": 1}])
    rows = batch["rows"] = [0, 1, -1, 2, 1, 0]
    batch["siblings"] = torch.full((6, 2), 3, dtype=torch.int32, device=DEVICE)
    batch["siblings"][5] = -1
    batch["draft_rows"][[0, 3]] = -1
    on_rows = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    plain = sample_triton(
        batch["logits"], on_rows, **table, output_index=batch["output_index"], any_random=True, any_filtered=True
    )
    assert sample(batch, table) == plain.tolist()


@on_device
def test_a_row_without_filters_does_not_see_that_others_have_some() -> None:
    batch, table = one_request(20 if DEVICE == "cuda" else 4, 1500)
    batch["siblings"] = propose(batch, table, 2)
    tokens = sample(batch, table)
    assert tokens == expected_tokens(batch, table)
    assert sample(batch | {"any_filtered": True}, table) == tokens


@on_device
@pytest.mark.parametrize("replaced", [False, True])
def test_where_nothing_is_left_p_stays_as_it_was(replaced: bool) -> None:
    """The drafter is the model, and still proposed what neither can say."""
    batch, table = one_request(3, 300, seed=8)
    batch["logits"][:, 7] = -INFINITY
    batch["draft_logits"], batch["replaced"] = batch["logits"].clone(), replaced
    batch["siblings"] = torch.full((3, 2 if replaced else 1), 7, dtype=torch.int32, device=DEVICE)
    tokens = sample(batch, table)
    draws = (table["seed"].expand(3), batch["output_index"], table["child_index"].expand(3))
    plain = gumbel_sample_reference(batch["logits"], table["temperature"].expand(3), *draws)
    assert tokens == plain.tolist() == expected_tokens(batch, table)


@on_device
def test_what_a_sure_drafter_has_left_is_not_lost_to_rounding_in_the_kernel() -> None:
    num_rows = 200 if DEVICE == "cuda" else 16
    batch, table = one_request(num_rows, 70)
    batch["draft_logits"][:, 4] = 30.0  # so sure that in float32 nothing is left but this
    batch["siblings"] = propose(batch, table, 3)
    assert (batch["siblings"][:, 0] == 4).all()
    assert sample(batch, table) == expected_tokens(batch, table)


@on_device
def test_a_row_without_a_possible_token_gives_its_first_also_where_the_drafter_had_none() -> None:
    batch, table = one_request(2, 100)
    batch["logits"][:] = -INFINITY
    batch["draft_logits"][1] = -INFINITY
    batch["siblings"] = torch.tensor([[5, 6], [7, -1]], dtype=torch.int32, device=DEVICE)
    assert sample(batch, table) == [0, 0]


@on_device
def test_proposals_may_be_a_column_of_a_wider_tensor_but_logits_must_be_rows() -> None:
    batch, table = one_request(4, 64)
    several = propose(batch, table, 3)
    batch["siblings"] = several[:, :1]
    assert sample(batch, table) == expected_tokens(batch, table)
    with pytest.raises(ValueError, match="rows contiguous"):
        sample(batch | {"draft_logits": batch["draft_logits"].T.contiguous().T}, table)
    with pytest.raises(ValueError, match="columns of one tensor"):
        sample(batch, table | {"top_p": table["top_p"].expand(3)})


@on_device
def test_a_draft_is_drawn_by_the_sampler_from_a_stream_of_its_own() -> None:
    batch, table = one_request(10, 333, temperature=0.6)
    on_rows = torch.zeros(10, dtype=torch.int32, device=DEVICE)
    drafts = sample_triton(
        batch["draft_logits"],
        on_rows,
        **table,
        output_index=batch["output_index"],
        any_random=True,
        any_filtered=False,
        stream=STREAM_DRAFT,
    )
    batch["siblings"] = propose(batch, table, 1)
    assert drafts.tolist() == batch["siblings"][:, 0].tolist()


@triton.jit
def _noise_of_a_stream(noise_ptr, seed_ptr, output_index_ptr, child_index_ptr, STREAM: tl.constexpr, N: tl.constexpr):
    key, output, child = tl.load(seed_ptr), tl.load(output_index_ptr), tl.load(child_index_ptr)
    tl.store(noise_ptr + tl.arange(0, N), gumbel_noise(tl.arange(0, N // 4), key, output, child, STREAM))


@on_device
@pytest.mark.parametrize("stream", [STREAM_SAMPLE, STREAM_ACCEPT, STREAM_DRAFT])
def test_noise_of_every_stream_is_the_references(stream: int) -> None:
    noise = torch.empty(256, device=DEVICE)
    seed, output_index, child_index = one = [torch.tensor([value], device=DEVICE) for value in (-123456789, 17, 2)]
    _noise_of_a_stream[(1,)](
        noise_ptr=noise,
        seed_ptr=seed,
        output_index_ptr=output_index,
        child_index_ptr=child_index,
        STREAM=stream,
        N=256,
    )
    uniform = philox_uniform_reference(*(t.cpu() for t in one), 256, stream)[0].double()
    torch.testing.assert_close(noise.cpu().double(), -torch.log(-torch.log1p(-uniform)), rtol=1e-6, atol=3e-6)


# A GPU


def large_batch(num_rows: int, num_siblings: int) -> tuple[dict, dict[str, torch.Tensor]]:
    """Requests of every kind, five positions each, with a drafter that knows them well."""
    vocab_size, generator = 151_936, torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    drafted = (logits + torch.randn(num_rows, vocab_size, generator=generator)).bfloat16().to(DEVICE)
    filters = [{}, {}, {}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.8}]
    requests = [{"temperature": 0.0}]
    for i, some in enumerate(filters):
        requests += [{"temperature": 0.4, "seed": i, **some}, {"temperature": 0.9, "seed": i + 50, **some}]
    num_requests = -(-num_rows // 5)
    batch = {
        "logits": logits.bfloat16().to(DEVICE),
        "draft_logits": drafted,
        "rows": [(i // 5 + 1) % (len(requests) + 1) - 1 if num_requests > 1 else 1 for i in range(num_rows)],
        # Four drafts and then a position of its own, as in a chain.
        "draft_rows": torch.tensor([-1 if i % 5 == 4 else i for i in range(num_rows)], dtype=torch.int32).to(DEVICE),
        "output_index": torch.arange(num_rows, device=DEVICE),
        "replaced": False,
        "any_filtered": num_requests > 1,
    }
    table = make_table(vocab_size, requests)
    batch["siblings"] = propose(batch, table, num_siblings)
    return batch, table


@pytest.mark.gpu
@pytest.mark.parametrize("num_siblings", [1, 4])
@pytest.mark.parametrize("num_rows", [5, 320])
def test_tokens_equal_the_references_at_full_size(num_rows: int, num_siblings: int) -> None:
    batch, table = large_batch(num_rows, num_siblings)
    tokens, expected = sample(batch, table), expected_tokens(batch, table)
    # The reference adds up 150,000 probabilities in float32: a token on a nucleus' edge may differ.
    assert sum(a != b for a, b in zip(tokens, expected, strict=True)) <= num_rows // 50
    hits = [token in row for token, row in zip(tokens, batch["siblings"].tolist(), strict=True)]
    assert any(hits) and not all(hits)


@pytest.mark.gpu
@pytest.mark.parametrize("num_siblings", [1, 3])
def test_a_graph_replays_with_other_proposals(num_siblings: int) -> None:
    batch, table = large_batch(40, num_siblings)
    rows = torch.tensor(batch["rows"], dtype=torch.int32, device=DEVICE)
    out = torch.empty(40, dtype=torch.int64, device=DEVICE)
    names = ("logits", "output_index", "draft_logits", "draft_rows", "siblings", "replaced", "any_filtered")

    def call() -> None:
        rejection_sample_triton(rows=rows, **table, **{name: batch[name] for name in names}, out=out)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for step in range(3):
        batch["output_index"].add_(step)
        batch["rows"] = batch["rows"][5:] + batch["rows"][:5]
        rows.copy_(torch.tensor(batch["rows"], dtype=torch.int32))
        batch["draft_logits"].copy_(batch["draft_logits"].roll(step, dims=1))
        batch["siblings"].copy_(propose(batch, table, num_siblings))
        graph.replay()
        assert out.tolist() == sample(batch, table)


@pytest.mark.gpu
@pytest.mark.parametrize("num_siblings", [1, 3])
def test_a_rows_token_does_not_depend_on_the_batch(num_siblings: int) -> None:
    batch, table = large_batch(320, num_siblings)
    together = sample(batch, table)
    for i in range(0, 320, 7):
        names = ("logits", "rows", "draft_rows", "siblings", "output_index")
        alone = batch | {name: batch[name][i : i + 1] for name in names}
        assert sample(alone, table) == together[i : i + 1]


@pytest.mark.gpu
def test_the_workspace_is_counted() -> None:
    batch, table = large_batch(320, 3)
    sample(batch, table)
    torch.cuda.synchronize()
    rows = torch.tensor(batch["rows"], dtype=torch.int32, device=DEVICE)
    names = ("logits", "output_index", "draft_logits", "draft_rows", "siblings", "replaced", "any_filtered")
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    rejection_sample_triton(rows=rows, **table, **{name: batch[name] for name in names})
    torch.cuda.synchronize()
    used, counted = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before, workspace_bytes(320, 151_936, 3)
    assert 0.9 * counted <= used <= counted
