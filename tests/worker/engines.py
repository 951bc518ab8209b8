"""Short ways to an engine of a tiny checkpoint, and an executor that fails where it is told to."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from teachllm import LLM, EngineConfig, RequestOutput, SamplingParams
from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from teachllm.engine.llm_engine import Engine
from teachllm.spec_decode.drafter import Drafter
from teachllm.trace.recorder import Recorder
from teachllm.worker.executor import Executor
from teachllm.worker.runner import PendingOutput
from tests.checkpoints import VOCAB_SIZE
from tests.engine.reference import reference

MakeExecutor = Callable[[EngineConfig, Executor], Executor]
# What requests ask for and other processes must be told. The last has no seed: its noise depends on all requests that
# its engine had before, so only new engines draw the same.
VARIED = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(n=3, seed=2**70 + 3, max_tokens=9, logprobs=2, prompt_logprobs=1),
    SamplingParams(seed=-5, max_tokens=9, logit_bias={3: 2.5}, min_tokens=4, allowed_token_ids=range(40)),
    SamplingParams(max_tokens=9, temperature=0.7, top_k=20, repetition_penalty=1.2, stop_token_ids=[7]),
]


def tiny(name: str = "qwen3", **changes: Any) -> dict[str, Any]:
    """Settings for a tiny checkpoint: blocks of 16, sequences of up to 96 tokens, token ids only."""
    defaults: dict[str, Any] = {
        "model": reference(name).path,
        "dtype": "float32",
        "device": "cpu",
        "skip_tokenizer_init": True,
        "max_model_len": 96,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 120,
        "check_invariants": True,
    }
    return defaults | changes


def make_llm(name: str = "qwen3", **changes: Any) -> LLM:
    return LLM(**tiny(name, **changes))


def make_engine(
    name: str = "qwen3",
    make_executor: MakeExecutor | None = None,
    recorder: Recorder | None = None,
    drafter: Drafter | None = None,
    **changes: Any,
) -> Engine:
    return Engine(
        EngineConfig(**tiny(name, **changes)), make_executor=make_executor, recorder=recorder, drafter=drafter
    )


def random_ids(length: int, seed: int = 0) -> list[int]:
    """A prompt of a tiny checkpoint's vocabulary."""
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def drain(engine: Engine, max_steps: int = 2000) -> dict[str, RequestOutput]:
    """Steps until nothing is left; the outputs that changed, by request id."""
    outputs: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests:
            return outputs
        outputs |= {output.request_id: output for output in engine.step()}
    raise AssertionError("no progress")


def complete(engine: Engine, prompt: Any, params: SamplingParams, **arguments: Any) -> RequestOutput:
    """Run one request, alone."""
    output = engine.add_request("r", prompt, params, **arguments)
    drain(engine)
    return output


def assert_clean(engine: Engine) -> None:
    """Run what is left, and look for what is kept of requests that have ended."""
    drain(engine)
    assert num_used_blocks(engine) == 0 and not engine.core.scheduler.requests
    assert not engine._outputs._children and not engine._outputs._ids and not engine._outputs._taken


def tokens(output: RequestOutput) -> list[list[int]]:
    """The token ids of every completion."""
    return [completion.token_ids for completion in output.outputs]


def num_used_blocks(engine: Engine) -> int:
    return engine.core.scheduler.kv.num_used_blocks


class FaultyExecutor:
    """Wraps an executor; `fault` is asked at every point where one could fail, and what it returns is raised."""

    POINTS = ("before execute", "after execute", "before sample", "after sample", "result")

    def __init__(self, inner: Executor, fault: Callable[[str], BaseException | None]) -> None:
        self._inner = inner
        self._fault = fault
        self.num_blocks, self.max_in_flight = inner.num_blocks, inner.max_in_flight

    def execute(self, plan: SchedulerOutput) -> Any:
        self.pass_by("before execute")
        handle = self._inner.execute(plan)
        self.pass_by("after execute")
        return handle

    def sample(self, handle: Any) -> PendingOutput:
        self.pass_by("before sample")
        pending = self._inner.sample(handle)
        self.pass_by("after sample")
        return _FaultyOutput(pending, self)

    def close(self) -> None:
        self._inner.close()

    def pass_by(self, point: str) -> None:
        error = self._fault(point)
        if error is not None:
            raise error


class _FaultyOutput:
    def __init__(self, inner: PendingOutput, executor: FaultyExecutor) -> None:
        self._inner = inner
        self._executor = executor

    def result(self) -> ModelRunnerOutput:
        self._executor.pass_by("result")
        return self._inner.result()


class DraftingExecutor:
    """Wraps an executor and proposes drafts.

    Args:
        guess: drafts, given a request's id and how many output tokens it has, those of this step included.
    """

    def __init__(self, inner: Executor, guess: Callable[[str, int], list[int]]) -> None:
        self._inner = inner
        self._guess = guess
        self._num_outputs: dict[str, int] = {}
        self.num_blocks, self.max_in_flight = inner.num_blocks, inner.max_in_flight
        self.num_accepted = self.num_rejected = 0

    def execute(self, plan: SchedulerOutput) -> Any:
        for scheduled in plan.scheduled:
            if scheduled.new_row is not None:
                self._num_outputs[scheduled.request_id] = (
                    len(scheduled.new_row.token_ids) - scheduled.new_row.num_prompt_tokens
                )
        return plan, self._inner.execute(plan)

    def sample(self, handle: Any) -> PendingOutput:
        plan, inner = handle
        pending = self._inner.sample(inner)
        output = pending.result()
        output.draft_token_ids = []
        for scheduled, sampled in zip(plan.scheduled, output.sampled_token_ids, strict=True):
            if scheduled.samples:
                self.num_accepted += len(sampled) - 1
                self.num_rejected += len(scheduled.draft_token_ids) + 1 - len(sampled)
            self._num_outputs[scheduled.request_id] += len(sampled)
            output.draft_token_ids.append(self._guess(scheduled.request_id, self._num_outputs[scheduled.request_id]))
        return pending

    def close(self) -> None:
        self._inner.close()
