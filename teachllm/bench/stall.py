"""Look for stalls: steps that take far longer than their work, in the first minute of a new process with empty caches.

From the moment the engine is ready, requests arrive as a Poisson process. Every step is timed and set beside its bound:

    bound = 2.5 x roofline + 20 ms

A longer step did something besides computing: it compiled or loaded a kernel, recorded a CUDA graph, or waited for a
garbage collection (`engine_events.py`); or its kernels are far slower than the device allows.

A step's time is what its requests waited, by the trace's timestamps: from the end of the step before, or from when it
was scheduled, if the engine was idle then, to when its tokens were known. With asynchronous scheduling the next step is
launched meanwhile, so a kernel that the next step needs first belongs to this one. Requests that arrive during a step
are added at its end.

Run as a program, this module is the new process. Its arguments: the engine's settings and the load, both as JSON.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from teachllm.bench.batch import random_ids
from teachllm.bench.engine_events import Clock, EngineEvent, describe, observing
from teachllm.bench.fresh_process import run_fresh
from teachllm.bench.serve.arrivals import arrival_times
from teachllm.core.in_flight import RequestUpdate
from teachllm.core.request import Request
from teachllm.core.scheduler import Scheduler
from teachllm.core.scheduler_output import SchedulerOutput
from teachllm.sampling_params import SamplingParams
from teachllm.trace.recorder import Recorder, StepTimestamps

if TYPE_CHECKING:
    from teachllm.engine.llm_engine import Engine

_TIMES_ROOFLINE = 2.5
_SLACK_S = 0.020
_NUM_LONGEST = 10
_TEMPERATURE = 0.6


@dataclass(frozen=True)
class StallLoad:
    """Describe the requests.

    Attributes:
        rate: requests per second.
        duration_s: how long requests arrive; the run ends when all of them have finished.
        shortest_prompt, longest_prompt: tokens; lengths are uniform on a logarithmic scale.
        shortest_output, longest_output: tokens; lengths are uniform.
    """

    rate: float
    duration_s: float = 60.0
    shortest_prompt: int = 10
    longest_prompt: int = 8000
    shortest_output: int = 10
    longest_output: int = 300
    seed: int = 0


@dataclass(frozen=True)
class TimedRequest:
    """Describe one request; `due_s` is when it arrives, in seconds from the first one."""

    due_s: float
    prompt: list[int]
    output_len: int


@dataclass(frozen=True)
class TimedStep:
    """Describe a step: how long it took, and what it did.

    Attributes:
        begin, end: on the trace's clock.
        floor: seconds by the roofline; None where the device's ceilings are not known.
        graph_mode: as in the trace; None on a CPU.
        events: what else happened meanwhile.
    """

    begin: float
    end: float
    num_prompt_tokens: int
    num_decodes: int
    num_preempted: int = 0
    floor: float | None = None
    graph_mode: str | None = None
    events: tuple[EngineEvent, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def bound(self) -> float | None:
        """Return the seconds that the step may take; None if its roofline is not known."""
        return None if self.floor is None else _TIMES_ROOFLINE * self.floor + _SLACK_S

    @property
    def excess(self) -> float:
        """Return by how many seconds the step is longer than its bound; without one, all of its time."""
        return self.seconds - (self.bound or 0.0)

    @property
    def is_over(self) -> bool:
        return self.bound is not None and self.seconds > self.bound

    @property
    def other_work(self) -> str:
        """Return what happened besides computing, in a few words; "" if nothing did."""
        preempted = f"preempted {_counted(self.num_preempted, 'request')}" if self.num_preempted else ""
        return ", ".join(part for part in (describe(self.events), preempted) if part)

    @property
    def cause(self) -> str:
        """Return what explains the step's length: other work, or else the size of the step."""
        tokens, decodes = _counted(self.num_prompt_tokens, "prompt token"), _counted(self.num_decodes, "decode")
        return self.other_work or f"{tokens} and {decodes}"


