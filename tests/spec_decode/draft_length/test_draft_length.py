"""The length follows machine, load and acceptance: to the best one, down to none where none pays, and up again."""

from __future__ import annotations

from functools import cache
from itertools import count
from random import Random
from statistics import fmean

import pytest

from teachllm.core.request import Request
from teachllm.core.scheduler_output import ScheduledRequest, SchedulerOutput
from teachllm.sampling_params import SamplingParams
from teachllm.spec_decode.draft_length import AdaptiveLength, FixedLength, make_draft_length
from teachllm.spec_decode.step_times import Prior
from teachllm.speculative_config import SpeculativeConfig
from tests.spec_decode.draft_length.simulated import Machine, OverTime, Simulated, Work, h200, roofline, straight
from tests.thorough import THOROUGH, only_thorough, times

MACHINES: dict[str, Machine] = {
    "waits for weights": roofline(per_token=0.001, per_draft=0.05),
    "at its limit from 10 tokens on": roofline(per_token=0.1, per_draft=0.05),
    "at its limit from 40 tokens on": roofline(per_token=0.025, per_draft=0.05),
    "drafts dearly": roofline(per_token=0.025, per_draft=0.15),
    "pays for every token": straight(per_token=0.3, per_draft=0.1),
    "pays little for a token": straight(per_token=0.05, per_draft=0.02),
}
WARM_UP, NUM_STEPS = 400, 700
ENDLESS, COME_AND_GO, IN_AND_OUT = None, 150, 30  # tokens of an answer in the mean


def constant(value: float) -> OverTime:
    return lambda step: value


def adaptive(max_drafts: int = 4, draft_cost: float = 0.1) -> AdaptiveLength:
    return AdaptiveLength(range(max_drafts + 1), draft_cost)


def speed(
    length: AdaptiveLength | FixedLength,
    machine: str,
    num_requests: int,
    acceptance: float,
    num_output: int | None,
    seed: int = 0,
) -> float:
    """Tokens a second, once it has seen the machine. All but the first seed are of an engine that runs ahead."""
    load = constant(num_requests), constant(acceptance)
    run = Simulated(length, MACHINES[machine], *load, num_output, seed=seed, delay=2 if seed else 0)
    return run.run(WARM_UP).speed_of(NUM_STEPS)


def best_speed(
    machine: str, num_requests: int, acceptance: float, num_output: int | None, seed: int = 0, most: int = 4
) -> float:
    lengths = [FixedLength(range(k + 1)) for k in range(most + 1)]
    return max(speed(each, machine, num_requests, acceptance, num_output, seed) for each in lengths)


CASES: list[tuple[str, int, float, int | None]] = [
    ("waits for weights", 1, 0.8, ENDLESS),
    ("drafts dearly", 4, 0.8, COME_AND_GO),
    ("pays for every token", 8, 0.3, COME_AND_GO),
]
MORE_CASES: list[tuple[str, int, float, int | None]] = [
    ("at its limit from 10 tokens on", 6, 0.95, ENDLESS),
    ("at its limit from 40 tokens on", 12, 0.6, COME_AND_GO),
    ("waits for weights", 12, 0.6, COME_AND_GO),
    ("at its limit from 10 tokens on", 1, 0.8, ENDLESS),
    ("at its limit from 10 tokens on", 6, 0.95, COME_AND_GO),
    ("at its limit from 10 tokens on", 12, 0.6, COME_AND_GO),
    ("at its limit from 40 tokens on", 12, 0.3, ENDLESS),
    ("at its limit from 40 tokens on", 12, 0.6, ENDLESS),
    ("at its limit from 40 tokens on", 12, 0.8, ENDLESS),
    ("drafts dearly", 12, 0.3, ENDLESS),
    ("pays for every token", 1, 0.6, ENDLESS),
    ("pays for every token", 8, 0.9, ENDLESS),
    ("pays little for a token", 4, 0.6, COME_AND_GO),
]


@pytest.mark.parametrize(
    ("case", "seed"),
    [(case, seed) for case in CASES + MORE_CASES for seed in range(5)] if THOROUGH else [(CASES[0], 0)],
    ids=str,
)
def test_it_is_nearly_as_fast_as_the_best_fixed_length(case: tuple[str, int, float, int | None], seed: int) -> None:
    assert speed(adaptive(), *case, seed) > 0.95 * best_speed(*case, seed)


