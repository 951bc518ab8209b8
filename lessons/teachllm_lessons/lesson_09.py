"""Lesson 09, graphs and running ahead: a loop that is one step ahead, host and device on one clock, pinned blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from teachllm.config import EngineConfig
from teachllm.core.request import Request
from teachllm.core.scheduler import Scheduler
from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from teachllm.engine.engine_core import EngineCore
from teachllm.engine.pieces import ITS_OWN, Pieces
from teachllm.sampling_params import SamplingParams
from teachllm.simulator.shapes import model_shape
from teachllm.simulator.simulate import Simulation, simulate
from teachllm.simulator.workload import Workload
from teachllm_lessons.exercise import Exercise, require, run_with
from teachllm_lessons.palette import INK, color, ink_on
from teachllm_lessons.picture import Picture, axes

Turn = Callable[[Any], list[Any]]
WORK = Workload(num_requests=8, prompt_len=64, output_len=12)
PARTS = ("schedule", "launch", "update")  # of the host's work, in the order of colours


class FakeCore:
    """An engine's core of so many steps, which writes down what it is asked.

    Args:
        num_steps: that can be launched before there is nothing left to plan.
    """

    num_ahead = 1

    def __init__(self, num_steps: int) -> None:
        self._left, self._pending = num_steps, list[int]()
        self.said: list[str] = []
        self._number = 0

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def is_done(self) -> bool:
        return not self._left and not self._pending

    def launch(self) -> bool:
        if not self._left:
            self.said.append("launch: nothing to plan")
            return False
        self._left -= 1
        self._pending.append(self._number)
        self.said.append(f"launch step {self._number}")
        self._number += 1
        return True

    def collect(self) -> list[str]:
        require(bool(self._pending), f"collects although nothing is under way, after: {', '.join(self.said)}")
        step = self._pending.pop(0)
        self.said.append(f"collect step {step}")
        return [f"tokens of step {step}"]


def contract_turn(piece: Turn) -> int:
    """One launch a turn, one step ahead, and nothing left behind at the end."""
    cases = 0
    for num_steps in range(1, 6):
        core, told = FakeCore(num_steps), list[str]()
        for number in range(3 * num_steps + 3):
            if core.is_done:
                break
            before = len(core.said)
            returned = piece(core)
            did = ", ".join(core.said[before:])
            so_far = f"with {num_steps} step{'s' if num_steps > 1 else ''} to do, turn {number} did: {did or 'nothing'}"
            launches = did.count("launch")
            require(launches == 1, f"{so_far}. One launch a turn, no more and no less")
            require(
                core.num_pending <= 1, f"{so_far}. Then {core.num_pending} steps are under way: one at most is ahead"
            )
            is_first = number == 0 and num_steps > 1
            waits = f"{so_far}. It waits for the step it has just launched: the device is idle while the host plans"
            require(not (is_first and core.num_pending == 0), waits)
            require(isinstance(returned, list), f"{so_far}, and returned {returned!r}: give what collect() gave, or []")
            told += returned
            cases += 1
        require(core.is_done, f"with {num_steps} steps to do, the last step's tokens are never collected")
        expected = [f"tokens of step {step}" for step in range(num_steps)]
        require(told == expected, f"with {num_steps} steps to do, it returned {told}, not every step's tokens in order")
    return cases


def simulated(pieces: Pieces = ITS_OWN, **settings: Any) -> Simulation:
    """Eight requests on a pretended H200 with Qwen3-0.6B's shape."""
    return simulate(EngineConfig(max_num_seqs=8, **settings), WORK, model_shape("qwen3-0.6b"), pieces=pieces)


def live_turn(piece: Turn) -> str:
    run_with(Pieces(turn=piece), async_scheduling=True)
    plain = simulated(async_scheduling=False)
    ahead = simulated(Pieces(turn=piece), async_scheduling=True)
    busy = [run.figures.device_busy or 0.0 for run in (plain, ahead)]
    both = f"{busy[1]:.0%} of the time, with the plain loop {busy[0]:.0%}"
    require(busy[1] > busy[0], f"gains nothing: a pretended device works {both}")
    times = f"{1000 * ahead.figures.duration:.1f} ms in place of {1000 * plain.figures.duration:.1f}"
    return f"The engine ran with it: the same words. A pretended H200 works {both}, and all is done after {times}."