class StepRecorder(Recorder):
    """Keep each step's times and sizes. A trace's lines would cost the host more, and long steps are looked for."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(lambda line: None, clock)
        self.steps: list[TimedStep] = []
        self._last_end = -math.inf
        self._was_idle = True  # after the last step

    def arrival(self, request: Request) -> None:
        pass

    def write(self, event: str, scheduler: Scheduler | None = None, **fields: Any) -> None:
        if scheduler is not None:
            scheduler.kv.drain_events()

    def step(
        self,
        plan: SchedulerOutput,
        updates: list[RequestUpdate],
        scheduler: Scheduler,
        times: StepTimestamps,
        **more: Any,
    ) -> None:
        scheduler.kv.drain_events()
        decodes = [each for each in plan.scheduled if each.samples and each.num_tokens == 1 + len(each.draft_token_ids)]
        step = TimedStep(
            begin=max(self._last_end, times.time) if self._was_idle else self._last_end,
            end=times.end,
            num_prompt_tokens=plan.num_tokens - sum(each.num_tokens for each in decodes),
            num_decodes=len(decodes),
            num_preempted=len(plan.preempted),
            floor=(more.get("roofline") or {}).get("floor"),
            graph_mode=more.get("graph_mode"),
        )
        self.steps.append(step)
        self._last_end, self._was_idle = step.end, not scheduler.has_unfinished


def draw_requests(load: StallLoad, vocab_size: int) -> list[TimedRequest]:
    """Draw the requests of a load, the same for the same seed."""
    rng = random.Random(f"stall {load.seed}")
    expected = load.rate * load.duration_s
    most = math.ceil(expected + 10 * math.sqrt(expected)) + 10  # a Poisson process never has as many
    logs = math.log(load.shortest_prompt), math.log(load.longest_prompt)
    found = []
    for due_s in arrival_times(most, load.rate, seed=load.seed):
        if due_s >= load.duration_s:
            break
        prompt = random_ids(rng, round(math.exp(rng.uniform(*logs))), vocab_size)
        found.append(TimedRequest(due_s, prompt, rng.randint(load.shortest_output, load.longest_output)))
    return found


def run_requests(engine: Engine, requests: Sequence[TimedRequest], clock: Clock) -> None:
    """Serve requests as they arrive, from now until all have finished.

    Raises:
        RuntimeError: a request ended early.
        ValueError: a request can never fit.
    """
    lengths: dict[str, int] = {}
    began, num_added = clock(), 0
    while num_added < len(requests) or engine.has_unfinished_requests:
        while num_added < len(requests) and requests[num_added].due_s <= clock() - began:
            request, name = requests[num_added], f"stall {num_added}"
            params = SamplingParams(
                temperature=_TEMPERATURE, max_tokens=request.output_len, ignore_eos=True, detokenize=False
            )
            engine.add_request(name, {"prompt_token_ids": request.prompt}, params)
            lengths[name] = request.output_len
            num_added += 1
        if not engine.has_unfinished_requests:
            time.sleep(max(0.0, requests[num_added].due_s - (clock() - began)))
            continue
        for output in engine.step():
            if output.finished and len(output.outputs[0].token_ids) != lengths.pop(output.request_id):
                raise RuntimeError(f"{output.request_id} ended after {len(output.outputs[0].token_ids)} tokens")


def with_events(steps: Sequence[TimedStep], events: Sequence[EngineEvent]) -> Iterator[TimedStep]:
    """Yield the steps with the events that were over in each; both are in the order of time."""
    index = 0
    for step in steps:
        while index < len(events) and events[index].time <= step.begin:  # the engine was idle
            index += 1
        first = index
        while index < len(events) and events[index].time <= step.end:
            index += 1
        yield replace(step, events=tuple(events[first:index]))


def summarize(steps: Sequence[TimedStep]) -> dict[str, Any]:
    """Return what a run showed.

    Returns:
        "num_steps"; "num_bounded" of them, whose roofline is known; "num_over" of these, longer than their bound;
        "longest", the steps with the largest excess, each with its cause; and "steps", a list for each property.
    """
    start = steps[0].begin if steps else 0.0
    columns: dict[str, list[Any]] = {
        "begin_s": [_rounded(step.begin - start) for step in steps],
        "seconds": [_rounded(step.seconds) for step in steps],
        "roofline_s": [_rounded(step.floor) for step in steps],
    }
    for name in ("num_prompt_tokens", "num_decodes", "num_preempted", "graph_mode", "other_work"):
        columns[name] = [getattr(step, name) for step in steps]
    longest = sorted(range(len(steps)), key=lambda index: steps[index].excess, reverse=True)[:_NUM_LONGEST]
    return {
        "num_steps": len(steps),
        "num_bounded": sum(step.bound is not None for step in steps),
        "num_over": sum(step.is_over for step in steps),
        "longest": [
            {"step": index, "seconds": steps[index].seconds, "bound_s": steps[index].bound, "cause": steps[index].cause}
            for index in longest
        ],
        "steps": columns,
    }


def stall(settings: Mapping[str, Any], load: StallLoad) -> dict[str, Any]:
    """Run a load in a new process with empty caches.

    Args:
        settings: fields of `EngineConfig`.

    Returns:
        What `summarize` returns; "ready_s", from the start of the process, without the drawing of the requests; and
        "num_requests".

    Raises:
        RuntimeError: the process failed; with the last line that it printed.
    """
    arguments = [json.dumps(dict(settings)), json.dumps(asdict(load))]
    with tempfile.TemporaryDirectory(prefix="teachllm-stall-") as folder:
        ready, result = run_fresh("teachllm.bench.stall", arguments, folder, ["ready", "{"])
    found = json.loads(result.text)
    return {"ready_s": ready.seconds - found.pop("drawing_s")} | found


def main() -> None:
    from teachllm.config import EngineConfig
    from teachllm.engine.llm_engine import Engine
    from teachllm.models.model_config import load_model_config
    from teachllm.worker.device import select_device

    config, load = EngineConfig(**json.loads(sys.argv[1])), StallLoad(**json.loads(sys.argv[2]))
    model = load_model_config(config, select_device(config.device).type)
    clock = time.perf_counter
    began = clock()
    requests = draw_requests(load, model.vocab_size)  # now, since the first of them arrives when the engine is ready
    drawing_s = clock() - began
    recorder = StepRecorder(clock)
    with observing(clock) as events:
        engine = Engine(config, recorder=recorder)
        print("ready", flush=True)
        run_requests(engine, requests, clock)
    found = summarize(list(with_events(recorder.steps, events)))
    print(json.dumps({"drawing_s": drawing_s, "num_requests": len(requests)} | found), flush=True)
    engine.close()


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _rounded(seconds: float | None) -> float | None:
    """Return seconds to the microsecond: a result has thousands of them."""
    return None if seconds is None else round(seconds, 6)


if __name__ == "__main__":
    main()
