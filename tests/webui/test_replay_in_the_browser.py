"""What the page computes from a trace, against what is known: block events against a model in Python that knows
nothing but the rule, and the shares of ranks against a trace that was written by hand and counted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from teachllm.trace.ranks import rank_figures
from teachllm.trace.reader import parse_trace
from teachllm.trace.recorder import TRACE_VERSION
from tests.thorough import times
from tests.trace import staged
from tests.trace.staged import STEPS, rank, step

NAMES = ("a", "b", "10", "2", "é", "\U0001f600", '"')


@pytest.fixture(scope="module")
def forked(trace: list[str]) -> list[str]:
    """The trace's fork at step 45, with larger blocks."""
    from teachllm.engine.fork import fork, fork_config

    whole, lines = parse_trace(line + "\n" for line in trace), list[str]()
    index = next(i for i, line in enumerate(whole.lines) if line["event"] == "step" and line["step"] == 45)
    config = fork_config(whole.header, block_size=32)
    engine = fork(whole.state_after(index + 1), config, lines.append, whole.lines[index]["end"])
    while engine.has_unfinished_requests:
        engine.step()
    return lines


class Pool:
    """Who uses each block, its hash, and the free list."""

    def __init__(self, num_blocks: int) -> None:
        self.users: list[list[str]] = [[] for _ in range(num_blocks)]
        self.hashes: list[str | None] = [None] * num_blocks
        self.free = list(range(num_blocks))
        self.tables: dict[str, list[int]] = {name: [] for name in NAMES}

    def state_text(self) -> str:
        blocks = [[len(users), block_hash] for users, block_hash in zip(self.users, self.hashes, strict=True)]
        tables = {name: table for name, table in self.tables.items() if table}
        state = {"blocks": blocks, "free": self.free, "tables": tables}
        return json.dumps(state, sort_keys=True, separators=(",", ":"))

    def random_event(self, rng: random.Random) -> list[Any]:
        name = rng.choice(NAMES)
        kind = rng.choice(["allocate", "allocate", "hit", "commit", "free"])
        findable = [i for i, block_hash in enumerate(self.hashes) if block_hash and i not in self.tables[name]]
        if kind == "hit" and findable:
            return self.take(["hit", rng.choice(findable), name])
        if kind == "commit" and (fresh := [i for i in self.tables[name] if not self.hashes[i]]):
            block = rng.choice(fresh)
            self.hashes[block] = f"{rng.getrandbits(64):016x}"
            return ["commit", block, name, self.hashes[block], "00"]
        if (kind == "free" or not self.free) and self.tables[name]:
            block = rng.choice(self.tables[name])
            self.tables[name].remove(block)
            self.users[block].remove(name)
            self.free += [block] if not self.users[block] else []
            return ["free", block, name]
        if not self.free:
            return self.random_event(rng)
        if self.hashes[self.free[0]]:
            self.hashes[self.free[0]] = None
            return ["evict", self.free[0]]
        return self.take(["allocate", self.free[0], name])

    def take(self, event: list[Any]) -> list[Any]:
        _, block, name = event
        self.free = [i for i in self.free if i != block]
        self.users[block].append(name)
        self.tables[name].append(block)
        return event


def lines_and_states(seed: int, num_steps: int) -> tuple[list[dict[str, Any]], list[str]]:
    rng = random.Random(seed)
    pool = Pool(rng.randint(3, 20))
    header = {"event": "header", "version": TRACE_VERSION, "time": 0.0, "config": {"block_size": 16}}
    header |= {"num_blocks": len(pool.users), "model": {}}
    header["config"] |= {"max_num_batched_tokens": 64, "scheduling_policy": "fcfs"}  # type: ignore[operator]
    lines: list[dict[str, Any]] = [header]
    for name in NAMES:
        arrival = {"request_id": name, "num_prompt_tokens": 9, "child_index": 0, "max_len": 99, "priority": 0}
        lines.append({"event": "arrival", "time": 0.0, **arrival})
    states = []
    for number in range(num_steps):
        events = [pool.random_event(rng) for _ in range(rng.randint(0, 6))]
        used = sum(bool(users) for users in pool.users)
        line = {"event": "step", "step": number, "time": float(number), "end": number + 0.5, "scheduled": []}
        line |= {"schedule": 0.1, "execute": 0.3, "wait": 0.0, "update": 0.1}
        line |= {"preempted": [], "finished": {}, "waiting": {}}
        lines.append(line | {"blocks": {"used": used, "cached": 0, "free": 0}, "block_events": events})
        states.append(pool.state_text())
    return lines, states