TURN = Exercise(
    lesson="09",
    name="turn",
    contract=contract_turn,
    live=live_turn,
    reference=EngineCore.turn,
    hints=(
        "The plain loop launches a step and collects it. What if you collect the one *before* it in the same turn?",
        "After the first launch one step is under way: return `[]`. After the second, two are: collect one. And when "
        "`launch()` says False, nothing new can be planned before what is under way has come back.",
        "`launched = core.launch()`, then `if core.num_pending > 1 or (core.num_pending and not launched): return "
        "core.collect()`, else `return []`.",
    ),
)


def lanes(lines: Sequence[str], *, first: int = 2, last: int = 8) -> Picture:
    """What host and device do in some steps of a simulation, on one clock.

    The device begins a step when it has been launched and the one before is done.
    """
    steps = [line for line in map(json.loads, lines) if line["event"] == "step"]
    figure, ax = axes(8.6, 1.9)
    begin, done = steps[first]["time"], 0.0
    for number, step in enumerate(steps[: last + 1]):
        launched = step["time"] + step["schedule"] + step["execute"]
        seconds = step["roofline"]["seconds"]
        start = max(launched, done)
        done = start + seconds
        if number < first:
            continue
        host = (
            (step["time"], step["schedule"], 0),
            (step["time"] + step["schedule"], step["execute"], 1),
            (step["end"] - step["update"], step["update"], 2),
        )
        for at, length, part in host:
            ax.barh(
                1, 1e3 * length, left=1e3 * (at - begin), height=0.6, color=color((4, 1, 2)[part]), edgecolor="none"
            )
        shade = 0.9 if number % 2 else 0.6
        ax.barh(0, 1e3 * seconds, left=1e3 * (start - begin), height=0.6, color=(*color(0), shade), edgecolor="none")
        ax.text(
            1e3 * (start - begin + seconds / 2),
            0,
            f"step {number}",
            ha="center",
            va="center",
            fontsize=8,
            color=ink_on(color(0)),
        )
    ax.set_yticks([0, 1], ["device", "host"])
    ax.set_xlabel("ms")
    ax.set_title("host: blue schedule, orange launch, green update", fontsize=9, color=INK, loc="left")
    return Picture(figure, f"host and device in steps {first} to {last}")


def _token(plan: SchedulerOutput, token_id: int) -> ModelRunnerOutput:
    return ModelRunnerOutput([[token_id] if share.samples else [] for share in plan.scheduled])


def who_owns_the_block() -> None:
    """A request ends while a plan that writes for it is under way, and another one wants its block."""
    settings = EngineConfig(max_model_len=16, max_num_batched_tokens=16, max_num_seqs=4, block_size=4, device="cpu")
    config = EngineConfig(**{**vars(settings), "async_scheduling": True, "enable_prefix_caching": False}).resolve(16)
    scheduler = Scheduler(config, num_blocks=2)
    stop = SamplingParams(max_tokens=3, stop_token_ids=[7])
    scheduler.add(Request("A", [1, 2, 3, 4, 5], stop))
    first = scheduler.schedule()
    second = scheduler.schedule()  # before A's first token is known
    block = scheduler.requests["A"].block_ids[-1]
    print(f"plan {second.step} is under way: it writes K and V of A's next token into block {block}")
    scheduler.update(first, _token(first, 7))  # and that token ends A
    scheduler.add(Request("B", [8, 8, 8, 8, 8], SamplingParams(max_tokens=2)))
    third = scheduler.schedule()
    taken = [share.new_block_ids for share in third.scheduled]
    got = f"blocks {taken[0]}" if taken else "no block"
    print(f"A has ended, plan {second.step} has not come back, and B gets {got}")
    scheduler.update(second, _token(second, 9))
    print(f"plan {second.step} has come back: {scheduler.kv.pool.num_free_blocks} blocks are free")