@only_thorough
@pytest.mark.parametrize("num_output", [ENDLESS, COME_AND_GO])
def test_with_twelve_drafts_to_choose_from_too(num_output: int | None) -> None:
    where = "pays little for a token", 6, 0.8, num_output
    assert speed(adaptive(12), *where) > 0.95 * best_speed(*where, most=12)


@pytest.mark.parametrize(
    ("machine", "num_requests", "acceptance", "max_drafts", "num_output"),
    [
        ("drafts dearly", 1, 0.05, 8, ENDLESS),
        ("at its limit from 10 tokens on", 12, 0.6, 4, ENDLESS),
        ("at its limit from 10 tokens on", 12, 0.9, 8, ENDLESS),
        ("at its limit from 10 tokens on", 12, 0.9, 8, COME_AND_GO),
        ("drafts dearly", 12, 0.05, 4, COME_AND_GO),
        ("drafts dearly", 12, 0.05, 16, ENDLESS),
        ("pays for every token", 12, 0.3, 4, COME_AND_GO),
    ][: times(1, 7)],
)
def test_where_no_draft_pays_looking_for_one_costs_less_than_three_percent(
    machine: str, num_requests: int, acceptance: float, max_drafts: int, num_output: int | None
) -> None:
    where, num_more = (machine, num_requests, acceptance, num_output), times(1600, 3600)
    assert best_speed(*where) == speed(FixedLength([0]), *where)
    load = MACHINES[machine], constant(num_requests), constant(acceptance), num_output
    plain, run = Simulated(FixedLength([0]), *load), Simulated(adaptive(max_drafts), *load)
    assert run.speed_of(400) > 0.97 * plain.speed_of(400)  # from the first step on
    assert run.speed_of(num_more) > 0.97 * plain.speed_of(num_more)
    assert sum(asked > 0 for asked in run.asked[WARM_UP:]) < 0.02 * len(run.asked)


@only_thorough
@pytest.mark.parametrize("seed", range(5))
def test_where_every_step_has_somebody_who_comes_or_goes_it_is_noticed_in_time_too(seed: int) -> None:
    where = "at its limit from 10 tokens on", 12, 0.9, IN_AND_OUT, seed
    plain = speed(FixedLength([0]), *where)
    assert best_speed(*where) == plain
    run = Simulated(adaptive(8), MACHINES[where[0]], constant(12), constant(0.9), IN_AND_OUT, seed=seed)
    assert run.run(1500).speed_of(1000) > 0.97 * plain


# -- a batch on an H200 ----------------------------------------------------------------------------------------

CATCH_UP = 1.8e-6  # seconds a token


def batch(
    length: AdaptiveLength | FixedLength, has_draft_model: bool, acceptance: float, seed: int, spread: float = 0.25
) -> float:
    """Seconds of 64 requests that come at once and want about 384 tokens each, of an engine that runs ahead."""
    machine, load = h200(has_draft_model), (constant(64), constant(acceptance))
    arrivals = {"num_total": 64, "max_starts": 32, "num_output": 384, "output_spread": spread, "num_prompt": 512}
    catch_up = CATCH_UP if has_draft_model else 0.0
    return Simulated(length, machine, *load, **arrivals, catch_up=catch_up, delay=2, seed=seed).run_out().seconds  # type: ignore[arg-type]


@cache
def plain_batch(seed: int, spread: float = 0.25) -> float:
    return batch(FixedLength([0]), False, 0.0, seed, spread)


def of_h200(has_draft_model: bool, knows_times: bool) -> AdaptiveLength:
    def exactly(num_requests: int, levels: int) -> float:
        def seconds(k: int) -> float:
            return h200(has_draft_model)(Work(num_requests, num_requests * (1 + k), 0, num_requests * k, k))

        return seconds(levels) / seconds(0)

    weights = 0.6 / 8 if has_draft_model else 0.0
    prior = Prior(exactly, CATCH_UP if has_draft_model else 0.0)
    return AdaptiveLength(range(5), weights, prior if knows_times else None)


