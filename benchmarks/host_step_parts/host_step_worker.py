"""Measure one process's share of `host_step.py`: the host's work per decode step, as CPU time or as calls.

The engine's own loop, scheduler and rows run; only the model is missing. Whichever `teachllm` comes first on
PYTHONPATH is measured, so that one copy of this script measures every checkout. What may be called differently
elsewhere is named in `SYMBOLS` and `MEMBERS`, and nowhere else: put the new name beside the old one.

Beside these runners stand arrivals: what a request that shares a long prefix with others costs in all.

Prints JSON: {"package": folder, "cells": {runner: {number of requests: {phase: cost per step}}}}.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
from array import array
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parent))  # last: no script here may stand in for a package
from host_step_meter import PHASES, Costs, Meter, call_meter, cpu_time_meter

# Every symbol that is imported, as "module:name": the first one that imports is taken.
SYMBOLS: dict[str, tuple[str, ...]] = {
    "EngineConfig": ("teachllm.config:EngineConfig",),
    "SamplingParams": ("teachllm.sampling_params:SamplingParams",),
    "Request": ("teachllm.core.request:Request",),
    "ModelRunnerOutput": ("teachllm.core.scheduler_output:ModelRunnerOutput",),
    "EngineCore": ("teachllm.engine.engine_core:EngineCore",),
    "InputBatch": ("teachllm.worker.cpu.input_batch:InputBatch", "teachllm.worker.input_batch:InputBatch"),
    "DeviceBatch": ("teachllm.worker.gpu.device_batch:DeviceBatch", "teachllm.worker.device_batch:DeviceBatch"),
    # The kernel that `DeviceBatch.send` launches once it has packed a plan, as the module of `send` knows it.
    "write_runs": ("teachllm.worker.gpu.device_batch:write_runs", "teachllm.worker.device_batch:write_runs"),
}
# Methods and attributes that have other names in some checkouts: the first one that is there is taken.
MEMBERS: dict[str, tuple[str, ...]] = {
    "Batch.update": ("update",),
    "Batch.prepare": ("prepare",),
    "InputBatch.append": ("append",),
    "StepInputs.rows": ("rows",),
    "DeviceBatch.send": ("send",),
    "EngineCore.scheduler": ("scheduler",),
    "Scheduler.schedule": ("schedule",),
    "Scheduler.update": ("update",),
}
BLOCK_SIZE = 16
WINDOW = BLOCK_SIZE  # steps; each request enters a new block once in a window, and equally many do in each step
MAX_MODEL_LEN = 1024
NUM_WARMUP_STEPS = 2 * WINDOW
SAMPLED_ID = 7
ARRIVALS = "arrivals"  # beside the runners: requests that share a prefix arrive
SHARED = 4096  # tokens of it
_HERE = (lambda: None).__code__.co_filename

Cells = dict[str, dict[str, Costs]]  # by runner and number of requests


def find(symbol: str) -> tuple[ModuleType, str]:
    """Return the module that has a symbol in this checkout, and the symbol's name there.

    Raises:
        ImportError: no candidate is there.
    """
    for candidate in SYMBOLS[symbol]:
        module_name, _, name = candidate.partition(":")
        try:
            module = import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not module_name.startswith(error.name):
                raise  # the module is there, and lacks something that it needs
            continue
        if hasattr(module, name):
            return module, name
    raise ImportError(f"{symbol} is at none of {', '.join(SYMBOLS[symbol])}: add its place to SYMBOLS in {_HERE}")


def load(symbol: str) -> Any:
    """Return what a symbol stands for in this checkout."""
    module, name = find(symbol)
    return getattr(module, name)


def name_of(owner: object, member: str) -> str:
    """Return the name that a method or an attribute of this object has in this checkout.

    Raises:
        AttributeError: the object has none of the candidates.
    """
    for name in MEMBERS[member]:
        if hasattr(owner, name):
            return name
    raise AttributeError(f"{member} is none of {', '.join(MEMBERS[member])}: add its name to MEMBERS in {_HERE}")


def get(owner: object, member: str) -> Any:
    """Return a method or an attribute, whatever it is called in this checkout."""
    return getattr(owner, name_of(owner, member))


def _sizes(config: Any) -> dict[str, Any]:
    """Return the arguments that both kinds of batch take."""
    names = ("max_num_seqs", "max_model_len", "block_size")
    return {name: getattr(config, name) for name in names} | {"device": import_module("torch").device("cpu")}


class CPUInputs:
    """What a CPU's runner does on the host: rows, the step's flat tensors, and sampled tokens into the rows."""

    def __init__(self, config: Any) -> None:
        batch = load("InputBatch")(**_sizes(config))
        self._update, self._prepare = get(batch, "Batch.update"), get(batch, "Batch.prepare")
        self._append = get(batch, "InputBatch.append")

    def build(self, plan: Any) -> Any:
        """Return the step's flat tensors."""
        self._update(plan, ())
        return self._prepare(plan)

    def take(self, inputs: Any, sampled: list[list[int]]) -> None:
        """Append sampled tokens to the rows."""
        for row, token_ids in zip(get(inputs, "StepInputs.rows"), sampled, strict=True):
            self._append(row, token_ids)


