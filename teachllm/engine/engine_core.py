"""The engine's core (lesson 09): one loop that schedules, computes, samples and updates. Token ids in, token ids out.

    plain    schedule -> execute -> sample -> update
    ahead    schedule -> execute -> sample ............ (the device works)
                 schedule -> execute -> sample ........ its successor, made before its tokens are known
             update (the first)

Both are the same four calls; with `async_scheduling` an update is one step late, so that the device never waits
for the host. Text stays outside: `engine.py` puts tokenizer and stop strings around this.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from teachllm.config import EngineConfig
from teachllm.core import invariants
from teachllm.core.in_flight import RequestUpdate
from teachllm.core.request import FinishReason, Request
from teachllm.core.scheduler import Scheduler
from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from teachllm.core.step_budget import StepBudget
from teachllm.engine.host_drafting import HostDrafting
from teachllm.engine.observability.engine_clock import EngineClock
from teachllm.engine.observability.stats import StepCounter, StepStats
from teachllm.engine.observability.step_roofline import StepRoofline
from teachllm.engine.observability.step_traffic import StepTraffic
from teachllm.engine.overrides import NO_OVERRIDES, EngineOverrides
from teachllm.roofline import Work
from teachllm.spec_decode.draft_length import AdaptiveLength, FixedLength, StepCost
from teachllm.trace.recorder import Recorder, StepTimestamps
from teachllm.worker.executor import Executor
from teachllm.worker.runner import PendingOutput


class EngineCore:
    """Scheduler and executor, joined.

    Args:
        config: resolved for the model.
        cache_root: digest of what decides all KV, see `core.prefix_cache.hash_root`.
        recorder: writes a trace; None costs nothing.
        roofline: what a trace says of each step's work.
        traffic: what it says that ranks have to send; None: there is one.
        clock: seconds; arrival times are on it. None is the recorder's, or `time.perf_counter`.
        scheduler: in place of one of its own.
        drafter: one that reads token ids here; requests wait for theirs, then.
        draft_length: how far a drafter goes, here or in the executor; None: there is none.
        on_close: called when it has been closed.
        overrides: its scheduler's, and its loop's.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor[Any],
        cache_root: bytes = b"",
        recorder: Recorder | None = None,
        clock: Callable[[], float] | None = None,
        roofline: StepRoofline | None = None,
        scheduler: Scheduler | None = None,
        on_close: Callable[[], None] | None = None,
        drafter: HostDrafting | None = None,
        draft_length: FixedLength | AdaptiveLength | None = None,
        traffic: StepTraffic | None = None,
        overrides: EngineOverrides = NO_OVERRIDES,
    ) -> None:
        self.config = config
        self._drafter, self._draft_length = drafter, draft_length
        own = overrides.given("policy", "make_pool", "hash_block")
        self.scheduler = scheduler or Scheduler(
            config, executor.num_blocks, cache_root, draft_length=draft_length, **own
        )
        speculation, self._step_budget = config.speculative_config, None
        self._decode_len = 1 if speculation is None else 1 + speculation.max_drafts
        if config.max_step_ms is not None:
            self._step_budget = StepBudget(self.scheduler.max_num_batched_tokens, config.max_step_ms / 1000)
        self._turn = overrides.turn or EngineCore.turn
        self.executor = executor
        self.recorder = recorder
        self.clock = clock or (time.perf_counter if recorder is None else recorder.clock)
        self._roofline, self._traffic = roofline, traffic
        self._on_close = on_close or (lambda: None)
        self._counter: StepCounter | None = None
        self._last_arrived = 0.0
        self._check = config.check_invariants
        # Steps under way while the next is made: one for each further stage, one to run ahead.
        self.num_ahead = executor.max_in_flight - 1 + bool(config.async_scheduling)
        self._pending: deque[tuple[SchedulerOutput, PendingOutput, StepTimestamps, Work | None]] = deque()
        if recorder is not None:
            self.scheduler.kv.record_events()

    def add(self, request: Request) -> None:
        """Add a request to the queue.

        Raises:
            ValueError: it can never run; the message has the numbers.
        """
        request.waits_for_ids |= self._drafter is not None
        self.scheduler.add(request)
        if self.recorder is not None:
            try:
                self.recorder.arrival(request)
            except BaseException:
                self.scheduler.finish(request.request_id, FinishReason.ABORT)
                raise

    def finish(self, request_id: str, reason: FinishReason, stop_reason: str | int | None = None) -> bool:
        """End a request now: an abort, or a stop string found in its text. Return False if it has ended already."""
        ended = self.scheduler.finish(request_id, reason, stop_reason)
        if ended and self.recorder is not None:
            self.recorder.end(request_id, reason, self.scheduler)
        return ended

    def reset_prefix_cache(self) -> None:
        """Forget the content of every block that no request holds."""
        self.scheduler.kv.reset_prefix_cache()

    def count(self) -> None:
        """Start counting, for `stats`."""
        self._counter = StepCounter()

    def stats(self) -> StepStats | None:
        """Return the state, and what was counted since the last call; None unless `count` was called."""
        return None if self._counter is None else self._counter.take(self.scheduler)

    @property
    def num_blocks(self) -> int:
        """Return how many blocks the KV cache has."""
        return self.executor.num_blocks

    @property
    def draft_step_cost(self) -> StepCost | None:
        """Return what a step with drafts takes; None until both kinds have been timed."""
        return None if self._draft_length is None else self._draft_length.step_cost()

    @property
    def unfinished_ids(self) -> list[str]:
        return list(self.scheduler.requests)

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._pending)

    def step(self) -> list[RequestUpdate]:
        """Run one turn of the loop.

        Returns:
            What changed, for the step whose tokens arrived: this one, or with `async_scheduling` the one before.

        Raises:
            Exception: whatever the executor raised. The step is taken back and its requests queue again, so the
                caller may abort them or try again.
        """
        return self._turn(self)

    def turn(self) -> list[RequestUpdate]:
        """Launch a step; take the oldest step's tokens if too many are under way, or no request can go on without."""
        launched = self.launch()
        if self.num_pending > self.num_ahead or (self.num_pending and not launched):
            return self.collect()
        return []

    @property
    def num_pending(self) -> int:
        """Count the steps that are launched and whose tokens have not been asked for."""
        return len(self._pending)

    def launch(self) -> bool:
        """Plan a step and have it started; return False if no request can compute anything now."""
        start = self.clock()
        if self._step_budget is not None:
            num_decodes = sum(request.num_uncomputed_tokens <= 1 for request in self.scheduler.running)
            self.scheduler.max_num_batched_tokens = self._step_budget.tokens(num_decodes * self._decode_len)
        plan = self.scheduler.schedule()
        if self._check:
            invariants.check_plan(self.scheduler, plan)
        scheduled = self.clock()
        self._admit(plan, scheduled)
        if plan.scheduled:
            try:
                output = self.executor.sample(self.executor.execute(plan))
                times = StepTimestamps(start, scheduled - start, self.clock() - scheduled, 0.0, 0.0, 0.0)
                self._pending.append((plan, output, times, self._work(plan)))
                self.scheduler.kv.commit_all()  # while the device works; the next `schedule` would do it
            except BaseException as error:
                self._take_back(plan, error)
                raise
        return bool(plan.scheduled)

    def execute_dummy_step(self) -> None:
        """Run an empty step, which other replicas take: they share experts with this one, which has nothing to compute.

        Raises:
            EngineDeadError: a process has ended, or the step failed.
        """
        began = self.clock()
        result = self.executor.sample(self.executor.execute(SchedulerOutput(self.scheduler.num_steps))).result()
        if self.recorder is not None:
            self._place_in_time(result.ranks or [])
            self.recorder.write("serve", time=began, end=self.clock(), ranks=result.ranks)

    def collect(self) -> list[RequestUpdate]:
        """Wait for the oldest step's tokens and take them over."""
        plan, output, times, work = self._pending[0]
        asked = self.clock()
        try:
            result = output.result()
        except BaseException as error:
            self._take_back(plan, error)
            raise
        arrived = self.clock()
        self._pending.popleft()
        if self._traffic is not None and result.ranks is not None:
            self._place_in_time(result.ranks)
            for told, expected in zip(result.ranks, self._traffic.expected(plan, self.scheduler.requests), strict=True):
                told["expected"] = expected
        updates = self.scheduler.update(plan, result)
        if self._drafter is not None:
            self._drafter.propose(updates)
        if self._draft_length is not None or self._step_budget is not None:
            seconds = self.clock() - max(self._last_arrived, times.time)
            if self._draft_length is not None:
                self._draft_length.time(plan, seconds)
            if self._step_budget is not None:
                self._step_budget.time(plan, seconds)
        self._last_arrived = self.clock()
        if self._counter is not None:
            self._counter.step(plan, updates)
        if self._check:
            invariants.check(self.scheduler)
        if self.recorder is not None:
            end = self.clock()
            times = times._replace(wait=arrived - asked, update=end - arrived, end=end)
            of_worker = ("graph_mode", "expert_load", "ranks")
            more: dict[str, Any] = {name: getattr(result, name) for name in of_worker}
            if self._roofline is not None and work is not None:
                more["roofline"] = self._roofline.verdict(
                    work, _seconds_of(result, times, share_clock=self.config.nnodes == 1)
                )
            self.recorder.step(plan, updates, self.scheduler, times, **more)
        return updates

    def wait_for_pending(self) -> None:
        """Wait until all steps under way are computed. `collect` takes them, or raises what they raised, later."""
        self._pending = deque((plan, _Computed.of(output), times, work) for plan, output, times, work in self._pending)

    def _place_in_time(self, ranks: list[dict[str, Any]]) -> None:
        """Put the ranks, which go by `time.perf_counter`, on the engine's clock."""
        if isinstance(self.clock, EngineClock):
            for told in ranks:
                told["begin"], told["end"] = self.clock.at(told["begin"]), self.clock.at(told["end"])

    def _admit(self, plan: SchedulerOutput, now: float) -> None:
        """Mark the requests that a plan names for the first time."""
        for scheduled in plan.scheduled:
            if scheduled.new_row is not None:
                request = self.scheduler.requests[scheduled.request_id]
                if request.first_scheduled_time is None:
                    request.first_scheduled_time = now
                    if self._counter is not None:
                        self._counter.admit(request, self.scheduler.kv.looks_up(request))

    def _work(self, plan: SchedulerOutput) -> Work | None:
        """Return what a plan that is under way costs at least, if that is observed."""
        if self.recorder is None or self._roofline is None:
            return None
        kv = self.scheduler.kv
        return self._roofline.work(plan, kv.num_used_blocks * kv.block_size)

    def _take_back(self, plan: SchedulerOutput, error: BaseException) -> None:
        """Drop a failed step and all steps whose results have not been taken, since any may rest on another."""
        oldest = self._pending[0][0] if self._pending else plan
        try:
            for _, output, _, _ in self._pending:  # a device may still read what the next plan would write over
                with contextlib.suppress(Exception):
                    output.result()
        finally:  # Ctrl-C may come twice
            self._pending.clear()
            self.scheduler.fail(oldest)
            if self.recorder is not None:
                self.recorder.error(error, self.scheduler)

    def close(self) -> None:
        self.executor.close()
        self._on_close()