@pytest.mark.parametrize("knows_times", [True, False][: times(1, 2)])
@pytest.mark.parametrize("acceptance", [0.2, 0.0, 0.5, 0.8, 0.95][: times(1, 5)])
@pytest.mark.parametrize("has_draft_model", [False, True])
def test_a_short_run_of_a_large_batch_is_never_three_percent_slower_than_plain(
    has_draft_model: bool, acceptance: float, knows_times: bool
) -> None:
    for seed in (0, 1 + int(10 * acceptance) % 4)[: times(1, 2)]:
        taken = batch(of_h200(has_draft_model, knows_times), has_draft_model, acceptance, seed)
        assert taken < 1.03 * plain_batch(seed), seed


@pytest.mark.parametrize("spread", [0.25, 0.0][: times(1, 2)])
@pytest.mark.parametrize("acceptance", [0.6, 0.2, 0.4, 0.7, 0.8][: times(1, 5)])
def test_nor_is_one_of_those_that_follow(acceptance: float, spread: float) -> None:
    """It has seen some by then, and believes that it knows better."""
    length = of_h200(True, True)
    for seed in range(times(1, 8)):
        taken = batch(length, True, acceptance, seed, spread)
        assert taken < 1.03 * plain_batch(seed, spread), seed


@pytest.mark.parametrize("seed", range(times(1, 5)))
def test_and_much_faster_where_drafts_hold_and_cost_little(seed: int) -> None:
    assert batch(of_h200(False, False), False, 0.8, seed) < 0.75 * plain_batch(seed)


# -- each request its own ---------------------------------------------------------------------------------------


def of_two_kinds(length: AdaptiveLength | FixedLength, machine: str) -> Simulated:
    """Drafts for every other request nearly always hold; for those between them hardly any does."""
    return Simulated(length, MACHINES[machine], constant(12), constant(0.95), COME_AND_GO, talents=(1.0, 0.05))


@only_thorough
@pytest.mark.parametrize(
    ("machine", "faster"), [("pays little for a token", 1.1), ("at its limit from 40 tokens on", 0.99)]
)
def test_requests_whose_drafts_do_not_hold_get_none_beside_others_that_get_many(machine: str, faster: float) -> None:
    """And where tokens cost much, that is faster than any length for all of them."""
    best = max(of_two_kinds(FixedLength(range(k + 1)), machine).run(WARM_UP).speed_of(NUM_STEPS) for k in range(5))
    run = of_two_kinds(adaptive(), machine).run(WARM_UP)
    run.asked_of.clear()
    assert run.speed_of(NUM_STEPS) > faster * best
    assert fmean(run.asked_of[0.05]) < 0.25 * fmean(run.asked_of[1.0])


@only_thorough
def test_requests_that_cost_next_to_nothing_are_not_cut_short() -> None:
    machine = "waits for weights"
    best = max(of_two_kinds(FixedLength(range(k + 1)), machine).run(WARM_UP).speed_of(NUM_STEPS) for k in range(5))
    assert of_two_kinds(adaptive(), machine).run(WARM_UP).speed_of(NUM_STEPS) > 0.97 * best


def test_a_request_whose_drafts_begin_to_hold_drafts_again() -> None:
    length = adaptive()
    good, bad = request("good"), request("bad")
    drafted = []
    for step in range(900):
        chosen = [num_drafts for num_drafts, _ in length.choose([good, bad], 2)]
        drafted.append(chosen[1])
        for each, num_drafts in zip((good, bad), chosen, strict=True):
            if num_drafts:
                length.observe(each, num_drafts, num_drafts if each is good or step > 400 else 0)
        length.time(plan(*[(1 + each, each, each) for each in chosen]), 1.0 + 0.25 * sum(chosen))
    assert sum(drafted[200:400]) < 0.2 * 200
    assert sum(drafted[-100:]) > 2 * 100


# -- what changes -----------------------------------------------------------------------------------------------


def test_it_stops_when_the_load_rises_and_goes_on_when_it_falls() -> None:
    def load(step: int) -> float:
        return 16 if 500 <= step < 1100 else 1

    machine = MACHINES["at its limit from 10 tokens on"]
    asked = Simulated(adaptive(), machine, load, constant(0.7), num_output=150).run(1500).asked
    quiet, busy, after = asked[200:500], asked[700:1100], asked[1150:]
    assert sum(quiet) > 2.5 * len(quiet) and sum(after) > 2.5 * len(after)
    assert sum(busy) < 0.15 * len(busy)


