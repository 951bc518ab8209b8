"""The page's replay of block events, held against a model in Python that knows nothing but the rule."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from teachllm.trace.reader import parse_trace
from teachllm.trace.recorder import TRACE_VERSION

NAMES = ("a", "b", "10", "2", "é", "\U0001f600", '"')


@pytest.fixture(scope="module")
def forked(trace: list[str]) -> list[str]:
    """The trace's fork at step 20, with larger blocks."""
    from teachllm.engine.fork import fork, fork_config

    whole, lines = parse_trace(line + "\n" for line in trace), list[str]()
    index = next(i for i, line in enumerate(whole.lines) if line["event"] == "step" and line["step"] == 20)
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
    for step in range(num_steps):
        events = [pool.random_event(rng) for _ in range(rng.randint(0, 6))]
        used = sum(bool(users) for users in pool.users)
        line = {"event": "step", "step": step, "time": float(step), "end": step + 0.5, "scheduled": []}
        line |= {"schedule": 0.1, "execute": 0.3, "wait": 0.0, "update": 0.1}
        line |= {"preempted": [], "finished": {}, "waiting": {}}
        lines.append(line | {"blocks": {"used": used, "cached": 0, "free": 0}, "block_events": events})
        states.append(pool.state_text())
    return lines, states


def test_the_page_replays_random_block_events_as_the_rule_says_at_every_step_in_any_order(page: Any) -> None:
    for seed in range(8):
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
            return [series.ttft.text, Math.max(...series.hitRate)];
        }""",
        forked,
    )
    known = next(event for line in forked if (event := json.loads(line))["event"] == "fork")["requests"]
    had_one = {request["request_id"] for request in known if request["token_times"]}
    assert had_one and not had_one & set(ttft)
    assert hit_rate <= 100


def test_a_forks_trace_is_replayed_from_where_it_begins(page: Any, forked: list[str]) -> None:
    trace = parse_trace(line + "\n" for line in forked)
    assert trace.problem is None and any(line["event"] == "fork" for line in trace.lines)
    states = [trace.state_after(n).state_text() for n in range(len(trace.lines) + 1)]
    in_page = """(lines) => {
        const timeline = new teachllm.Timeline(lines);
        return lines.map((_, i) => timeline.stateAfterLine(i).canonical());
    }"""
    assert page.evaluate(in_page, forked) == states
