"""Lesson 09, graphs and running ahead: a loop to write, a host and a device to look at, and a write that is late."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from teachllm.config import EngineConfig
from teachllm.engine.engine_core import EngineCore
from teachllm.engine.observability.ceilings import known_ceilings
from teachllm.engine.overrides import NO_OVERRIDES, EngineOverrides
from teachllm.errors import counted
from teachllm.layers.attention_backends.base import AttentionSettings, KVCache
from teachllm.layers.attention_backends.reference import ReferenceBackend
from teachllm.simulator.cost_model import RooflineCost, StepCosts
from teachllm.simulator.shapes import model_shape
from teachllm.simulator.simulate import DEFAULT_DEVICE, Simulation, simulate
from teachllm.simulator.workload import Workload
from teachllm_lessons.exercise import Exercise, Wrong, require, run_with
from teachllm_lessons.palette import INK, LINE, PALE, Color, color, ink_on
from teachllm_lessons.picture import Picture, axes, rectangle
from teachllm_lessons.predict import Prediction
from teachllm_lessons.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teachllm.core.scheduler_output import SchedulerOutput
    from teachllm.layers.attention import AttentionMetadata

Turn = Callable[[Any], Any]
ONE_BY_ONE = StepCosts(decode_layer=StepCosts().prompt_layer)  # decodes launch their kernels like prompts: no graph
_SCHEDULE, _LAUNCH, _UPDATE, _DEVICE = (color(index) for index in (3, 1, 2, 4))


IN_VAIN = Prediction(
    asks="Tokens computed in vain, ended by max_tokens",
    answer=0,
    because="The scheduler does not know *which* tokens are under way, but it knows *how many*: when it plans the step "
    "after the fifth token, five are known or under way, and the request gets nothing more. Only an end that depends "
    "on an id comes late: a stop token or a stop string. The same request, ended by its stop token, computed "
    "{by_a_stop} token in vain.",
    traps={
        1: "That is what an end by a stop token costs: its id is known one step late. A length is known beforehand.",
        2: "Never more than one step is ahead, so it could not be two.",
    },
)


def in_vain(**params: Any) -> int:
    """Return how many tokens a request computes and drops, running one step ahead."""
    question = "What is a KV cache?"
    with Watch(num_gpu_blocks_override=6, max_model_len=64, async_scheduling=True) as watch:
        watch.add("A", question, **params)
        watch.run()
        computed = sum(scheduled["num_tokens"] for step in watch.trace.steps for scheduled in step["scheduled"])
        return computed - (len(watch.ids(question)) + len(watch.tokens("A")) - 1)  # the last token is never computed


@dataclass
class FakeCore:
    """An engine's core with so many steps to do, which notes what it is asked for.

    Attributes:
        num_steps: it can launch.
        blocked: before launching these, all that is under way must have come back.
        said: what was asked for, in order.
        num_ahead: as the engine's own loop reads it.
    """

    num_steps: int
    blocked: frozenset[int] = frozenset()
    said: list[str] = field(default_factory=list)
    num_ahead: int = 1
    most_pending: int = 0

    def __post_init__(self) -> None:
        self._pending: list[int] = []
        self._launched = 0

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def is_done(self) -> bool:
        return self._launched == self.num_steps and not self._pending

    def launch(self) -> bool:
        if self._launched == self.num_steps or (self._launched in self.blocked and self._pending):
            return False
        self.said.append(f"launch {self._launched}")
        self._pending.append(self._launched)
        self._launched += 1
        self.most_pending = max(self.most_pending, len(self._pending))
        return True

    def collect(self) -> list[str]:
        if not self._pending:
            raise Wrong(f"{self.story}: collect() was called and nothing is under way. Look at core.num_pending.")
        self.said.append(f"collect {self._pending[0]}")
        return [f"tokens of step {self._pending.pop(0)}"]

    @property
    def story(self) -> str:
        return ", ".join(self.said) if self.said else "at the beginning"


def contract_turn(piece: Turn) -> int:
    """Check what a loop that runs one step ahead has to do, from no step at all up."""
    cases = 0
    idle = FakeCore(0)
    found = piece(idle)
    require(found == [], f"nothing to do: turn() returned {found!r}. Without new tokens, return an empty list.")
    cases += 1
    for num_steps, blocked, expected in _CASES:
        core, came = FakeCore(num_steps, frozenset(blocked)), list[str]()
        steps = f"{counted(num_steps, 'step')} to do"
        if blocked:
            steps += f", and no request can go on with step {blocked[0]} before all that is under way has come back"
        for _turn in range(4 * num_steps + 4):
            if core.is_done:
                break
            before = len(core.said)
            found = piece(core)
            require(isinstance(found, list), f"{steps}: {core.story}; turn() returned {found!r}, not a list of updates")
            came += found
            require(
                core.num_pending <= 1,
                f"{steps}: {core.story}; {core.num_pending} steps are under way when turn() returns. One ahead is "
                "enough to keep the device busy: a step more only makes tokens later.",
            )
            require(
                len(core.said) > before,
                f"{steps}: {core.story}; then turn() did nothing, with {core.num_pending} step under way. launch() may "
                "return False: no request can go on before some tokens have come.",
            )
        require(core.is_done, f"{steps}: {core.story}; then turn() was called again and again, and it never ended.")
        wanted = [f"tokens of step {step}" for step in range(num_steps)]
        require(came == wanted, f"{steps}: {core.story}; turn() returned {came} and should return {wanted}.")
        require(
            core.said == expected,
            f"{steps}: {core.story}. The device stood still in between. It should be: {', '.join(expected)}.",
        )
        cases += 1
    return cases


_CASES: tuple[tuple[int, tuple[int, ...], list[str]], ...] = (
    (1, (), ["launch 0", "collect 0"]),
    (2, (), ["launch 0", "launch 1", "collect 0", "collect 1"]),
    (3, (), ["launch 0", "launch 1", "collect 0", "launch 2", "collect 1", "collect 2"]),
    (3, (2,), ["launch 0", "launch 1", "collect 0", "collect 1", "launch 2", "collect 2"]),
    (4, (1,), ["launch 0", "collect 0", "launch 1", "launch 2", "collect 1", "launch 3", "collect 2", "collect 3"]),
)


def live_turn(piece: Turn) -> str:
    run_with(EngineOverrides(turn=piece), async_scheduling=True)
    plain, ahead = (
        pretend(async_scheduling=False),
        pretend(overrides=EngineOverrides(turn=piece), async_scheduling=True),
    )
    require(
        ahead.tokens == plain.tokens,
        f"loses steps: with the plain loop {plain.tokens} tokens come out of the simulation, with this {ahead.tokens}",
    )
    busy, was = ahead.busy, plain.busy
    require(
        busy > was + 0.05,
        f"gains nothing: on a simulated H200 the device works {busy:.0%} of the time, with the plain loop {was:.0%}",
    )
    return (
        f"The engine said the same words with it, and kept no block; on a simulated H200 the device works {busy:.0%} "
        f"of the time in place of {was:.0%}."
    )


TURN = Exercise(
    lesson="09",
    name="turn",
    contract=contract_turn,
    live=live_turn,
    reference=EngineCore.turn,
    hints=(
        "The plain loop is: launch, then collect. What changes if you launch *before* you collect what was launched in "
        "the turn before? And what is there to collect in the very first turn?",
        "Launch first, always. Then collect if there is more under way than one step, or if nothing could be launched "
        "and something is still under way. Else there is nothing new: return [].",
        "`launched = core.launch()`; then `if core.num_pending > 1 or (core.num_pending and not launched): return "
        "core.collect()`; else `return []`.",
    ),
)


class _RecordedCost:
    """A cost model that notes how long the device takes for each step, in order."""

    def __init__(self, inner: RooflineCost) -> None:
        self._inner = inner
        self.seconds: list[float] = []

    def device_seconds(self, plan: SchedulerOutput) -> float:
        self.seconds.append(self._inner.device_seconds(plan))
        return self.seconds[-1]

    def host_seconds(self, plan: SchedulerOutput) -> float:
        return self._inner.host_seconds(plan)


@dataclass(frozen=True)
class Pretended:
    """A simulation, and where host and device were in it.

    Attributes:
        steps: of the trace.
        device: (begin, end) of each step on the device.
    """

    simulation: Simulation
    steps: list[dict[str, Any]]
    device: list[tuple[float, float]]

    @property
    def tokens(self) -> int:
        return self.simulation.figures.num_output_tokens

    @property
    def rate(self) -> float:
        """Output tokens per second, from the first step on."""
        return self.simulation.figures.output_tokens_per_s

    @property
    def busy(self) -> float:
        """Share of the time, between its first step and its last, in which the device works."""
        worked = sum(end - begin for begin, end in self.device)
        return worked / (self.device[-1][1] - self.device[0][0])

    def draw(self, first: int = 4, count: int = 4) -> Picture:
        """Draw host and device during some steps, in milliseconds from the first step's plan on."""
        from matplotlib.patches import Patch

        zero, last = self.steps[first]["time"], min(first + count, len(self.steps)) - 1
        shown = range(max(first - 2, 0), min(last + 3, len(self.steps)))
        figure, ax = axes(9, 1.9)
        limit = 1e3 * (self.device[last][1] - zero)

        def bar(row: int, begin: float, end: float, filled: Color | str, height: float, text: str = "") -> None:
            """Draw the part that is in sight, with its text if that has room."""
            left, right = (min(max(1e3 * (at - zero), 0.0), limit) for at in (begin, end))
            rectangle(ax, left, row - height / 2, right - left, height, filled)
            if text and right - left > limit * (0.006 + 0.006 * len(text)):
                ink = INK if isinstance(filled, str) else ink_on(filled)
                ax.text((left + right) / 2, row, text, ha="center", va="center", fontsize=7, color=ink)

        for number in shown:
            step = self.steps[number]
            begin, end = step["time"], step["end"]
            launched, updated = begin + step["schedule"], end - step["update"]
            bar(1, begin, launched, _SCHEDULE, 0.7, str(number))
            bar(1, launched, launched + step["execute"], _LAUNCH, 0.7, str(number))
            bar(1, updated, end, _UPDATE, 0.7, str(number))
            bar(1, updated - step["wait"], updated, PALE, 0.25)
            bar(0, *self.device[number], _DEVICE, 0.7, f"step {number}")
        names = {"plan": _SCHEDULE, "launch": _LAUNCH, "update": _UPDATE, "wait": PALE}
        handles = [Patch(facecolor=filled, edgecolor=LINE, label=name) for name, filled in names.items()]
        ax.set_yticks([0, 1], ["device", "host"])
        ax.set_xlim(0, limit)
        ax.set_ylim(-0.5, 1.5)
        ax.set_xlabel("ms")
        look = {"frameon": False, "labelcolor": INK, "fontsize": 8, "ncols": 4}
        ax.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.0, 1.0), **look)
        says = f"host and device in steps {first} to {last}; the device works {self.busy:.0%} of the time"
        ax.set_title(f"the device works {self.busy:.0%} of the time", fontsize=9, color=INK, loc="right")
        return Picture(figure, says)