def test_it_goes_on_when_drafts_begin_to_hold() -> None:
    def acceptance(step: int) -> float:
        return 0.02 if step < 1500 else 0.9

    machine = MACHINES["drafts dearly"]
    for num_requests in (1, 12)[: times(1, 2)]:
        asked = (
            Simulated(adaptive(), machine, constant(num_requests), acceptance, num_output=150)
            .run(times(3500, 6000))
            .asked
        )
        assert sum(asked[600:1500]) < 0.1 * 900
        assert sum(asked[-1000:]) > 2.5 * 1000, f"{num_requests} at once"


def test_it_stops_when_drafts_no_longer_hold() -> None:
    def acceptance(step: int) -> float:
        return 0.9 if step < 600 else 0.02

    asked = Simulated(adaptive(), MACHINES["drafts dearly"], constant(4), acceptance, num_output=150).run(1000).asked
    assert sum(asked[300:600]) > 2 * 300
    assert sum(asked[-200:]) < 0.1 * 200


def test_a_slow_step_now_and_then_changes_nothing() -> None:
    where = constant(4), constant(0.8)
    machine, hiccups = MACHINES["waits for weights"], count()

    def with_hiccups(work: Work) -> float:
        return machine(work) * (50.0 if next(hiccups) % 97 == 96 else 1.0)

    smooth = Simulated(adaptive(), machine, *where).run(900).asked[WARM_UP:]
    rough = Simulated(adaptive(), with_hiccups, *where).run(900).asked[WARM_UP:]
    assert sum(rough) > 0.95 * sum(smooth) > 0


def test_that_the_first_steps_are_slow_changes_nothing() -> None:
    machine = MACHINES["waits for weights"]
    for num_slow in (1, 5, 9) if THOROUGH else (1, 9):
        steps = count()

        def compiles(work: Work, steps: count[int] = steps, num_slow: int = num_slow) -> float:
            return machine(work) * (100.0 if next(steps) < num_slow else 1.0)

        asked = Simulated(adaptive(), compiles, constant(4), constant(0.8)).run(600).asked[WARM_UP:]
        assert sum(asked) > 3.5 * len(asked)


def test_on_a_machine_that_stutters_all_the_time_it_drafts_too() -> None:
    machine, random = MACHINES["waits for weights"], Random(0)

    def stutters(work: Work) -> float:
        return machine(work) * (8.0 if random.random() < 0.3 else 1.0)

    asked = Simulated(adaptive(), stutters, constant(1), constant(0.8)).run(1000).asked[WARM_UP:]
    assert sum(asked) > 2.5 * len(asked)


def test_a_drafter_that_finds_nothing_for_a_while_is_still_asked() -> None:
    """As one that looks up what was said before: in a first answer there is nothing, in the second there is."""
    length, one, verified = AdaptiveLength(range(5), 0.0), request("a"), 0
    for step in range(250):
        ((asked, _),) = length.choose([one], 1)
        if verified:
            length.observe(one, verified, verified)
        length.time(plan((1 + verified, verified, asked)), 1.0 + 0.02 * verified)
        verified = asked if step > 150 else 0
    assert verified == 4


@pytest.mark.parametrize("said", [1.0, 1.2])
def test_what_is_known_beforehand_counts_until_it_is_measured(said: float) -> None:
    machine = MACHINES["pays for every token"]
    length = AdaptiveLength(range(5), 0.1, prior=Prior(lambda num_requests, levels: said if levels else 1.0, 0.0))
    run = Simulated(length, machine, constant(8), constant(0.3))
    assert max(run.run(50).asked) > 0
    assert sum(run.run(600).asked[-200:]) < 0.1 * 200


# -- acceptance ------------------------------------------------------------------------------------------------


def request(name: str) -> Request:
    return Request(name, [1], SamplingParams())


def test_acceptance_is_each_requests_own_and_a_stranger_begins_with_what_the_others_have_shown() -> None:
    length = adaptive()
    good, bad = request("good"), request("bad")
    assert length.acceptance(good) == pytest.approx(0.7)  # before anybody has shown anything
    for _ in range(60):
        length.observe(good, 4, 4)
        length.observe(bad, 4, 0)
    assert length.acceptance(good) > 0.9 and length.acceptance(bad) < 0.3
    # 4 of 4 held, and 0 of the 1 that was put to the test: those behind the first that falls say nothing.
    assert length.acceptance(request("new")) == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.9])
