"""Lesson 03, continuous batching: who sits where, what a batch costs, and a policy that is judged."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from teachllm.config import EngineConfig
from teachllm.core.policy import FirstComeFirstServed, Key, Policy
from teachllm.core.request import Request
from teachllm.engine.observability.ceilings import known_ceilings
from teachllm.engine.overrides import NO_OVERRIDES, EngineOverrides
from teachllm.roofline import Ceilings, StepShape, step_work
from teachllm.sampling_params import SamplingParams
from teachllm.simulator.shapes import model_shape
from teachllm.simulator.simulate import DEFAULT_DEVICE, Simulation, simulate
from teachllm.simulator.workload import Arrival, Workload
from teachllm.trace.reader import parse_trace
from teachllm.trace.replay import Line
from teachllm_lessons.exercise import Exercise, Wrong, require, run_with
from teachllm_lessons.faults import ROOT
from teachllm_lessons.palette import HIT, INK, LINE, PALE, color, ink_on
from teachllm_lessons.picture import Picture, axes, short
from teachllm_lessons.watch import Watch

QUEUE = {"A": 10, "B": 3, "C": 2, "D": 7, "E": 4, "F": 6}  # tokens of each answer, in order of arrival
PLACES = 3
ROOM: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_model_len": 256, "enable_prefix_caching": False}
SHAPE = "qwen3-8b"


def serve(scheduling_policy: str = "fcfs", overrides: EngineOverrides = NO_OVERRIDES) -> Watch:
    """The queue in three places, nothing computed yet."""
    watch = Watch(scheduling_policy=scheduling_policy, overrides=overrides, max_num_seqs=PLACES, **ROOM)
    for name, num_tokens in QUEUE.items():
        watch.add(name, f"Who is {name}?", num_tokens)
    return watch


# -- what is judged --------------------------------------------------------------------------------------------


class ShortestFirst(FirstComeFirstServed):
    """Put the request with the fewest output tokens first; requests may join in every step."""

    def key(self, request: Request) -> Key:
        return request.max_len - request.num_prompt_tokens, request.arrival_index

    def opens_batch(self, num_running: int) -> bool:
        return True


def request_for(name: str, arrival: int, num_tokens: int | None, num_prompt: int = 4) -> Request:
    """A request as a policy sees it in its queue, of a model with room for 100 tokens."""
    made = Request(name, list(range(num_prompt)), SamplingParams(max_tokens=num_tokens), arrival_index=arrival)
    made.max_len = made.longest(100, 16, 64)
    return made


def contract_order(policy: Policy, requests: Sequence[Request]) -> int:
    """Keys of any policy: one for each request, the same whenever it is asked for, and comparable."""
    keys: list[Key] = []
    for request in requests:
        found = policy.key(request)
        require(isinstance(found, tuple), f"key of {request.request_id} is {found!r}: give a tuple of numbers")
        require(
            policy.key(request) == found,
            f"key of {request.request_id} is another one when asked again: the queue is sorted once, and finds a "
            "request by its key",
        )
        keys.append(found)
    for index, one in enumerate(keys):
        for other_index, other in enumerate(keys[:index]):
            names = f"{requests[other_index].request_id} and {requests[index].request_id}"
            require(one != other, f"gives {names} the same key {one}: the queue cannot tell one from the other")
            try:
                _ = one < other
            except TypeError as error:
                raise Wrong(f"keys of {names} are {other} and {one}, which have no order: {error}") from error
    return len(requests)


def contract_batching(piece: type[Policy]) -> int:
    """Open while others run, shortest answer first, ties in order of arrival, no two keys alike."""
    policy = piece()
    require(bool(policy.opens_batch(0)), "opens_batch(0) is false: nothing runs, and no request may begin")
    for num_running in (1, 2, 7, 255):
        require(
            bool(policy.opens_batch(num_running)),
            f"opens_batch({num_running}) is false: a place that has become free stays empty until all have finished. "
            "That is static batching",
        )
    cases = 5

    short_one, long_one = request_for("the one that wants 2", 1, 2), request_for("the one that wants 3", 0, 3)
    cases += contract_order(policy, [long_one, short_one])
    require(
        policy.key(short_one) < policy.key(long_one),
        "lets a request that wants 3 tokens go before one that wants 2 and came later: the fewer first",
    )
    twins = [request_for(f"arrival {arrival}", arrival, 5) for arrival in range(12)]
    cases += contract_order(policy, twins)
    for one, other in pairwise(twins):
        require(
            policy.key(one) < policy.key(other),
            f"puts {other.request_id} before {one.request_id}, of the same length: who came first goes first",
        )
    talkative, brief = request_for("a prompt of 60", 2, 4, num_prompt=60), request_for("a prompt of 2", 3, 9, 2)
    cases += contract_order(policy, [talkative, brief])
    require(
        policy.key(talkative) < policy.key(brief),
        "lets an answer of 9 tokens to a short prompt go before one of 4 tokens to a long prompt: a prompt takes one "
        "step, an answer one for each of its tokens",
    )
    endless = request_for("the one that says no number", 0, None)
    cases += contract_order(policy, [endless, request_for("the one that wants 5", 1, 5)])
    require(
        policy.key(request_for("the one that wants 5", 1, 5)) < policy.key(endless),
        "lets a request without max_tokens, which may go on to the model's last position, go before one of 5 tokens",
    )
    return cases + 3


CROWD = Workload(num_requests=120, rate=40.0, prompt_len=(20, 200), output_len=(4, 200))


@lru_cache
def _crowd(piece: type[Policy]) -> Simulation:
    config = EngineConfig(max_num_seqs=8, enable_prefix_caching=False)
    return simulate(config, CROWD, model_shape(SHAPE), overrides=EngineOverrides(policy=piece()))


def crowd(piece: type[Policy]) -> Simulation:
    """120 requests on a simulated H200, under a policy that is made anew."""
    return _crowd(piece)


def waits(found: Simulation) -> list[float]:
    """Seconds to each request's first token, of a simulation, in order of arrival."""
    requests = parse_trace(found.lines).replay.requests.values()
    return [request.token_times[0] - request.arrival["time"] for request in requests]