@dataclass(frozen=True, slots=True)
class _Computed:
    """The output of a step that has been waited for."""

    output: ModelRunnerOutput | None
    error: Exception | None

    @classmethod
    def of(cls, step: PendingOutput) -> _Computed:
        try:
            return cls(step.result(), None)
        except Exception as error:
            return cls(None, error)

    def result(self) -> ModelRunnerOutput:
        if self.output is None:
            assert self.error is not None
            raise self.error
        return self.output


def _seconds_of(result: ModelRunnerOutput, times: StepTimestamps, share_clock: bool) -> float:
    """Return how long a step was computed: by the device's clock, or by its ranks'; else until the calls return.

    Args:
        share_clock: the ranks are on one machine. Clocks of several machines have nothing in common, and the step
            counts as long as its longest rank.
    """
    if result.seconds:
        return result.seconds
    if result.ranks and all(told["end"] > told["begin"] for told in result.ranks):  # a device may have no time to tell
        if share_clock:
            return float(max(told["end"] for told in result.ranks) - min(told["begin"] for told in result.ranks))
        return float(max(told["end"] - told["begin"] for told in result.ranks))
    return times.execute + times.wait


def describe(config: EngineConfig) -> dict[str, Any]:
    """Describe a configuration as the trace's header carries it: plain JSON, which `EngineConfig` takes again."""
    settings = {name: getattr(config, name) for name in config.__dataclass_fields__}
    speculation = config.speculative_config
    return settings | {"speculative_config": None if speculation is None else asdict(speculation)}