def test_the_estimate_is_the_probability_that_a_draft_holds_if_those_before_it_do(acceptance: float) -> None:
    length = AdaptiveLength(range(5), 0.1)
    Simulated(length, MACHINES["waits for weights"], constant(12), constant(acceptance), num_output=100).run(300)
    assert length.acceptance(request("new")) == pytest.approx(acceptance, abs=0.12)


# -- what is timed ---------------------------------------------------------------------------------------------


def plan(*shares: tuple[int, int, int]) -> SchedulerOutput:
    """(tokens, drafts among them, drafts asked for) of each request."""
    return SchedulerOutput(
        0,
        [
            ScheduledRequest(str(i), 0, tokens, [0] * drafts, True, 0, [], num_next_drafts=asked)
            for i, (tokens, drafts, asked) in enumerate(shares)
        ],
    )


@pytest.mark.parametrize(
    "shares",
    [
        [(40, 0, 4), (5, 4, 4)],  # a prompt beside a decode
        [(1, 0, 4), (1, 0, 4)],  # nothing was verified, and something is drafted
        [(5, 4, 0), (5, 4, 0)],  # the other way round
    ],
    ids=str,
)
def test_a_step_that_is_neither_plain_nor_speculative_is_not_timed(shares: list[tuple[int, int, int]]) -> None:
    length = adaptive()
    for _ in range(20):
        length.time(plan((1, 0, 0), (1, 0, 0)), 1.0)
        length.time(plan((5, 4, 4), (5, 4, 4)), 1.5)
    before = length.step_cost()
    for _ in range(20):
        length.time(plan(*shares), 50.0)
    assert length.step_cost() == before is not None


# -- what is asked for -----------------------------------------------------------------------------------------


def test_a_fixed_length_is_always_the_same_and_says_so() -> None:
    length = make_draft_length(SpeculativeConfig(method="ngram", num_speculative_tokens=3, adaptive=False), 0.1)
    requests = [request("a"), request("b")]
    for _ in range(300):
        assert length.choose(requests, 2) == [(3, "always")] * 2
        length.observe(requests[0], 3, 0)
        length.time(plan((4, 3, 3), (4, 3, 3)), 100.0)


@pytest.mark.parametrize("is_adaptive", [True, False])
def test_of_a_tree_whole_levels_are_asked_for(is_adaptive: bool) -> None:
    config = SpeculativeConfig(
        method="eagle",
        model="x",
        num_speculative_tokens=3,
        speculative_token_tree="[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]",
        adaptive=is_adaptive,
    )
    length = make_draft_length(config, 0.1)
    requests = [request("a"), request("b"), request("c")]
    seen = set[int]()
    for step in range(times(600, 1500)):
        chosen = [num_drafts for num_drafts, _ in length.choose(requests, 3)]
        seen |= set(chosen)
        for each, num_drafts in zip(requests, chosen, strict=True):
            if num_drafts:
                length.observe(each, num_drafts, step // 100 % 3)
        length.time(plan(*[(1 + each, each, each) for each in chosen]), 1.0 + 0.2 * max(chosen))
    assert seen <= {0, 2, 5, 6}
    assert seen == {6} if not is_adaptive else len(seen) > 1


def test_every_choice_says_why_in_words_that_hold_the_numbers() -> None:
    length = adaptive()
    requests = [request("a")]
    (first,) = length.choose(requests, 1)
    assert first == (0, "to see how long a plain step takes")
    run = Simulated(length, MACHINES["waits for weights"], constant(1), constant(0.8)).run(60)
    (_, why), *_ = length.choose([each.request for each in run._running], 1)
    assert "x plain at acceptance 0." in why
    bad = adaptive()
    run = Simulated(bad, MACHINES["drafts dearly"], constant(3), constant(0.0)).run(60)
    chosen = bad.choose([each.request for each in run._running], 3)
    assert all(num_drafts == 0 and "plain is faster for 3 at once" in why for num_drafts, why in chosen)