def live_batching(piece: type[Policy]) -> str:
    run_with(EngineOverrides(policy=piece()))
    usual, found = (crowd(each).figures.ttft.mean for each in (FirstComeFirstServed, piece))
    require(found < 0.8 * usual, f"gains nothing: a first token after {found:.2f} s on average, {usual:.2f} s in order")
    return (
        f"The engine ran with it: the same words. Of 120 requests on a simulated GPU one waits {found:.2f} s for its "
        f"first token on average, in order of arrival {usual:.2f} s."
    )


BATCHING = Exercise(
    lesson="03",
    name="Batching",
    contract=contract_batching,
    live=live_batching,
    reference=ShortestFirst,
    hints=(
        "`opens_batch` has one answer that is right for continuous batching, whatever runs. For the key: which number "
        "of a request says how many steps it will take at most, and what if two are alike?",
        "`request.sampling_params.max_tokens` may be None. `request.max_len` never is: it is the longest that prompt "
        "and answer can get together. Behind that number put one that no two requests share.",
        "`return (request.max_len - request.num_prompt_tokens, request.arrival_index)`, and `return True`.",
    ),
    whose="the lesson's",
)


# -- what is drawn ---------------------------------------------------------------------------------------------


def seats(lines: Sequence[Line], count: int = PLACES) -> list[list[tuple[str, bool] | None]]:
    """Return, for each step and place, a request and whether it computes its prompt, or None."""
    taken: dict[str, int] = {}
    found: list[list[tuple[str, bool] | None]] = []
    for step in (line for line in lines if line["event"] == "step"):
        row: list[tuple[str, bool] | None] = [None] * count
        for scheduled in step["scheduled"]:
            name = scheduled["request_id"]
            if name not in taken:
                taken[name] = min(set(range(count)) - set(taken.values()))
            row[taken[name]] = name, scheduled["phase"] == "prefill"
        found.append(row)
        for name in [*step["finished"], *step["preempted"]]:
            taken.pop(name, None)
    return found


