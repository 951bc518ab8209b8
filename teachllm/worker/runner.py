"""The runner contract: what carries out a rank's plans, on whatever device.

A runner has one rank's model, KV cache and request rows. `execute` and `sample` are two calls because what happens
between them, such as a grammar's mask, may take as long as the forward pass. A device that works on its own is only
told what to do by both; the host waits in `PendingOutput.result`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from teachllm.core.memory import MemoryPlan
from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from teachllm.models.base import Model
from teachllm.spec_decode.step_times import Prior

Step = TypeVar("Step")


class PendingOutput(Protocol):
    """A step's output, which may still be on its way."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step's output and return it."""


class ReadyOutput:
    """An output that is already there."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def result(self) -> ModelRunnerOutput:
        """Return the output at once."""
        return self._output


class Runner(Protocol[Step]):
    """One rank's model, KV cache and rows. `Step` is the runner's own type of a step between forward and sampling.

    Attributes:
        model: this rank's part.
        memory: what its memory holds, KV blocks among it.
    """

    model: Model
    memory: MemoryPlan

    def prepare(self, sizes: Sequence[int], is_adaptive: bool) -> Prior | None:
        """Prepare the steps of an engine that speculates, before the first request.

        Args:
            sizes: numbers of drafts per request that steps may verify, as in `AdaptiveLength`.
            is_adaptive: their number adapts to what steps cost, so steps are timed.

        Returns:
            What steps cost here; None if nothing was timed.
        """

    def observe(self, is_on: bool) -> None:
        """Start, or stop, adding to outputs what a trace records: seconds of a device's step, tokens per expert."""

    def execute(self, plan: SchedulerOutput) -> Step:
        """Run or launch the forward pass of a plan."""

    def sample(self, step: Step) -> PendingOutput:
        """Sample from an executed step, or launch that."""

    def execute_dummy_step(self) -> None:
        """Compute an empty step, for replicas that share this rank's experts and have tokens."""

    def receive_sampled_tokens(self, step: int, sampled_token_ids: Sequence[Sequence[int]]) -> None:
        """Receive, on other stages, what the last stage sampled in a step, before the first plan made with it."""

    def close(self) -> None:
        """Free what outlives the last reference to the runner."""
