"""Every parameter does what it says, exactly in distribution, and no request notices its neighbours."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm.core.scheduler_output import NewRow
from teachllm.sampling.device_parameters import parameters_of
from teachllm.sampling.filters import apply_filters, count_nucleus
from teachllm.sampling.sampler import Sampler, SamplerOutput
from teachllm.sampling_params import DEFAULTS, FILTERS, PENALTIES, SamplingParams
from teachllm_lessons.helpers.lesson_00 import contract_choose, greedy
from teachllm_lessons.helpers.lesson_07 import contract_count_nucleus
from tests.request_kinds import EXAMPLES, FILTER_VALUES, SAMPLING_KINDS, asking
from tests.thorough import times

VOCAB = 11
CPU = torch.device("cpu")
MINUS_INFINITY = float("-inf")


@dataclass
class Ask:
    """One request in one step: parameters, the sequence so far, and its logits."""

    params: dict[str, Any]
    prompt: list[int] = field(default_factory=lambda: [1, 2])
    outputs: list[int] = field(default_factory=list)
    logits: list[float] = field(default_factory=lambda: [0.1 * ((7 * i) % VOCAB) for i in range(VOCAB)])
    seed: int = 0
    child: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()

    def new_row(self) -> NewRow:
        params = SamplingParams(**{"max_tokens": None, **self.params})
        sequence = [*self.prompt, *self.outputs]
        return NewRow(sequence, len(self.prompt), params, self.child, self.seed, self.stop_token_ids, self.bad_words)


def sample(asks: list[Ask], rows: list[int] | None = None) -> SamplerOutput:
    """Sample one step of these requests, in the given rows."""
    rows = rows or list(range(len(asks)))
    sampler = Sampler(max(rows) + 1, VOCAB, CPU)
    token_ids = torch.full((max(rows) + 1, 40), -1)  # what lies after a sequence's end must not be read as an id
    for row, ask in zip(rows, asks, strict=True):
        sampler.open_rows([(row, ask.new_row())])
        sequence = [*ask.prompt, *ask.outputs]
        token_ids[row, : len(sequence)] = torch.tensor(sequence)
    lengths = torch.tensor([len(ask.prompt) + len(ask.outputs) for ask in asks])
    return sampler.sample(torch.tensor([ask.logits for ask in asks]), rows, lengths, token_ids)


def one(**ask: Any) -> int:
    """Return the greedy token of one request."""
    return sample([Ask({"temperature": 0, **ask.pop("params", {})}, **ask)]).token_ids.item()


def frequencies(params: dict[str, Any], logits: list[float], num_draws: int = 12_000, **ask: Any) -> torch.Tensor:
    """Return how often each token is drawn, over as many output positions of one request."""
    request = Ask({"temperature": 1.0, **params}, logits=logits, seed=5, **ask)
    sampler = Sampler(1, VOCAB, CPU)
    sampler.open_rows([(0, request.new_row())])
    num_known = len(request.prompt) + len(request.outputs)
    token_ids = torch.tensor([[*request.prompt, *request.outputs]])
    lengths = num_known + torch.arange(num_draws)
    drawn = sampler.sample(torch.tensor([logits] * num_draws), [0] * num_draws, lengths, token_ids).token_ids
    return torch.bincount(drawn, minlength=VOCAB) / num_draws


def assert_distribution(observed: torch.Tensor, expected: torch.Tensor, num_draws: int = 12_000) -> None:
    """Chi-square against exact probabilities; seeds are fixed, so this does not flicker."""
    assert observed[expected == 0].sum() == 0
    possible = expected > 0
    statistic = (num_draws * (observed - expected).square() / expected)[possible].sum().item()
    degrees = int(possible.sum()) - 1
    # Wilson and Hilferty's approximation of the quantile at probability 1e-4 (z = 3.72).
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3 if degrees else 1e-9
    assert statistic <= limit, (observed, expected)


SKEWED = [3.0, 2.5, 2.5, 1.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0]
SHUFFLED = [SKEWED[i] for i in (4, 9, 1, 0, 6, 2, 10, 3, 5, 8, 7)]  # id 0, which a row that lost all keeps, is not best


def kept_by_hand(params: dict[str, Any]) -> torch.Tensor:
    """Return exact probabilities of `SHUFFLED`, by the definitions of the parameters, one token at a time."""
    scaled = [logit / params.get("temperature", 1.0) for logit in SHUFFLED]
    weights = [math.exp(value) for value in scaled]
    order = sorted(range(VOCAB), key=lambda i: (-weights[i], i))
    order = [i for i in order if weights[i] >= params.get("min_p", 0.0) * max(weights) * (1 - 1e-6)]
    order = order[: params.get("top_k", 0) or VOCAB]
    total, reached, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        kept.append(i)
        reached += weights[i] / total
        if reached >= params.get("top_p", 1.0):
            break
    exact = [weights[i] if i in kept else 0.0 for i in range(VOCAB)]
    return torch.tensor(exact) / sum(exact)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.4},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 2},  # the second and third are equally likely: the lower id stays
        {"top_k": 4, "temperature": 2.0},
        {"top_p": 0.3},
        {"top_p": 0.8},
        {"top_p": 0.95, "temperature": 1.5},
        {"min_p": 0.2},
        {"min_p": 0.01, "temperature": 0.7},
        {"top_k": 5, "top_p": 0.7, "min_p": 0.05, "temperature": 1.3},
        *(asking(name) for name in FILTERS),
        *({name: extreme} for name, values in FILTER_VALUES.items() for extreme in (min(values), max(values))),
        asking(*FILTERS, temperature=1.6),
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(params: dict[str, Any]) -> None:
    assert_distribution(frequencies(params, SHUFFLED), kept_by_hand(params))


def test_a_top_p_of_one_cuts_nothing_however_unlikely() -> None:
    logits = -2.0 * torch.arange(60.0)[None]  # the sum of probabilities is 1 in float32 long before the end
    kept = apply_filters(logits, parameters_of([SamplingParams()], 60), num_candidates=60)
    assert torch.equal(kept, logits)


def test_the_nucleus_is_what_its_lesson_says() -> None:
    assert contract_count_nucleus(count_nucleus) > 100


def test_a_nucleus_of_ones_own_is_asked_and_keeps_one_token_at_least() -> None:
    sampler = Sampler(1, VOCAB, CPU, nucleus=lambda probabilities, top_p: torch.zeros((1, 1), dtype=torch.int64))
    sampler.open_rows([(0, Ask({"temperature": 1.0, "top_p": 0.99}).new_row())])
    drawn = sampler.sample(torch.tensor([SKEWED]), [0], torch.tensor([2]), torch.tensor([[1, 2]])).token_ids
    assert drawn.tolist() == [0]


def test_draws_under_penalties_follow_the_exact_distribution() -> None:
    params = {"repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.3}
    expected = list(SKEWED)
    for token_id in {1, 7, 0, 3}:  # in prompt or output
        expected[token_id] = SKEWED[token_id] / 1.5 if SKEWED[token_id] > 0 else SKEWED[token_id] * 1.5
    expected[0] -= 0.4 + 2 * 0.3
    expected[3] -= 0.4 + 0.3
    # Histories matter: the same position of requests with other seeds.
    asks = [Ask(params, [1, 7], [0, 3, 0], SKEWED, seed) for seed in range(2500)]
    observed = torch.bincount(sample(asks).token_ids, minlength=VOCAB) / len(asks)
    assert_distribution(observed, torch.tensor(expected).softmax(0), len(asks))


def test_greedy_takes_the_most_likely_token_and_of_equals_the_lowest_id() -> None:
    assert one(logits=SKEWED) == 0
    tied = [0.0] * VOCAB
    assert one(logits=tied) == 0
    assert one(logits=tied, params={"presence_penalty": 1.0}, outputs=[0, 1]) == 2
    tied[4] = tied[8] = 2.0
    assert one(logits=tied) == 4


def test_the_greedy_choice_keeps_the_contract_that_readers_of_lesson_00_are_given() -> None:
    assert contract_choose(greedy) > 10


def test_repetition_looks_at_prompt_and_output_the_other_penalties_only_at_the_output() -> None:
    logits = [1.0, 0.9, 0.8, *[0.0] * 8]
    assert one(logits=logits, params={"repetition_penalty": 2.0}, prompt=[0], outputs=[1]) == 2
    assert one(logits=logits, params={"presence_penalty": 1.0}, prompt=[0], outputs=[1]) == 0
    assert one(logits=logits, params={"presence_penalty": 1.0}, prompt=[3], outputs=[0]) == 1
    assert one(logits=logits, params={"frequency_penalty": 0.07}, prompt=[3], outputs=[0]) == 0
    assert one(logits=logits, params={"frequency_penalty": 0.07}, prompt=[3], outputs=[0, 0]) == 1
    assert one(logits=[-1.0] * VOCAB, params={"repetition_penalty": 2.0}, prompt=[0, 1], outputs=[]) == 2


def test_allowed_ids_bias_and_bans_change_the_choice() -> None:
    assert one(logits=SKEWED, params={"allowed_token_ids": [5, 9, 4]}) == 4
    assert one(logits=SKEWED, params={"logit_bias": {10: 9.0, 3: 1.0}}) == 10
    assert one(logits=SKEWED, params={"logit_bias": {0: -100.0}}) == 1
    assert one(logits=SKEWED, params={"allowed_token_ids": [4], "logit_bias": {0: 100.0}}) == 4
    assert_distribution(
        frequencies({"allowed_token_ids": [1, 2, 7]}, SKEWED),
        torch.tensor([v if i in (1, 2, 7) else MINUS_INFINITY for i, v in enumerate(SKEWED)]).softmax(0),
    )


def test_a_stop_token_waits_for_min_tokens() -> None:
    early = {"logits": SKEWED, "params": {"min_tokens": 2}, "stop_token_ids": frozenset({0, 1, VOCAB, 99_999})}
    assert one(**early, outputs=[]) == 2
    assert one(**early, outputs=[3]) == 2
    assert one(**early, outputs=[3, 3]) == 0


@pytest.mark.parametrize(
    ("prompt", "outputs", "expected"),
    [
        ([9], [], 1),  # (0,) is banned at once
        ([9], [4, 5], 2),  # (4, 5, 1) would be complete
        ([9], [5, 4], 1),
        ([4], [5], 1),  # a bad word is looked for in the output, not across the prompt's end
        ([9], [6], 1),
        ([9], [4, 5, 2], 3),  # (2, 2) and (5, 2, 1) together
    ],
)
def test_a_bad_word_is_never_completed(prompt: list[int], outputs: list[int], expected: int) -> None:
    bad_words = ((0,), (4, 5, 1), (2, 2), (5, 2, 1))
    assert one(logits=SKEWED, prompt=prompt, outputs=outputs, bad_words=bad_words) == expected


def test_constraints_hold_for_each_row_of_a_batch_by_itself() -> None:
    asks = [
        Ask({"temperature": 0}, logits=SKEWED, bad_words=((0,), (3, 4, 5, 0))),
        Ask({"temperature": 0}, logits=SKEWED),
        Ask({"temperature": 0, "allowed_token_ids": [8, 9]}, logits=SKEWED),
        Ask({"temperature": 0, "logit_bias": {5: 50.0}}, logits=SKEWED, outputs=[1, 2]),
        Ask({"temperature": 0, "min_tokens": 5}, logits=SKEWED, stop_token_ids=frozenset({0})),
        Ask({"temperature": 0, "allowed_token_ids": [10]}, logits=SKEWED, bad_words=((1, 1),)),
    ]
    assert sample(asks).token_ids.tolist() == [1, 0, 8, 5, 1, 10]


settings_of_requests = st.fixed_dictionaries(
    {},
    optional={name: st.sampled_from([DEFAULTS[name], EXAMPLES[name]]) for name in (*FILTERS, *PENALTIES)}
    | {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.integers(0, VOCAB + 3),
        "top_p": st.sampled_from([0.2, 0.9, 1.0]),
        "logit_bias": st.just(EXAMPLES["logit_bias"]),
        "allowed_token_ids": st.just(EXAMPLES["allowed_token_ids"]),
        "min_tokens": st.integers(0, 3),
        "logprobs": st.integers(0, 3),
    },
)
requests = st.builds(
    Ask,
    params=settings_of_requests,
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
    outputs=st.lists(st.integers(0, VOCAB - 1), max_size=5),
    logits=st.lists(st.integers(-40, 40).map(lambda i: i / 8), min_size=VOCAB, max_size=VOCAB),
    seed=st.integers(0, 2**64 - 1),
    child=st.integers(0, 3),
    stop_token_ids=st.just(frozenset({7, 8})),
    bad_words=st.sampled_from([(), ((4,), (1, 9))]),
)


@settings(max_examples=times(25, 400))
@given(st.lists(requests, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_request_samples_the_same_token_whatever_runs_beside_it(asks: list[Ask], random: Any) -> None:
    together = sample(asks)
    order = list(range(len(asks)))
    random.shuffle(order)
    shuffled = sample([asks[i] for i in order], rows=random.sample(range(9), len(asks)))
    for place, i in enumerate(order):
        alone = sample([asks[i]])
        assert alone.token_ids[0] == together.token_ids[i] == shuffled.token_ids[place]
        if "logprobs" in asks[i].params:
            assert alone.logprobs is not None and together.logprobs is not None and shuffled.logprobs is not None
            assert alone.logprobs[0] == together.logprobs[i] == shuffled.logprobs[place]
        else:
            assert alone.logprobs is None
            assert together.logprobs is None or together.logprobs[i] is None


def test_seed_child_and_output_index_each_change_the_draw_and_nothing_else_does() -> None:
    flat = [0.0] * VOCAB

    def draws(seeds: range, child: int = 0, num_outputs: int = 0) -> list[int]:
        asks = [Ask({}, outputs=[1] * num_outputs, logits=flat, seed=seed << 40, child=child) for seed in seeds]
        return sample(asks).token_ids.tolist()

    base = draws(range(40))
    assert draws(range(40)) == base
    assert draws(range(40, 80)) != base
    assert draws(range(40), child=1) != base
    assert draws(range(40), num_outputs=1) != base
    longer_prompt = sample([Ask({}, prompt=[1] * 9, logits=flat, seed=seed << 40) for seed in range(40)])
    assert longer_prompt.token_ids.tolist() == base


def test_rows_that_verify_drafts_sample_as_if_they_came_one_step_at_a_time() -> None:
    params = {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "top_k": 5, "min_tokens": 2, "logprobs": 2}
    ask = Ask(params, prompt=[1, 2], outputs=[3, 4, 5], seed=11, stop_token_ids=frozenset({0}), bad_words=((4, 6),))
    sampler = Sampler(3, VOCAB, CPU)
    sampler.open_rows([(2, ask.new_row())])
    token_ids = torch.full((3, 10), -1, dtype=torch.int32)
    token_ids[2, :5] = torch.tensor([1, 2, 3, 4, 5])
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([2, 3, 4, 5])
    at_once = sampler.sample(logits.clone(), [2, 2, 2, 2], lengths, token_ids)
    assert at_once.logprobs is not None
    for i in range(4):
        step = sampler.sample(logits[i : i + 1].clone(), [2], lengths[i : i + 1], token_ids)
        assert step.logprobs is not None
        assert step.token_ids[0] == at_once.token_ids[i]
        assert step.logprobs[0] == at_once.logprobs[i]


def test_logprobs_are_those_of_the_untouched_logits() -> None:
    ask = Ask({"temperature": 0, "logit_bias": {6: 50.0}, "logprobs": 3}, logits=SKEWED)
    output = sample([Ask({}), ask, Ask({"logprobs": 0}, logits=SKEWED)])
    assert output.logprobs is not None and output.logprobs[0] is None
    exact = torch.tensor(SKEWED, dtype=torch.float64).log_softmax(0)
    forced, plain = output.logprobs[1], output.logprobs[2]
    assert forced is not None and plain is not None
    assert (forced.token_id, forced.rank) == (6, 7)
    assert forced.logprob == pytest.approx(exact[6].item(), abs=1e-6)
    assert forced.top_ids[0] == 0 and set(forced.top_ids) == {0, 1, 2}
    assert forced.top_logprobs == pytest.approx([exact[i].item() for i in forced.top_ids], abs=1e-6)
    assert plain.token_id == output.token_ids[2] and (plain.top_ids, plain.top_logprobs) == ([], [])


def test_of_equals_the_lowest_ids_are_listed_and_ranked_first_however_many_are_asked_for() -> None:
    logits = torch.tensor([[1.0, 3.0, 0.0, 3.0, -1.0, 3.0, 1.0, 3.0, -0.0, 1.0, 3.0]])
    order = [1, 3, 5, 7, 10, 0, 6, 9, 2, 8, 4]
    for num_top in range(VOCAB + 1):
        for target in range(VOCAB):
            (entry,) = Sampler(1, VOCAB, CPU).prompt_logprobs(logits, [target], num_top)
            assert entry.top_ids == order[:num_top]
            assert entry.rank == 1 + order.index(target)


def test_prompt_logprobs_score_the_given_tokens() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    entries = Sampler(1, VOCAB, CPU).prompt_logprobs(logits, [4, 0, 9], num_top=2)
    exact = logits.double().log_softmax(-1)
    for row, (entry, target) in enumerate(zip(entries, [4, 0, 9], strict=True)):
        assert entry.token_id == target
        assert entry.logprob == pytest.approx(exact[row, target].item(), abs=1e-6)
        assert entry.rank == 1 + sum(exact[row] > exact[row, target])
        assert entry.top_ids == exact[row].argsort(descending=True)[:2].tolist()


def test_a_reused_row_remembers_nothing() -> None:
    sampler = Sampler(1, VOCAB, CPU)
    strange = Ask({"allowed_token_ids": [9], "logprobs": 1, "top_k": 2, "frequency_penalty": 1.0}, bad_words=((3,),))
    sampler.open_rows([(0, strange.new_row())])
    assert (
        sampler.sample(torch.tensor([SKEWED]), [0], torch.tensor([2]), torch.zeros(1, 8).long()).token_ids.item() == 9
    )
    sampler.close_row(0)
    sampler.open_rows([(0, Ask({"temperature": 0}).new_row())])
    output = sampler.sample(torch.tensor([SKEWED]), [0], torch.tensor([2]), torch.zeros(1, 8).long())
    assert (output.token_ids.item(), output.logprobs) == (0, None)


def test_a_step_with_only_greedy_rows_is_one_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(3, VOCAB, CPU)
    sampler.open_rows([(0, Ask({"temperature": 0}).new_row())])
    sampler.open_rows([(1, Ask({"temperature": 0}).new_row())])
    sampler.open_rows([(2, Ask({"logprobs": 1}).new_row())])  # open, but not in this step
    monkeypatch.setattr(sampler._state, "select", None)
    output = sampler.sample(
        torch.tensor([SKEWED, SKEWED[::-1]]), [0, 1], torch.tensor([2, 2]), torch.zeros(3, 8).long()
    )
    assert output.token_ids.tolist() == [0, 10]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (Ask({"allowed_token_ids": [VOCAB]}), "allowed_token_ids: token id 11"),
        (Ask({"logit_bias": {VOCAB: 1.0}}), "logit_bias: token id 11"),
        (Ask({}, bad_words=((1, VOCAB),)), "bad_words: token id 11"),
        (Ask({"allowed_token_ids": [1], "min_tokens": 1}, stop_token_ids=frozenset({1})), "can forbid every token"),
    ],
)
def test_a_row_that_cannot_be_sampled_is_refused_when_it_opens(ask: Ask, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(1, VOCAB, CPU).open_rows([(0, ask.new_row())])


def test_a_temperature_of_next_to_nothing_is_greedy_beside_a_random_request_too() -> None:
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # interpreted there
    sampler = Sampler(2, VOCAB, device)
    sampler.open_rows([(0, Ask({"temperature": 5e-6}).new_row()), (1, Ask({"temperature": 1.0}).new_row())])
    logits = torch.zeros(2, VOCAB, device=device)
    logits[0, [4, 7, 9]] = 1.0  # noise would choose among them
    rows, both = torch.arange(2, dtype=torch.int32, device=device), (True, False)
    for num_known in range(2, 20 if torch.cuda.is_available() else 5):
        lengths = torch.full((2,), num_known, dtype=torch.int32, device=device)
        assert sampler.sample_plain(logits, rows, lengths, both)[0] == 4


@pytest.mark.gpu
def test_a_neighbour_that_asks_for_logprobs_or_penalties_changes_no_token() -> None:
    device, seeds = torch.device("cuda"), range(200)
    logits = torch.zeros(len(seeds) + 2, 64, device=device)
    logits[:, 10:20] = 2.0  # the fraction of the mass that is kept falls between equals
    sampler = Sampler(len(logits), 64, device)
    for row in seeds:
        sampler.open_rows([(row, Ask({"temperature": 1.0, "top_p": 0.6}, seed=row).new_row())])
    for row, asked in enumerate(({"logprobs": 0}, {"presence_penalty": 0.5}), start=len(seeds)):
        sampler.open_rows([(row, Ask(asked).new_row())])
    lengths = torch.full((len(logits),), 2, device=device)
    rows = torch.arange(len(seeds), dtype=torch.int32, device=device)
    alone = sampler.sample_plain(logits[: len(seeds)], rows, lengths.int(), (True, True))
    token_ids = torch.ones(len(logits), 40, dtype=torch.int32, device=device)
    together = sampler.sample(logits.clone(), list(range(len(logits))), lengths, token_ids).token_ids
    assert together[: len(seeds)].equal(alone) and len(alone.unique()) > 3


@pytest.mark.gpu
def test_sampling_never_waits_for_the_device_whatever_a_request_asks_for() -> None:
    kinds = [asking("logprobs", temperature=0.0), *SAMPLING_KINDS.values()]
    device = torch.device("cuda")
    sampler = Sampler(len(kinds) + 1, VOCAB, device)
    for row, params in enumerate([*kinds, {}]):
        ask = Ask(params, bad_words=((4, 6),), stop_token_ids=frozenset({0}))
        sampler.open_rows([(row, ask.new_row())])
    token_ids = torch.ones(len(kinds) + 1, 40, dtype=torch.int32, device=device)
    lengths = torch.full((len(kinds),), 2, device=device)
    logits = torch.randn(len(kinds), VOCAB, device=device)
    rows = list(range(len(kinds)))
    sampler.sample(logits.clone(), rows, lengths, token_ids)  # builds what is kept
    sampler.close_row(len(kinds))  # another batch now, for which all must be built anew
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = sampler.sample(logits.clone(), rows, lengths, token_ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert output.logprobs is not None and output.logprobs[0] is not None
    assert output.logprobs[0].token_id == output.token_ids[0] == logits[0].argmax()
