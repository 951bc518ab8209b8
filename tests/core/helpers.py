"""Short ways to a scheduler, a request and a result, for tests that look at one step."""

from __future__ import annotations

from teachllm.config import EngineConfig
from teachllm.core import invariants
from teachllm.core.in_flight import RequestUpdate
from teachllm.core.request import Request
from teachllm.core.scheduler import Scheduler
from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from teachllm.sampling_params import SamplingParams

EOS = 0


def make_scheduler(num_blocks: int = 64, **settings: object) -> Scheduler:
    """Blocks of 4, sequences of up to 64 tokens, a budget of 64, 8 requests at once."""
    defaults: dict[str, object] = {
        "block_size": 4,
        "max_model_len": 64,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
    }
    config = EngineConfig(**(defaults | settings))  # type: ignore[arg-type]
    return Scheduler(config.resolve(64), num_blocks)


def make_request(name: str, num_prompt: int = 4, max_tokens: int | None = 8, first: int = 100, **fields) -> Request:
    """A prompt of `num_prompt` tokens from `first` on: prompts with the same `first` share a prefix."""
    params = fields.pop("params", None) or SamplingParams(max_tokens=max_tokens)
    prompt = list(range(first, first + num_prompt))
    return Request(name, prompt, params, eos_token_ids=frozenset([EOS]), **fields)


def add(scheduler: Scheduler, name: str, num_prompt: int = 4, **fields) -> Request:
    """Adds a request whose prompt nobody else has, unless `first` says otherwise."""
    fields.setdefault("first", 1000 * (1 + len(scheduler.requests) + 20 * scheduler.num_steps))
    request = make_request(name, num_prompt, **fields)
    scheduler.add(request)
    return request


def schedule(scheduler: Scheduler) -> SchedulerOutput:
    """The next plan, checked."""
    plan = scheduler.schedule()
    invariants.check_plan(scheduler, plan)
    invariants.check(scheduler)
    return plan


def update(scheduler: Scheduler, plan: SchedulerOutput, **sampled: list[int]) -> list[RequestUpdate]:
    """Gives a plan its result: what is named here, else token 7 for whoever samples."""
    tokens = [sampled.get(scheduled.request_id, [7] if scheduled.samples else []) for scheduled in plan.scheduled]
    updates = scheduler.update(plan, ModelRunnerOutput(tokens))
    invariants.check(scheduler)
    return updates


def step(scheduler: Scheduler, **sampled: list[int]) -> SchedulerOutput:
    """A whole step."""
    plan = schedule(scheduler)
    update(scheduler, plan, **sampled)
    return plan


def scheduled_tokens(plan: SchedulerOutput) -> dict[str, int]:
    """Return the number of scheduled tokens by request id."""
    return {scheduled.request_id: scheduled.num_tokens for scheduled in plan.scheduled}


def waits(scheduler: Scheduler) -> dict[str, str]:
    """Who waits, and why."""
    return {request.request_id: str(request.wait) for request in scheduler.waiting}