def places(runs: Mapping[str, Watch], count: int = PLACES) -> Picture:
    """The places of one batch or more, on one time axis: empty ones are outlined."""
    from matplotlib.patches import Rectangle

    tables = {name: seats(watch.trace.lines, count) for name, watch in runs.items()}
    width = max(len(table) for table in tables.values())
    figure, ax = axes(8, 0.7 + 0.36 * (count + 1) * len(tables))
    names = [name for name in QUEUE if any((name, True) in row for table in tables.values() for row in table)]
    says, ticks = [], []
    for panel, (title, table) in enumerate(tables.items()):
        top = -panel * (count + 1)
        empty = 0
        for column in range(len(table)):
            for place in range(count):
                x, y, seat = column + 0.04, top - place - 0.92, table[column][place]
                if seat is None:
                    empty += 1
                    style: dict[str, Any] = {"facecolor": PALE, "edgecolor": LINE, "linestyle": ":"}
                    ax.add_patch(Rectangle((x, y), 0.92, 0.84, **style))
                    continue
                name, is_prompt = seat
                filled = color(names.index(name))
                face = filled if is_prompt else (*filled, 0.5)
                ax.add_patch(Rectangle((x, y), 0.92, 0.84, facecolor=face, edgecolor="none"))
                ink = ink_on(filled) if is_prompt else INK
                ax.text(column + 0.5, y + 0.42, name, ha="center", va="center", fontsize=8, color=ink)
        head = f"{title}: {len(table)} steps, {empty} of {count * len(table)} places empty"
        ax.text(0.04, top + 0.12, head, fontsize=9, color=INK, va="bottom")
        ticks += [(top - place - 0.5, f"place {place + 1}") for place in range(count)]
        says.append(head)
    ax.set_xlim(0, width)
    ax.set_ylim(-len(tables) * (count + 1) + 0.9, 0.9)
    ax.set_yticks(*zip(*ticks, strict=True))
    ax.set_xticks([0.5 + column for column in range(width)], range(width))
    ax.set_xlabel("step")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return Picture(figure, "; ".join(says))


def ceilings() -> Ceilings:
    """Return the ceilings of an H200 in bfloat16."""
    found = known_ceilings(DEFAULT_DEVICE, "bfloat16")
    assert found is not None
    return found


def roofline(batches: Sequence[int] = (1, 4, 16, 64, 256, 1024), prompt: int = 2048) -> Picture:
    """Decodes of batches, and a prompt, under an H200's roof: no step is above the line."""
    model, roof = model_shape(SHAPE), ceilings()
    figure, ax = axes(8, 3.6)
    ridge = roof.gemm_flops / roof.read_bandwidth
    ax.plot([0.5, ridge, 4000], [0.5 * roof.read_bandwidth / 1e12, *[roof.gemm_flops / 1e12] * 2], color=INK)
    ax.axvline(ridge, color=LINE, linestyle=":")
    ax.text(ridge * 1.06, 3, f"the ridge: {ridge:.0f} FLOPs per byte", fontsize=8, color=INK)
    ax.text(3, 16, "memory is the limit", fontsize=8, color=INK, ha="right")
    ax.text(4000, roof.gemm_flops / 1e12 * 1.3, "arithmetic is the limit", fontsize=8, color=INK, ha="right")
    ax.set_ylim(1, 2500)
    decodes = [(f"{n}", StepShape([1] * n, [256] * n, n)) for n in batches]
    said = []
    for name, step in [*decodes, (f"prompt of {prompt:,}", StepShape([prompt], [prompt], 1))]:
        work = step_work(model, step)
        flops = work.matrix_flops + work.attention_flops
        x, y = flops / work.num_bytes, flops / work.seconds(roof) / 1e12
        is_decode = name.isdigit()
        ax.plot([x], [y], marker="o" if is_decode else "s", color=color(0) if is_decode else HIT, markersize=7)
        ax.annotate(name, (x, y), (7, -10), textcoords="offset points", fontsize=8, color=INK)
        said.append(f"{name} at {x:.0f} FLOPs per byte")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("FLOPs for each byte that is read")
    ax.set_ylabel("TFLOP/s at best")
    title = "Qwen3-8B on an H200: decode steps of so many requests (circles), and a prompt"
    ax.set_title(title, fontsize=9, color=INK, loc="left")
    return Picture(figure, f"{title}: {', '.join(said)}")