class GPUInputs:
    """What a GPU's runner does on the host before a launch: rows, the plan's header, and one buffer with all of it."""

    def __init__(self, config: Any) -> None:
        batch = load("DeviceBatch")(**_sizes(config), max_num_batched_tokens=config.max_num_batched_tokens)
        self._limits = config.max_num_seqs, config.max_num_batched_tokens
        self._update, self._prepare = get(batch, "Batch.update"), get(batch, "Batch.prepare")
        self._send = get(batch, "DeviceBatch.send")
        self._sizes = getattr(batch, "sizes", None)  # older checkouts ask the step

    def build(self, plan: Any) -> Any:
        """Pack a plan, padded as its CUDA graph would be."""
        self._update(plan, ())
        step = self._prepare(plan)
        shape = step.full_graph_shape(*self._limits) if self._sizes is None else self._sizes.full(step)
        num_seqs, num_tokens = shape or (len(step.rows), step.num_tokens)
        self._send(step, num_seqs, num_tokens)
        return step

    def take(self, inputs: Any, sampled: list[list[int]]) -> None:
        """Do nothing: the device appends sampled tokens to its rows by itself."""


RUNNERS: dict[str, Callable[[Any], CPUInputs | GPUInputs]] = {"cpu": CPUInputs, "gpu": GPUInputs}


class InstantExecutor:
    """An executor that builds a step's inputs and returns at once: every request samples the same token.

    Attributes:
        num_scheduled: requests in all steps so far.
    """

    max_in_flight = 1
    sentinel: int | None = None

    def __init__(self, inputs: CPUInputs | GPUInputs, num_blocks: int) -> None:
        self._inputs = inputs
        self._make_output = load("ModelRunnerOutput")
        self.num_blocks = num_blocks
        self.num_scheduled = 0

    def execute(self, plan: Any) -> Any:
        """Build a plan's inputs."""
        self.num_scheduled += len(plan.scheduled)
        return plan, self._inputs.build(plan)

    def sample(self, handle: Any) -> InstantOutput:
        """Return the constant token of every request."""
        plan, inputs = handle
        sampled = [[SAMPLED_ID]] * len(plan.scheduled)
        self._inputs.take(inputs, sampled)
        return InstantOutput(self._make_output(sampled_token_ids=sampled))

    def close(self) -> None:
        """Do nothing."""


class InstantOutput:
    """An output that is there already."""

    def __init__(self, output: Any) -> None:
        self._output = output

    def result(self) -> Any:
        """Return it."""
        return self._output


def metered_core(config: Any, executor: InstantExecutor, meter: Meter) -> Any:
    """Return an engine's core whose phases are counted."""
    core = load("EngineCore")(config, executor)
    scheduler = get(core, "EngineCore.scheduler")
    meter.attach(scheduler, name_of(scheduler, "Scheduler.schedule"), "schedule")
    meter.attach(executor, "execute", "inputs")
    meter.attach(executor, "sample", "update")
    meter.attach(scheduler, name_of(scheduler, "Scheduler.update"), "update")
    return core