def pretend(
    model: str = "qwen3-0.6b",
    num_requests: int = 8,
    *,
    costs: StepCosts | None = None,
    overrides: EngineOverrides = NO_OVERRIDES,
    **settings: Any,
) -> Pretended:
    """So many requests at once, 200 tokens in and 40 out, by the real engine core on a pretended H200."""
    shape = model_shape(model)
    ceilings = known_ceilings(DEFAULT_DEVICE, shape.dtype)
    assert ceilings is not None
    recorded = _RecordedCost(RooflineCost(shape, ceilings, costs))
    workload = Workload(num_requests=num_requests, prompt_len=200, output_len=40)
    done = simulate(EngineConfig(**settings), workload, shape, cost=recorded, overrides=overrides)
    steps = [line for line in map(json.loads, done.lines) if line["event"] == "step"]
    device, idle_from = list[tuple[float, float]](), 0.0
    for step, seconds in zip(steps, recorded.seconds, strict=True):
        begin = max(idle_from, step["time"] + step["schedule"] + step["execute"])
        idle_from = begin + seconds
        device.append((begin, idle_from))
    return Pretended(done, steps, device)


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = ("view", "reshape", "slice", "select", "unsqueeze", "split", "transpose", "t.", "expand", "permute")
        name = str(func).removeprefix("aten.")
        self.count += not name.lstrip("_").startswith((*views, "detach", "alias", "as_strided", "squeeze", "unbind"))
        return func(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[_Counting]:
    """Counts PyTorch's operators that compute something: on a GPU each would launch one kernel or more."""
    with _Counting() as counted:
        yield counted


def seconds_of_an_operator(rounds: int = 5000) -> float:
    """That the host takes for one that computes next to nothing."""
    x = torch.zeros(1)
    for _ in range(100):
        x.add_(1.0)
    began = time.perf_counter()
    for _ in range(rounds):
        x.add_(1.0)
    return (time.perf_counter() - began) / rounds


class LateWrites(ReferenceBackend):
    """A device whose last writes land late: what a step of decodes wrote to the cache is written again in the next one.

    That changes nothing as long as no other request has been given those slots. A device that works on several queues,
    or copies K and V to another machine meanwhile, may be like that.
    """

    def __init__(self) -> None:
        self._late: dict[int, tuple[list[int], torch.Tensor, torch.Tensor]] = {}  # by layer

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        settings: AttentionSettings,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        k_slots, v_slots = (cache.flatten(0, 1) for cache in kv_cache)
        slots, late_k, late_v = self._late.pop(kv_cache[0].data_ptr(), ([], k, v))
        for index, slot in enumerate(slots):
            k_slots[slot], v_slots[slot] = late_k[index], late_v[index]
        if max(metadata.query_lens) == 1:
            self._late[kv_cache[0].data_ptr()] = metadata.slot_mapping.tolist(), k.clone(), v.clone()
        return super().attend(q, k, v, kv_cache, metadata, settings, out)


STOPS_AT = 829  # the ninth token of the answer, " values"


def ends_and_begins() -> None:
    """Four requests end by a stop token while their next step is under way; B takes their blocks."""
    settings: dict[str, Any] = {"num_gpu_blocks_override": 8, "max_model_len": 128, "enable_prefix_caching": False}
    overrides = EngineOverrides(attention=LateWrites())
    with Watch(overrides=overrides, async_scheduling=True, check_invariants=False, **settings) as watch:
        for name in ("A1", "A2", "A3", "A4"):
            watch.add(name, "What is a KV cache?", 12, stop_token_ids=[STOPS_AT])
        watch.add("B", LONG, 10)
        while watch.engine.has_unfinished_requests:
            step = watch.step()
            if step.line is not None and "A1" in step.line["finished"]:
                blocks = step.line["blocks"]
                print(
                    f"A1 to A4 have ended, step {step.line['step'] + 1} is under way: {blocks['free']} blocks are free"
                )
        print(f"A1: {watch.text('A1')!r}\nB: {watch.text('B')!r}")


LONG = "Why is a block of sixteen tokens better than one for the longest answer, and what is lost at its end?"