def curves(series: Mapping[str, Mapping[int, float]], points: Mapping[str, Mapping[int, float]]) -> Picture:
    """Draw what a batch costs and what it brings: ms per step, and tokens/s, over the size of the batch.

    Args:
        series: seconds of a step for each size; drawn as lines.
        points: the same; drawn as crosses.
    """
    from matplotlib.ticker import LogLocator

    figure, (left, right) = axes(9, 3.4, ncols=2)
    for index, (name, seconds) in enumerate([*series.items(), *points.items()]):
        style: dict[str, Any] = {"marker": "o", "markersize": 3} if name in series else {"marker": "X", "linestyle": ""}
        drawn = color(index) if name in series else HIT
        left.plot(list(seconds), [1000 * value for value in seconds.values()], color=drawn, label=name, **style)
        right.plot(list(seconds), [n / value for n, value in seconds.items()], color=drawn, **style)
    for ax, label in ((left, "ms per step: from token to token"), (right, "tokens/s of all together")):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xlabel("requests in the batch")
        ax.set_ylabel(label)
        ax.grid(color=LINE, linewidth=0.5)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(lambda value, _: short(value))
        ax.yaxis.set_minor_formatter(lambda *_: "")
    left.legend(frameon=False, labelcolor=INK, fontsize=8)
    return Picture(figure, f"ms per step and tokens/s over the size of the batch, for {', '.join([*series, *points])}")


# -- what is measured ------------------------------------------------------------------------------------------


def decode_seconds(lines: Iterable[Line]) -> dict[int, float]:
    """Seconds of a step of decodes alone, from the end of the step before it, by the number of its requests.

    The shortest of its kind: the machine may have had other work during the others.
    """
    steps = [line for line in lines if line["event"] == "step"]
    found: dict[int, list[float]] = {}
    for before, step in pairwise(steps):
        if all(scheduled["phase"] == "decode" for scheduled in [*before["scheduled"], *step["scheduled"]]):
            found.setdefault(len(step["scheduled"]), []).append(step["end"] - before["end"])
    return {size: min(found[size]) for size in sorted(found)}


def simulated_step(num_requests: int, context: int = 64) -> float:
    """Seconds of a decode step on a simulated H200, with so many requests of so many tokens."""
    config = EngineConfig(max_num_seqs=num_requests, max_num_batched_tokens=1 << 20, enable_prefix_caching=False)
    work = [Arrival(0.0, [1] * context, 6) for _ in range(num_requests)]
    found = simulate(config, work, model_shape(SHAPE))
    return decode_seconds(map(json.loads, found.lines))[num_requests]


def live_steps(num_requests: int = 16, apart: int = 8) -> dict[int, float]:
    """Seconds of a decode step on this machine, for 1, 2, 4, ... requests.

    One run has them all: the requests end one after the other, `apart` steps between them.
    """
    settings = ROOM | {"num_gpu_blocks_override": 400, "check_invariants": False}
    with Watch(max_num_seqs=num_requests, **settings) as watch:
        for number in range(num_requests):
            watch.add(str(number), "Why?", apart * (number + 1))
        found = decode_seconds(watch.run().trace.lines)
    return {size: seconds for size, seconds in found.items() if size & (size - 1) == 0}


def measured_steps() -> tuple[dict[int, float], str]:
    """Seconds of a decode step as measured on a GPU, by the number of requests, and what was measured where."""
    for path in sorted((ROOT / "benchmarks" / "results").glob("*-nvidia-h200-*.json"), reverse=True):
        found = json.loads(path.read_text(encoding="utf-8"))
        work = found.get("workloads", {}).get(SHAPE, {})
        if "ceilings" in found and found.get("variant") == "bf16" and {"single", "batch64"} <= work.keys():
            seconds = {1: work["single"]["tpot_ms"] / 1000, 64: work["batch64"]["step_ms"] / 1000}
            return seconds, f"{SHAPE} on one {found['device']}, commit {found['commit'][:9]}"
    raise FileNotFoundError("no result of benchmarks/h200.py in benchmarks/results")


def two_ways() -> None:
    """The queue under both policies."""
    for policy in ("static", "fcfs"):
        with serve(policy) as watch:
            watch.run()
            table = seats(watch.trace.lines)
        begins = {seat[0]: step for step, row in reversed([*enumerate(table)]) for seat in row if seat is not None}
        empty = sum(seat is None for row in table for seat in row)
        starts = ", ".join(f"{name} in {begins[name]}" for name in sorted(begins))
        print(f"{policy:6} {len(table)} steps, {empty:2} empty places; first steps: {starts}")
