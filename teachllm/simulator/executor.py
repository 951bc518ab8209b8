"""The pretended device: plans in, made-up token ids out, and two places in time.

    host    schedule | launch |        schedule | launch | wait ... | update
    device                    | step 0 ................. | step 1 ..........

The clock is the host's: it passes while the host schedules, launches and updates, and jumps when the host waits for the
device. The device begins a step when it has been launched and the step before is done. So asynchronous scheduling
gains here what it gains on a GPU, for the same reason. A launch is over before its step begins: on a GPU the first
kernels of a long step run while the later ones are launched, which is not counted.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

from teachllm.config import EngineConfig
from teachllm.core.in_flight import RequestUpdate
from teachllm.core.scheduler import Scheduler
from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from teachllm.engine.overrides import NO_OVERRIDES, EngineOverrides
from teachllm.simulator.cost_model import CostModel

# How schedule, launch and update share the host's time is not measured; scheduling 256 decodes takes about a third.
_HOST_PART = 1 / 3


@dataclass(slots=True)
class VirtualClock:
    """Seconds since a simulation began, as the host sees them; they pass only when told to."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def wait_until(self, time: float) -> None:
        """Nothing happens if it is later already."""
        self.now = max(self.now, time)


class HostScheduler(Scheduler):
    """The engine's scheduler, unchanged but for the time that its work takes on the simulated host."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        clock: VirtualClock,
        cost: CostModel,
        overrides: EngineOverrides = NO_OVERRIDES,
    ) -> None:
        super().__init__(config, num_blocks, **overrides.given("policy", "make_pool", "hash_block"))
        self._clock, self._cost = clock, cost

    def schedule(self) -> SchedulerOutput:
        plan = super().schedule()
        if plan.scheduled:
            self._clock.advance(_HOST_PART * self._cost.host_seconds(plan))
        return plan

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestUpdate]:
        self._clock.advance(_HOST_PART * self._cost.host_seconds(plan))
        return super().update(plan, result)


class SimulatedExecutor:
    """The `Executor` protocol without tensors.

    Args:
        num_blocks: KV blocks that the device has.
        clock: the host's.
        vocab_size, eos_token_ids: of the model; no end-of-sequence id is ever sampled. Drafts are never accepted.

    Raises:
        ValueError: every id of the vocabulary ends a sequence.
    """

    max_in_flight = 1
    sentinel: int | None = None

    def __init__(
        self,
        num_blocks: int,
        cost: CostModel,
        clock: VirtualClock,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.num_blocks = num_blocks
        self._cost, self.clock = cost, clock
        self._token_ids = [token_id for token_id in range(vocab_size) if token_id not in eos_token_ids]
        if not self._token_ids:
            raise ValueError(f"all of the {vocab_size} token ids end a sequence: give a model with a larger vocabulary")
        self._idle_from = 0.0  # when the device has done all that it was told to do

    def execute(self, plan: SchedulerOutput) -> Any:
        self.clock.advance(_HOST_PART * self._cost.host_seconds(plan))
        seconds = self._cost.device_seconds(plan)
        self._idle_from = max(self._idle_from, self.clock.now) + seconds
        return _SimulatedOutput(self, plan, self._idle_from, seconds)

    def sample(self, handle: Any) -> _SimulatedOutput:
        output: _SimulatedOutput = handle
        return output

    def close(self) -> None:
        pass

    def token_id(self, request_id: str, index: int) -> int:
        """The id at `index` of a request's sequence, should it be sampled: the same whenever it is asked for."""
        return self._token_ids[zlib.crc32(f"{request_id} {index}".encode()) % len(self._token_ids)]


@dataclass(frozen=True, slots=True)
class _SimulatedOutput:
    """A step under way on the device, done at `done`."""

    executor: SimulatedExecutor
    plan: SchedulerOutput
    done: float
    seconds: float

    def result(self) -> ModelRunnerOutput:
        self.executor.clock.wait_until(self.done)
        ids = [
            [
                self.executor.token_id(
                    scheduled.request_id, scheduled.start + scheduled.num_tokens - len(scheduled.draft_token_ids)
                )
            ]
            if scheduled.samples
            else []
            for scheduled in self.plan.scheduled
        ]
        return ModelRunnerOutput(ids, seconds=self.seconds)
