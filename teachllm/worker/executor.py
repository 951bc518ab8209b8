"""Executors: where a plan is carried out. Here, in this process; elsewhere by the same two calls.

`execute` starts a step and returns at once if the device works on its own; `sample` continues it and returns
something whose `result()` waits for the token ids. The engine may hold several such results before it asks.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from teachllm.worker.model_runner import ExecutedStep, ModelRunner


class PendingOutput(Protocol):
    def result(self) -> ModelRunnerOutput:
        """Waits for the step's output."""


class Executor(Protocol):
    """What the engine needs of whatever computes.

    Attributes:
        num_blocks: KV blocks it has.
        max_in_flight: plans it can work on at once (pipeline stages); 1 for a single device.
    """

    num_blocks: int
    max_in_flight: int

    def execute(self, plan: SchedulerOutput) -> Any:
        """Starts the forward pass of a plan; the handle goes to `sample`."""

    def sample(self, handle: Any) -> PendingOutput:
        """Samples from a started step."""

    def close(self) -> None:
        """Gives back memory and processes."""


def select_device(name: str) -> torch.device:
    """The device for a setting; "auto" is the CPU as long as there are no kernels for anything else.

    Raises:
        ValueError: torch does not know the name, or this machine has no such device.
    """
    try:
        device = torch.device("cpu" if name == "auto" else name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r}: use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r}: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name!r}: this machine has {torch.cuda.device_count()} CUDA devices; use device=cpu")
    return device


class _Ready:
    """An output that is already there."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def result(self) -> ModelRunnerOutput:
        return self._output


class InProcessExecutor:
    """Runs the model in this process; every call finishes before it returns."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner: ModelRunner | None = runner
        self.num_blocks = runner.memory.num_blocks
        self.max_in_flight = 1

    def execute(self, plan: SchedulerOutput) -> ExecutedStep:
        return self._open().execute(plan)

    def sample(self, handle: ExecutedStep) -> PendingOutput:
        return _Ready(self._open().sample(handle))

    def close(self) -> None:
        self._runner = None

    def _open(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("the engine is closed")
        return self._runner