def test_the_page_replays_random_block_events_as_the_rule_says_at_every_step_in_any_order(page: Any) -> None:
    for seed in range(times(3, 8)):
        lines, states = lines_and_states(seed, num_steps=130)
        order = list(range(130)) + random.Random(seed).sample(range(130), 60)
        replayed = page.evaluate(
            """([lines, order]) => {
                const timeline = new teachllm.Timeline(lines);
                return order.map((k) => timeline.stateAt(k).canonical());
            }""",
            [lines, order],
        )
        assert replayed == [states[k] for k in order]


def test_the_page_and_python_replay_a_real_trace_to_the_same_states(page: Any, trace: list[str]) -> None:
    from teachllm.trace.replay import Replay

    replay = Replay(json.loads(trace[0]))
    states = []
    for line in trace:
        replay.apply(json.loads(line))
        states.append(replay.state_text())
    in_page = """(n) => Array.from({ length: n }, (_, i) => view.timeline.stateAfterLine(i).canonical())"""
    assert page.evaluate(in_page, len(trace)) == states
    fields = ("status", "num_computed_tokens", "num_cached_tokens", "num_preemptions", "num_output_tokens")
    for name, request in replay.requests.items():
        there = page.evaluate(
            "([id, fields]) => fields.map((f) => view.timeline.stateAt(1e9).requests.get(id)[f])", [name, fields]
        )
        assert there == [getattr(request, field) for field in fields]


def test_lines_pushed_one_by_one_give_what_they_give_at_once(page: Any, trace: list[str]) -> None:
    same = """(lines) => {
        const [whole, grown] = [new teachllm.Timeline(lines), new teachllm.Timeline()];
        for (const line of lines) {
            grown.push([line]);
            if (grown.last > 3) grown.stateAt(grown.last - 3);
        }
        return whole.steps.every((_, k) => whole.stateAt(k).canonical() === grown.stateAt(k).canonical());
    }"""
    assert page.evaluate(same, trace)


def test_the_metrics_of_a_fork_know_what_came_before_it(page: Any, forked: list[str]) -> None:
    """Who had a token then has no first one now, and what was computed then was not found in the cache."""
    ttft, hit_rate = page.evaluate(
        """(lines) => {
            const series = new teachllm.Series();
            series.extend(new teachllm.Timeline(lines));
            return [series.ttft.map(({ id }) => id), Math.max(...series.hitRate)];
        }""",
        forked,
    )
    known = next(event for line in forked if (event := json.loads(line))["event"] == "fork")["requests"]
    had_one = {request["request_id"] for request in known if request["token_times"]}
    assert had_one and not had_one & set(ttft)
    assert hit_rate <= 100


