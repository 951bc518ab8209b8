"""The presets run to their end, and each shows what it is there to show."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from teachllm.trace.reader import Trace
from teachllm_webui.live import LiveRun
from teachllm_webui.plan import engine_plan
from teachllm_webui.presets import PRESETS, Preset, Variant, preset
from tests.thorough import THOROUGH
from tests.webui.runs import finish, trace_of

only_thorough = pytest.mark.skipif(not THOROUGH, reason="needs a preset that only make test-thorough runs")
# Where tests are not thorough: two variants beside each other. test_live_page.py starts one that is alone.
SHOWN = [each for each in PRESETS if THOROUGH or each.name == "paged"]


@pytest.fixture(scope="module")
def traces() -> dict[str, list[Trace]]:
    """Of every preset to its end, a trace for each variant."""

    def run(chosen: Preset, variant: Variant) -> Trace:
        live = LiveRun(engine_plan(chosen.config(variant), chosen.requests))
        lines = finish(live)
        live.close()
        assert live.error is None
        return trace_of(lines)

    return {chosen.name: [run(chosen, variant) for variant in chosen.variants] for chosen in SHOWN}


def reasons(trace: Trace) -> set[str]:
    return {reason for step in trace.steps for reason, _ in step["waiting"].values()}


def test_every_preset_runs_to_its_end_and_is_small(traces: dict[str, list[Trace]]) -> None:
    assert all(preset(each.name) is each and len(each.look_at) < 260 for each in PRESETS)
    assert all(each.show_at is not None for each in PRESETS)
    for chosen in SHOWN:
        for trace in traces[chosen.name]:
            requests = trace.replay.requests.values()
            assert 5 <= len(requests) <= 12 and all(r.finish_reason in ("stop", "length") for r in requests)
            assert 40 <= len(trace.steps) <= 150 and (chosen.show_at or 0) < len(trace.steps)


def test_every_preset_is_explained_and_pictured_in_light_and_dark() -> None:
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / "visualizer.md").read_text()
    for name, words in [("fork", "")] + [(p.name, f"### {p.title}\n\n{p.look_at}\n") for p in PRESETS]:
        assert words in text
        for picture in (f"viz/{name}-light.png", f"viz/{name}-dark.png"):
            assert picture in text and (docs / picture).stat().st_size > 20_000


def test_two_variants_of_a_preset_give_the_same_answers(traces: dict[str, list[Trace]]) -> None:
    for both in traces.values():
        answers = [{n: r.output_ids for n, r in trace.replay.requests.items()} for trace in both]
        assert all(each == answers[0] for each in answers)


def test_contiguous_waits_for_blocks_where_paged_runs_all_at_once(traces: dict[str, list[Trace]]) -> None:
    contiguous, paged = traces["paged"]
    assert "no_free_blocks" in reasons(contiguous) and not reasons(paged)
    slots = [trace.header["num_blocks"] * trace.header["config"]["block_size"] for trace in (contiguous, paged)]
    assert slots[0] == slots[1]
    assert len(paged.steps) < len(contiguous.steps) / 2


@only_thorough
def test_a_static_batch_keeps_others_waiting_and_takes_longer(traces: dict[str, list[Trace]]) -> None:
    static, continuous = traces["batching"]
    assert "static_batch" in reasons(static) and "static_batch" not in reasons(continuous)
    assert len(continuous.steps) < len(static.steps)


@only_thorough
def test_chunks_let_the_others_go_on_beside_a_long_prompt(traces: dict[str, list[Trace]]) -> None:
    whole, chunked = (max(s["num_tokens"] for step in t.steps for s in step["scheduled"]) for t in traces["chunked"])
    assert whole > 300 and chunked <= 64
    mixed = [step for step in traces["chunked"][1].steps if {"prefill", "decode"} <= phases(step)]
    assert len(mixed) >= 5


def phases(step: dict[str, Any]) -> set[str]:
    return {share["phase"] for share in step["scheduled"]}


@only_thorough
def test_a_shared_system_prompt_is_computed_once(traces: dict[str, list[Trace]]) -> None:
    requests = list(traces["prefix"][0].replay.requests.values())
    assert requests[0].num_cached_tokens == 0
    assert all((request.num_cached_tokens or 0) >= 48 for request in requests[1:])


@only_thorough
def test_a_pool_that_is_too_small_preempts(traces: dict[str, list[Trace]]) -> None:
    assert sum(len(step["preempted"]) for step in traces["preemption"][0].steps) >= 2
    assert {"preempted", "no_free_blocks"} & reasons(traces["preemption"][0])
    requests = traces["preemption"][0].replay.requests.values()
    assert not any(request.num_cached_tokens for request in requests)
    computed: dict[str, int] = {}
    for step in traces["preemption"][0].steps:
        for share in step["scheduled"]:
            computed[share["request_id"]] = computed.get(share["request_id"], 0) + share["num_tokens"]
    for request in requests:
        once = request.arrival["num_prompt_tokens"] + request.num_output_tokens - 1
        assert (computed[request.arrival["request_id"]] > once) is (request.num_preemptions > 0)


@only_thorough
def test_those_of_high_priority_go_before_all_who_came_earlier_and_wait(traces: dict[str, list[Trace]]) -> None:
    (trace,) = traces["priorities"]
    first: dict[str, int] = {}
    for step in trace.steps:
        for share in step["scheduled"]:
            if share.get("num_sampled"):
                first.setdefault(share["request_id"], step["step"])
    priorities = {name: request.arrival["priority"] for name, request in trace.replay.requests.items()}
    urgent, others = ([first[name] for name in first if priorities[name] == each] for each in (0, 5))
    assert max(urgent) < max(others)


@only_thorough
def test_completions_of_one_prompt_share_its_blocks_and_differ(traces: dict[str, list[Trace]]) -> None:
    trace = traces["parallel"][0]
    children = [r for r in trace.replay.requests.values() if r.arrival.get("group") == "0"]
    assert len(children) == 4 and len({tuple(child.output_ids) for child in children}) > 1
    shared = max(max(len(block.users) for block in trace.state_after(n).blocks) for n in range(5, 12))
    assert shared == 4


@only_thorough
def test_drafts_are_accepted_where_the_answer_is_in_the_prompt(traces: dict[str, list[Trace]]) -> None:
    plain, drafted = traces["speculation"]
    assert len(drafted.steps) < 0.7 * len(plain.steps)
    accepted = [0, 0]
    for step in drafted.steps:
        for share in step["scheduled"]:
            accepted[int(share["request_id"]) >= 3] += share.get("num_accepted", 0)
    assert accepted[1] > 60 > accepted[0]


@only_thorough
def test_two_stages_have_one_batch_while_a_request_is_alone_and_then_two_that_take_turns(
    traces: dict[str, list[Trace]],
) -> None:
    (trace,) = traces["pipeline"]
    assert all(len(step["ranks"]) == 2 for step in trace.steps)
    scheduled = [{share["request_id"] for share in step["scheduled"]} for step in trace.steps]
    take_turns = [not one & next_one for one, next_one in pairwise(scheduled)]
    assert not any(take_turns[:11])
    assert sum(take_turns[12:40]) > 14
