"""Find how many equal requests run at once without one waiting for blocks or losing them.

Each needs the most blocks at its end, but not all reach it together: the token budget staggers the prompts, and who
came first leaves its blocks to who came last. So the number is not worked out but tried, by the engine's own loop and
scheduler, with an executor that computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from teachllm.config import EngineConfig
from teachllm.core.request import Request, WaitReason
from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from teachllm.engine.engine_core import EngineCore
from teachllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class _Token:
    """A plan's result: some token for whoever samples."""

    plan: SchedulerOutput

    def result(self) -> ModelRunnerOutput:
        return ModelRunnerOutput([[0] if scheduled.samples else [] for scheduled in self.plan.scheduled])


class _NoExecutor:
    """Has blocks and computes nothing."""

    max_in_flight = 1
    sentinel: int | None = None

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def execute(self, plan: SchedulerOutput) -> SchedulerOutput:
        return plan

    def sample(self, step: SchedulerOutput) -> _Token:
        return _Token(step)

    def close(self) -> None:
        pass


def runs_undisturbed(config: EngineConfig, num_blocks: int, num_requests: int, input_len: int, output_len: int) -> bool:
    """Return whether requests that arrive together run with none preempted and none waiting for blocks.

    Args:
        config: resolved.
        input_len, output_len: tokens of each; prompts share nothing.
    """
    core = EngineCore(replace(config, enable_prefix_caching=False, check_invariants=False), _NoExecutor(num_blocks))
    params = SamplingParams(max_tokens=output_len, ignore_eos=True)
    for index in range(num_requests):
        core.add(Request(str(index), [0] * input_len, params, eos_token_ids=frozenset()))
    while core.has_unfinished:
        core.step()
        head = core.scheduler.waiting.head
        if core.scheduler.num_preemptions:
            return False
        if head is not None and head.wait is not None and head.wait.reason is WaitReason.NO_FREE_BLOCKS:
            return False
    return True


def num_undisturbed(config: EngineConfig, num_blocks: int, input_len: int, output_len: int) -> int:
    """Return the most requests for which `runs_undisturbed` holds, no more than `max_num_seqs`.

    Raises:
        ValueError: one alone is longer than `max_model_len`.
    """
    assert config.max_model_len and config.max_num_seqs
    length, limit = input_len + output_len, config.max_num_seqs
    if min(input_len, output_len) < 1 or length > config.max_model_len:
        raise ValueError(
            f"input_len={input_len} and output_len={output_len} make {length} tokens, and max_model_len is "
            f"{config.max_model_len}: each must be at least 1, and both together no more than that"
        )
    per_request = -(-length // config.block_size)
    good = min(num_blocks // per_request, limit)  # every one of them can have all it will ever need
    too_many, stride = limit + 1 if good else 1, 1
    while too_many - good > 1:
        probe = min(good + stride, too_many - 1)
        if runs_undisturbed(config, num_blocks, probe, input_len, output_len):
            good, stride = probe, 2 * stride
        else:
            too_many, stride = probe, max((probe - good) // 2, 1)
    return good
