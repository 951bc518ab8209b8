"""Executors: where a plan is carried out. Here, in this process; elsewhere by the same two calls.

`execute` starts a step and returns at once if the device works on its own; `sample` continues it and returns
something whose `result()` waits for the token ids. The engine may hold several such results before it asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol

from teachllm.core.scheduler_output import SchedulerOutput
from teachllm.spec_decode.step_times import Prior
from teachllm.worker.runner import PendingOutput, Runner, Step


class Executor(Protocol[Step]):
    """Define what the engine needs of whatever computes. `Step` is the executor's own type of a started step.

    Attributes:
        num_blocks: KV blocks it has.
        max_in_flight: plans it can work on at once (pipeline stages); 1 for a single device.
        sentinel: a descriptor that is readable once what computes has died; None: it dies with this process.
    """

    num_blocks: int
    max_in_flight: int
    sentinel: int | None

    def execute(self, plan: SchedulerOutput) -> Step:
        """Start the forward pass of a plan; what is returned goes to `sample`."""

    def sample(self, step: Step) -> PendingOutput:
        """Sample from a started step."""

    def close(self) -> None:
        """Give back memory and processes."""


class InProcessExecutor(Generic[Step]):
    """Runs the model in this process. On a CPU every call finishes before it returns; a GPU is only told what to do."""

    def __init__(self, runner: Runner[Step]) -> None:
        self._runner: Runner[Step] | None = runner
        self.num_blocks = runner.memory.num_blocks
        self.max_in_flight = 1
        self.sentinel: int | None = None

    def prepare(self, sizes: Sequence[int], is_adaptive: bool) -> Prior | None:
        """Do the same as `Runner.prepare`."""
        return self._open().prepare(sizes, is_adaptive)

    def execute(self, plan: SchedulerOutput) -> Step:
        return self._open().execute(plan)

    def sample(self, step: Step) -> PendingOutput:
        return self._open().sample(step)

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._runner = None

    def _open(self) -> Runner[Step]:
        if self._runner is None:
            raise RuntimeError("the engine is closed")
        return self._runner