def test_time_is_the_engines_without_what_lies_between_steps(page: Any) -> None:
    """Two steps with a rest between, then one that begins before the one before it has ended."""
    lines, _ = lines_and_states(0, num_steps=4)
    for line, (begin, end) in zip(lines[-4:], [(10.0, 10.5), (60.0, 61.0), (60.75, 61.5), (70.0, 70.25)], strict=True):
        line |= {"time": begin, "end": end}
    work, spans, places = page.evaluate(
        """(lines) => {
            const timeline = new teachllm.Timeline(lines);
            const spans = timeline.steps.map((_, k) => timeline.spanOf(k));
            return [timeline.work, spans, [0, 0.4, 0.5, 1.6, 1.99, 2.1, 9].map((at) => timeline.stepAtWork(at))];
        }""",
        lines,
    )
    assert work == [0.5, 1.5, 2.0, 2.25]
    assert spans == [[0, 0.5], [0.5, 1.5], [1.5, 2.0], [2.0, 2.25]]
    assert places == [0, 0, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("since", [-1, 30])
def test_figures_of_two_sides_are_those_of_the_trace_at_every_step(page: Any, trace: list[str], since: int) -> None:
    events = [json.loads(line) for line in trace]
    found = page.evaluate(
        """([lines, since]) => {
            const [timeline, figures] = [new teachllm.Timeline(lines), new teachllm.Figures(since)];
            figures.extend(timeline);
            return timeline.steps.map((_, k) => figures.at(k));
        }""",
        [trace, since],
    )
    ends = [i for i, event in enumerate(events) if event["event"] == "step"]
    assert len(found) == len(ends)
    for k, end in enumerate(ends):
        expected = figures_by_hand(events[: end + 1], since)
        assert {name: found[k][name] for name in expected} == pytest.approx(expected, abs=1e-9)


def figures_by_hand(events: list[dict[str, Any]], since: int) -> dict[str, Any]:
    """A mean TTFT in which those who wait count with what they have waited, and the longest time between tokens."""
    steps = [event for event in events if event["event"] == "step"]
    now, begin = steps[-1], next((step["end"] for step in steps if step["step"] == since), float("-inf"))
    counts = [step for step in steps if step["step"] > since]
    firsts, waits, longest, num_finished = [], [], [], 0
    arrivals = [event for event in events if event["event"] == "arrival"]
    for arrival in arrivals:
        name = arrival["request_id"]
        times = [
            s["end"] for s in steps for each in s["scheduled"] if each["request_id"] == name and each.get("num_sampled")
        ]
        stopped = any(event["event"] in ("abort", "stop") and event["request_id"] == name for event in events)
        ended = stopped or any(name in step["finished"] for step in steps)
        num_finished += ended
        longest += [after - before for before, after in pairwise(times) if after > begin]
        if times and times[0] > begin:
            firsts.append(times[0] - arrival["time"])
        elif not times and not ended:
            waits.append(now["end"] - arrival["time"])
    is_before = not counts
    means = [] if is_before else firsts + waits
    return {
        "step": now["step"],
        "requests": len(arrivals),
        "finished": num_finished,
        "ttft": sum(means) / len(means) if means else None,
        "isLeast": bool(waits) and not is_before,
        "longest": max(longest) if longest and not is_before else None,
        "preemptions": sum(len(step["preempted"]) for step in counts),
        "mostTokens": max((sum(each["num_tokens"] for each in step["scheduled"]) for step in counts), default=0),
    }


def test_a_forks_trace_is_replayed_from_where_it_begins(page: Any, forked: list[str]) -> None:
    trace = parse_trace(line + "\n" for line in forked)
    assert trace.problem is None and any(line["event"] == "fork" for line in trace.lines)
    states = [trace.state_after(n).state_text() for n in range(len(trace.lines) + 1)]
    in_page = """(lines) => {
        const timeline = new teachllm.Timeline(lines);
        return lines.map((_, i) => timeline.stateAfterLine(i).canonical());
    }"""
    assert page.evaluate(in_page, forked) == states


# -- ranks

LATER = step(3, 30.0, 31.0, [rank(0, 30, 31, {}), rank(1, 30, 31, {})])  # so that all is known of those before
SHARES = ("computes", "exchanges", "bubble")


def shares(page: Any) -> list[dict[str, float]]:
    """Of each rank, as the page says."""
    rows = page.locator("[data-view=ranks] [data-rank]").all()
    attribute = "(node, name) => Number(node.querySelector(`[data-${name}]`).getAttribute(`data-${name}`))"
    return [{name: row.evaluate(attribute, name) for name in SHARES} for row in rows]


def show(page: Any, k: int) -> None:
    page.evaluate("(k) => { view.show(k); view.settle(); }", k)


def test_a_trace_of_one_rank_has_no_such_view(page: Any) -> None:
    assert page.locator("[data-view=ranks]").count() == 0
    assert page.get_attribute("[data-teachllm]", "data-ranks") is None


def test_shares_of_time_are_those_counted_by_hand_and_those_of_the_summary(open_page: Callable[..., Any]) -> None:
    page = open_page(staged.lines([*STEPS, LATER]))
    show(page, 2)
    first, second = shares(page)
    assert first == {"computes": 10 / 20, "exchanges": 0, "bubble": 10 / 20}
    assert second == {"computes": 10.5 / 20, "exchanges": 0.5 / 20, "bubble": 9 / 20}
    for told, figures in zip((first, second), rank_figures(STEPS), strict=True):
        assert told == {name: pytest.approx(getattr(figures, name)) for name in SHARES}
    stages = [node.get_attribute("data-stage") for node in page.locator("[data-rank]").all()]
    assert stages == ["0", "1"]
    assert "2 ranks in 2 stages" in page.locator("[data-summary=ranks]").inner_text()
    assert "bubbles 48 %" in page.locator("[data-summary=ranks]").inner_text()


def test_time_of_which_a_rank_has_not_told_yet_counts_for_nothing(open_page: Callable[..., Any]) -> None:
    """Rank 0's third step may have begun at 12, and would not be in the trace."""
    page = open_page(staged.lines(STEPS[:2]))
    show(page, 1)
    first, second = shares(page)
    assert (first["computes"], first["bubble"]) == (pytest.approx(8 / 12, abs=1e-4), pytest.approx(4 / 12, abs=1e-4))
    assert (second["computes"], second["bubble"]) == (pytest.approx(4.5 / 12), pytest.approx(7 / 12, abs=1e-4))
    page = open_page(staged.lines())  # where it is known
    show(page, 1)
    assert [each["bubble"] for each in shares(page)] == [8 / 16, 7 / 16]


def test_what_was_sent_stands_beside_what_was_expected(open_page: Callable[..., Any]) -> None:
    more = rank(0, 30, 31, {"send": [1, 1500], "broadcast": [2, 8]}) | {"expected": {"send": [1, 1000]}}
    page = open_page(staged.lines([*STEPS, step(3, 30.0, 31.0, [more, STEPS[2]["ranks"][1]])]))
    show(page, 0)
    told = {
        node.get_attribute("data-operation"): [node.get_attribute("data-bytes"), node.get_attribute("data-expected")]
        for node in page.locator("[data-view=ranks] [data-operation]").all()
    }
    assert told == {"send": ["1000", "1000"], "all_gather": ["50", "50"]}
    assert page.locator("[data-traffic]").inner_text() == "1.05 kB, as the model's shape predicts"
    assert page.locator("[data-operation=send]").inner_text().split("\n")[-1] == "1 kB · 1 call · 1 s"
    show(page, 3)
    assert page.locator("[data-traffic]").inner_text() == "1.55 kB: 500 B more than the model's shape predicts"
    assert page.get_attribute("[data-operation=broadcast]", "data-expected") is None


def test_the_load_of_experts_is_shown_where_there_are_any(open_page: Callable[..., Any]) -> None:
    page = open_page(staged.lines([STEPS[0], STEPS[1] | {"expert_load": [[4, 0, 2, 2], [1, 1, 2, 4]]}]))
    show(page, 1)
    assert page.locator("[data-load]").inner_text() == "4 in each of 2 layers; the busiest has 2.0 \u00d7 the mean"
    show(page, 0)
    assert not page.locator("[data-load]").is_visible()


def test_a_plan_tells_what_it_took_and_leads_to_its_step(open_page: Callable[..., Any]) -> None:
    page = open_page(staged.lines())
    show(page, 2)
    canvas = page.locator(".tl-rank-picture canvas")
    x = page.evaluate("view.ranks.painter._x(7)")
    canvas.hover(position={"x": x, "y": 10})
    card = page.locator("[data-card=rank]")
    assert "rank 0 in step 1" in card.inner_text()
    facts = dict(zip(card.locator("dt").all_inner_texts(), card.locator("dd").all_inner_texts(), strict=True))
    assert facts == {
        "stage": "0",
        "took": "7 s",
        "computed": "4 s",
        "send": "1 call, 1 kB, 3 s",
        "tokens": "0 of 0 requests",
    }
    canvas.click(position={"x": x, "y": 10})
    assert page.evaluate("view.k") == 1
    page.mouse.move(0, 0)
    assert not page.locator("[data-card=rank]").is_visible()


def test_a_pause_in_which_nobody_computes_is_cut(open_page: Callable[..., Any]) -> None:
    def later(line: dict[str, Any]) -> dict[str, Any]:
        ranks = [{**each, "begin": each["begin"] + 1e4, "end": each["end"] + 1e4} for each in line["ranks"]]
        return line | {"time": line["time"] + 1e4, "end": line["end"] + 1e4, "ranks": ranks}

    page = open_page(staged.lines([*STEPS[:2], later(STEPS[2]), later(LATER)]))
    show(page, 2)
    end, begin, width = page.evaluate("[16, 10020, 10024].map((time) => view.ranks.painter._x(time))")
    assert 0 < begin - end < 0.05 * width
    assert [each["bubble"] for each in shares(page)] == [10 / 20, 9 / 20]


def test_it_appears_when_a_growing_trace_first_tells_of_ranks(open_page: Callable[..., Any]) -> None:
    alone = {name: value for name, value in STEPS[0].items() if name != "ranks"}
    page = open_page(staged.lines([alone]))
    assert page.locator("[data-view=ranks]").count() == 0
    page.evaluate("(lines) => view.push(lines)", [json.dumps(STEPS[1])])
    assert page.locator("[data-view=ranks]").count() == 1
    show(page, 1)
    assert len(shares(page)) == 2


def test_a_rank_that_is_odd_is_named_and_what_came_before_is_shown(open_page: Callable[..., Any]) -> None:
    [first, second] = STEPS[1]["ranks"]
    page = open_page(staged.lines([STEPS[0], STEPS[1] | {"ranks": [first, second | {"begin": None}]}]))
    said = "line 3 of the trace: a rank without 'stage', 'begin', 'end' or 'sent'"
    assert page.locator(".tl-banner").inner_text() == said
    show(page, 0)
    assert len(shares(page)) == 2


def test_main_views_stay_in_sight_and_a_phone_needs_no_sideways_scrolling(open_page: Callable[..., Any]) -> None:
    page = open_page(staged.lines())
    for name in ("ranks", "pool", "batch", "step"):
        box = page.locator(f"[data-view={name}]").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 1280 and box["y"] + 100 <= 720
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
