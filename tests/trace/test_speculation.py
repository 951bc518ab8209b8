"""What a trace says of drafts: whose they were, how many held, how many come next, and why."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from teachllm import EngineConfig, SamplingParams
from teachllm.core.scheduler_output import ModelRunnerOutput
from teachllm.engine.engine_core import describe
from teachllm.trace.draft_lengths import DraftLengthCount, draft_lengths
from teachllm.trace.figures import figures
from teachllm.trace.perfetto import to_perfetto
from teachllm.trace.reader import Trace, parse_trace
from teachllm.trace.replay import Replay
from teachllm.trace.summary import summary
from tests.core.helpers import add, make_scheduler, schedule
from tests.spec_decode.drafters import speculation
from tests.thorough import THOROUGH, times
from tests.trace.test_recorder import TIMES, make_recorder
from tests.trace.traced import live_state, traced_engine
from tests.worker.engines import drain, random_ids


@cache
def run(ahead: bool) -> tuple[Trace, Any]:
    """A trace of a speculating engine, and what its own counter has counted meanwhile."""
    given = speculation("draft_model", "qwen3", num_speculative_tokens=3, adaptive=False)
    small = {"num_gpu_blocks_override": 20, "max_num_batched_tokens": 48, "max_num_seqs": 4}
    engine, lines = traced_engine(speculative_config=given, async_scheduling=ahead, **small)
    engine.count()
    for i in range(8):
        params = SamplingParams(temperature=0.0, max_tokens=20 + i, ignore_eos=True)
        engine.add_request(str(i), random_ids(5 + 7 * i, seed=i), params)
    drain(engine)
    return parse_trace(lines), engine.stats()


def shares(trace: Trace) -> list[dict[str, Any]]:
    return [share for line in trace.steps for share in line["scheduled"]]


@pytest.mark.parametrize("ahead", [True, False][: times(1, 2)])
def test_figures_of_a_trace_are_what_the_engine_counted(ahead: bool) -> None:
    trace, stats = run(ahead=ahead)
    assert trace.problem is None
    found = figures([trace.header, *trace.lines])
    assert 0 < found.num_accepted_tokens < found.num_draft_tokens
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    assert [getattr(found, name) for name in names] == [getattr(stats, name) for name in names]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_share_starts_where_its_request_had_come_however_many_drafts_fell(ahead: bool) -> None:
    trace, _ = run(ahead=ahead)
    num_fallen = 0
    for name, request in trace.replay.requests.items():
        known = request.arrival["num_prompt_tokens"]
        for share in (share for share in shares(trace) if share["request_id"] == name):
            if share.get("num_sampled"):
                num_new = share["num_tokens"] - share.get("num_draft", 0)
                assert share["start"] + num_new == known
                known += share["num_sampled"]
                num_fallen += share.get("num_draft", 0) - share.get("num_accepted", 0)
    assert num_fallen > 10


@pytest.mark.parametrize(
    ("method", "ahead"),
    [(method, ahead) for method in ("ngram", "eagle", "medusa") for ahead in (False, True)]
    if THOROUGH
    else [("ngram", True), ("medusa", False)],
)
def test_the_replayed_pool_is_the_live_one_after_every_step_with_drafts(method: str, ahead: bool) -> None:
    states: list[str] = []

    def note(engine: Any, line: str) -> None:
        states.append(live_state(engine.core.scheduler))

    given = speculation(method, "qwen3", num_speculative_tokens=4, adaptive=False)
    changes = {"num_gpu_blocks_override": 18, "max_num_batched_tokens": 48, "block_size": 8}
    engine, lines = traced_engine(note, speculative_config=given, async_scheduling=ahead, **changes)
    for i in range(6):
        params = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)
        engine.add_request(str(i), random_ids(20)[: 6 + 2 * i], params)
    drain(engine)
    trace = parse_trace(lines)
    assert trace.problem is None and any("num_draft" in share for share in shares(trace))
    replay = Replay(trace.header)
    for line, state in zip(trace.lines, states, strict=True):
        replay.apply(line)
        assert line["event"] == "arrival" or replay.state_text() == state


def test_every_share_says_how_many_drafts_come_next_and_why() -> None:
    trace, _ = run(ahead=False)
    assert all([type(part) for part in share["next_draft"]] == [int, str] for share in shares(trace))
    for name in trace.replay.requests:
        own = [share for share in shares(trace) if share["request_id"] == name and share.get("num_sampled")]
        for share, following in pairwise(own):
            assert following.get("num_draft", 0) <= share["next_draft"][0]
    assert {share["next_draft"][1] for share in shares(trace)} >= {"always", "its end is near"}


def test_a_share_tells_drafts_that_were_planned_from_those_that_the_drafter_proposed() -> None:
    scheduler, (recorder, lines) = make_scheduler(), make_recorder()
    a = add(scheduler, "a", 4)
    for drafts, tokens, num_drafted in (([], [7], None), ([-1, -1, -1], [8, 9], [2]), ([-1], [5], [0])):
        a.draft_token_ids = drafts
        plan = schedule(scheduler)
        result = ModelRunnerOutput([tokens], num_drafted=num_drafted)
        recorder.step(plan, scheduler.update(plan, result), scheduler, TIMES)
    found = [json.loads(line)["scheduled"][0] for line in lines]
    told = [[share.get(name) for name in ("num_draft", "num_proposed", "num_accepted")] for share in found]
    assert told == [[None, None, None], [3, 2, 1], [1, 0, 0]]
    header = {"event": "header", "time": 0.0, "num_blocks": 64}
    config = {"block_size": 4, "enable_kv_cache": False, "max_num_batched_tokens": 64}
    arrival = {"event": "arrival", "request_id": "a", "time": 0.0, "num_prompt_tokens": 4}
    counted = figures([header | {"config": config}, arrival, *map(json.loads, lines)])
    assert (counted.num_drafts, counted.num_draft_tokens, counted.num_accepted_tokens) == (1, 2, 1)


def test_lengths_are_put_together_by_reason_and_their_numbers_become_ranges() -> None:
    told = [
        (4, "2.10 x plain at acceptance 0.90"),
        (4, "2.44 x plain at acceptance 1.00"),
        (2, "1.44 x plain at acceptance 0.70"),
        (4, "1.95 x plain at acceptance 0.90"),
        (0, "its end is near"),
    ]
    steps = [{"scheduled": [{"next_draft": [length, why], "num_sampled": 1}]} for length, why in told]
    steps += [{"scheduled": [{"next_draft": [4, "within a prompt"]}, {"num_sampled": 1}]}]
    assert draft_lengths(steps) == [
        DraftLengthCount(4, 3, "1.95 to 2.44 x plain at acceptance 0.90 to 1.00"),
        DraftLengthCount(2, 1, "1.44 x plain at acceptance 0.70"),
        DraftLengthCount(0, 1, "its end is near"),
    ]


def test_the_summary_has_acceptance_mean_length_and_lengths_by_reason() -> None:
    trace, stats = run(ahead=False)
    rows = dict(summary(trace))
    drafted, held = stats.num_draft_tokens, stats.num_accepted_tokens
    length = 1 + held / stats.num_drafts
    assert rows["speculation"] == (
        f"{held} of {drafted} drafted tokens accepted ({held / drafted:.0%}), mean length {length:.2f}"
    )
    assert "3 (" in rows["drafts asked"] and "times: always)" in rows["drafts asked"]
    plain, lines = traced_engine()
    plain.add_request("a", random_ids(5), SamplingParams(max_tokens=3, ignore_eos=True))
    drain(plain)
    assert not {"speculation", "drafts asked"} & dict(summary(parse_trace(lines))).keys()


def test_the_header_holds_the_settings_as_plain_values_from_which_the_same_are_made_again() -> None:
    given = {"method": "eagle", "model": "x", "speculative_token_tree": "[(0,), (1,), (0, 0)]"}
    config = EngineConfig(speculative_config=given | {"num_speculative_tokens": 2})  # type: ignore[arg-type]
    for each in (config, EngineConfig()):
        assert EngineConfig(**json.loads(json.dumps(describe(each)))) == each


def test_a_timeline_says_of_each_share_how_many_drafts_come_next_and_why() -> None:
    trace, _ = run(ahead=True)
    slices = [event for event in to_perfetto(trace)["traceEvents"] if event["name"] in ("prefill", "decode")]
    told = [event["args"]["next_draft"] for event in slices]
    assert "3: always" in told and "0: its end is near" in told
    assert any({"num_draft", "num_accepted"} <= event["args"].keys() for event in slices)


@pytest.mark.parametrize("wrong", [3, [3], ["3", "always"], [3, None], [3, "always", 1], None])
def test_a_next_draft_that_is_no_number_with_a_reason_is_a_broken_line(wrong: Any) -> None:
    engine, lines = traced_engine(speculative_config=speculation("medusa", "qwen3"))
    engine.add_request("a", random_ids(5), SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()
    line = json.loads(lines[2])
    line["scheduled"][0]["next_draft"] = wrong
    problem = parse_trace([*lines[:2], json.dumps(line)]).problem
    assert problem is not None and problem.startswith("line 3: 'next_draft' of a scheduled request is")
