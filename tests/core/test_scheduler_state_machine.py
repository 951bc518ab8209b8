"""Whatever happens to a scheduler, its books add up, no step reads foreign KV, and every output is the right one."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from teachllm.config import EngineConfig
from teachllm.core.request import FinishReason
from tests.core.world import Arrival, Setting, World
from tests.thorough import times


@st.composite
def make_settings(draw: st.DrawFn) -> Setting:
    """Everything that `EngineConfig` accepts, with pools from one request's need on."""
    length = draw(st.sampled_from([24, 48, 64]))
    keeps_cache = draw(st.integers(0, 7)) > 0
    chunked = draw(st.booleans())
    contiguous = draw(st.integers(0, 7)) == 0
    block_size = length if contiguous else draw(st.integers(1, 16))
    whole = not (keeps_cache and chunked)
    num_seqs = draw(st.sampled_from([6, 4, 3, 2, 1]))
    budget = draw(st.integers(length, length + 40)) if whole else draw(st.integers(num_seqs, 48))
    config = EngineConfig(
        max_model_len=length,
        block_size=block_size,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=budget,
        enable_kv_cache=keeps_cache,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=keeps_cache and not contiguous and draw(st.integers(0, 3)) > 0,
        long_prefill_token_threshold=0 if whole else draw(st.sampled_from([0, 0, 1, 5, 16])),
        scheduling_policy=draw(st.sampled_from(["fcfs", "fcfs", "priority", "static"])),
        async_scheduling=keeps_cache and draw(st.booleans()),
    )
    one = -(-length // block_size)
    return Setting(
        config=config.resolve(length),
        num_blocks=draw(st.integers(max(one - 2, 1), one + one // 4) | st.integers(one, 3 * one + 2)),
        max_in_flight=draw(st.integers(1, 4)),
        max_drafts=draw(st.sampled_from([0, 0, 1, 3])),
        seed=draw(st.integers(0, 255)),
    )


ARRIVALS = st.builds(
    Arrival,
    family=st.integers(0, 2),
    shared=st.integers(1, 40),
    tail=st.sampled_from([(), (), (3,), (2, 5, 2)]),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    max_tokens=st.sampled_from([1, 5, 9, 24, 24, 24, None]),
    min_tokens=st.sampled_from([0, 0, 1]),
    priority=st.integers(-1, 1),
    salt=st.sampled_from([None, None, None, "a"]),
    waits_for_ids=st.sampled_from([False, False, False, True]),
    prompt_logprobs=st.sampled_from([False, False, False, False, True]),
    stops=st.booleans(),
    ignore_eos=st.booleans(),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps, failures and aborts in any order; `World` checks after each of them."""

    world: World
    broken = False

    @initialize(setting=make_settings(), arrivals=st.lists(ARRIVALS, min_size=2, max_size=5))
    def start(self, setting: Setting, arrivals: list[Arrival]) -> None:
        self.world = World(setting)
        for arrival in arrivals:
            self._do(self.world.add, arrival)

    def _do(self, call, *arguments) -> None:
        self.broken = True
        call(*arguments)
        self.broken = False

    @rule(arrival=ARRIVALS)
    def add(self, arrival: Arrival) -> None:
        self._do(self.world.add, arrival)

    @rule(count=st.integers(1, 16))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self._do(self.world.step)

    @rule()
    def schedule(self) -> None:
        if not self.world.is_full:
            self._do(self.world.schedule)

    @rule()
    def retire(self) -> None:
        self._do(self.world.retire)

    @rule(how=st.integers(1, 2))
    def fail(self, how: int) -> None:
        if not self.world.is_full:
            self._do(self.world.schedule, how)

    @rule(index=st.integers(0, 9), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    def finish(self, index: int, reason: FinishReason) -> None:
        self._do(self.world.finish, index, reason)

    @rule(now=st.sampled_from([False, False, False, True]))
    def reset_prefix_cache(self, now: bool) -> None:
        if now:  # too often, and nothing would ever be found in it
            self._do(self.world.reset_prefix_cache)

    def teardown(self) -> None:
        if not self.broken and hasattr(self, "world"):
            self.world.drain()


SchedulerMachine.TestCase.settings = settings(
    max_examples=times(60, 4000), stateful_step_count=16, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSchedulerMachine = pytest.mark.slow(SchedulerMachine.TestCase)