def measure(runner: str, num_requests: int, *, num_windows: int, meter: Meter) -> list[Costs]:
    """Return what each window of a steady decode costs.

    Args:
        runner: whose inputs are built, of `RUNNERS`. With "gpu" the engine schedules a step ahead, as it does there.
        num_windows: of `WINDOW` steps, after those that warm up.
    """
    num_steps = NUM_WARMUP_STEPS + num_windows * WINDOW
    if 3 * BLOCK_SIZE + num_steps >= MAX_MODEL_LEN:
        raise ValueError(f"windows={num_windows}: sequences would be longer than {MAX_MODEL_LEN} tokens, ask for fewer")
    config = load("EngineConfig")(
        device="cpu",
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=num_requests,
        max_num_batched_tokens=max(MAX_MODEL_LEN, num_requests * 3 * BLOCK_SIZE),  # all prompts in one step
        async_scheduling=runner == "gpu",
    ).resolve(MAX_MODEL_LEN)
    executor = InstantExecutor(RUNNERS[runner](config), num_blocks=num_requests * MAX_MODEL_LEN // BLOCK_SIZE)
    core = metered_core(config, executor, meter)
    params = load("SamplingParams")(temperature=0.0, max_tokens=MAX_MODEL_LEN, ignore_eos=True)
    for index in range(num_requests):
        # Prompts differ from their first token on, so that none is found in the cache; their lengths take turns.
        prompt = [index + 1] * (2 * BLOCK_SIZE + index % BLOCK_SIZE)
        core.add(load("Request")(str(index), prompt, params))
    launches: Any = nullcontext()
    if runner == "gpu":
        launches = mock.patch.object(*find("write_runs"), lambda *arguments, **named: None)
    with launches:
        for _ in range(NUM_WARMUP_STEPS // WINDOW):
            meter.window(core.step, WINDOW)
        windows = [meter.window(core.step, WINDOW) for _ in range(num_windows)]
    if executor.num_scheduled != num_steps * num_requests:
        raise RuntimeError(f"{executor.num_scheduled} instead of {num_steps} x {num_requests} requests were scheduled")
    return windows


def measure_arrivals(num_requests: int, *, num_windows: int, meter: Meter) -> list[Costs]:
    """Return what a request costs the host from its arrival to its only token, for windows of `num_requests`.

    They share `SHARED` tokens, which are in the cache, and arrive one after the other, each with `BLOCK_SIZE` tokens of
    its own. On a CPU.
    """
    max_len = SHARED + 2 * BLOCK_SIZE
    config = load("EngineConfig")(
        device="cpu", block_size=BLOCK_SIZE, max_model_len=max_len, max_num_seqs=2, max_num_batched_tokens=max_len
    ).resolve(max_len)
    executor = InstantExecutor(CPUInputs(config), num_blocks=4 * max_len // BLOCK_SIZE)
    core = metered_core(config, executor, meter)
    params, shared = load("SamplingParams")(temperature=0.0, max_tokens=1), [3] * SHARED
    requests = (
        load("Request")(str(index), array("q", shared + [4 + index] * BLOCK_SIZE), params)
        for index in itertools.count()
    )

    def arrive() -> None:
        core.add(next(requests))
        core.step()

    meter.window(arrive, 4)
    windows = [meter.window(arrive, num_requests) for _ in range(num_windows)]
    if executor.num_scheduled != 4 + num_windows * num_requests:
        raise RuntimeError(f"{executor.num_scheduled} steps: a request that arrives takes more than one")
    return windows


def windows_of(runner: str, num_requests: int, *, num_windows: int, meter: Meter) -> list[Costs]:
    """Return what each window costs, of `RUNNERS` or of arrivals."""
    if runner == ARRIVALS:
        return measure_arrivals(num_requests, num_windows=num_windows, meter=meter)
    return measure(runner, num_requests, num_windows=num_windows, meter=meter)


def measure_time(runner: str, num_requests: int, num_windows: int) -> Costs:
    """Return the microseconds of CPU time per step of the window that took least."""
    windows = windows_of(runner, num_requests, num_windows=num_windows, meter=cpu_time_meter())
    least = min(windows, key=lambda costs: sum(costs.values()))
    return {phase: nanoseconds / 1000 for phase, nanoseconds in least.items()}


def measure_calls(runner: str, num_requests: int, num_windows: int) -> Costs:
    """Return the calls of functions per step, over all windows; this script's own are not counted."""
    with call_meter(caller=_HERE) as meter:
        windows = windows_of(runner, num_requests, num_windows=num_windows, meter=meter)
    return {phase: sum(costs[phase] for costs in windows) / num_windows for phase in PHASES}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runners", default="cpu,gpu,arrivals")
    parser.add_argument("--requests", default="1,64,256")
    parser.add_argument("--windows", type=int, default=12, help=f"of {WINDOW} steps")
    parser.add_argument("--count-calls", action="store_true", help="count calls, and measure no time")
    options = parser.parse_args(arguments)
    import_module("torch").set_num_threads(1)
    gc.disable()
    measured = measure_calls if options.count_calls else measure_time
    cells: Cells = {
        runner: {count: measured(runner, int(count), options.windows) for count in options.requests.split(",")}
        for runner in options.runners.split(",")
    }
    package = Path(str(import_module("teachllm").__file__)).resolve().parent
    print(json.dumps({"package": str(package), "cells": cells}))


if __name__ == "__main__":
    main()
