"""A fork: from any step of a trace on, a second engine with other settings goes on with the same requests.

    the trace      step 0 ... step k | step k + 1 ...
    the fork                         | step k + 1 ...    another budget, block size, pool, policy

Live requests keep their tokens, their noise and their order. What the cache held of them is computed again before the
fork's time begins, untraced, in blocks newly laid out. So free blocks that had kept content are empty, and what no
longer fits, in the pool or among those that may run at once, begins as preempted. Greedy tokens are the same on both
sides, for no setting changes them.

The fork's trace is a trace like any other: a header, the live requests' arrivals, and a `fork` line that says how far
they had come and where their blocks are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from teachllm.config import EngineConfig
from teachllm.core.request import Request, RequestStatus, WaitReason
from teachllm.core.scheduler import Scheduler
from teachllm.core.scheduler_output import NewRow, ScheduledRequest, SchedulerOutput
from teachllm.engine.llm_engine import Engine
from teachllm.engine.observability.engine_clock import EngineClock
from teachllm.sampling_params import SamplingParams
from teachllm.trace.recorder import Recorder, waiting_of
from teachllm.trace.replay import Replay, RequestState

BEFORE = -1  # the step of what is computed before the fork's first


def fork_config(header: Mapping[str, Any], **changes: Any) -> EngineConfig:
    """Return the settings of a trace's engine, some of them changed.

    The pool stays as large as it was, in tokens, unless `num_gpu_blocks_override` is among the changes. A change of
    `load_format` holds for a draft model, too.

    Raises:
        ValueError: they contradict each other, there is no such setting, or the drafter was Python code.
    """
    try:
        EngineConfig(**changes)
    except TypeError as error:
        raise ValueError(f"a setting is not known or not of its kind: {error}") from error
    names = {field.name for field in fields(EngineConfig)}
    settings = {name: value for name, value in header["config"].items() if name in names}
    num_slots = header["num_blocks"] * settings["block_size"]
    block_size = changes.get("block_size", settings["block_size"])
    settings |= {"num_gpu_blocks_override": max(num_slots // block_size, 1), "trace_path": None}
    settings["data_parallel_size"] = 1  # a trace is one replica's
    if settings.get("tensor_parallel_size", 1) == 1:
        settings["enable_expert_parallel"] = False  # they were spread over replicas
    speculation = settings.get("speculative_config")
    if isinstance(speculation, dict) and "load_format" in changes:
        settings["speculative_config"] = speculation | {"load_format": None}
    config = EngineConfig(**settings | changes)
    if config.speculative_config is not None and config.speculative_config.drafts_on_host:
        raise ValueError(
            'the drafter of this trace was an object in its engine\'s process (speculative method "custom"), which no '
            "trace holds: fork with speculative_config=None"
        )
    return config


def fork(state: Replay, config: EngineConfig, sink: Callable[[str], None], at: float) -> Engine:
    """Start a second engine, which goes on from a state of the first.

    Args:
        state: of a trace with token ids.
        config: see `fork_config`.
        sink: gets the fork's trace.
        at: the time at which the fork begins, on the trace's clock.

    Raises:
        ValueError: the settings are refused, a live request can never fit, or the trace has no token ids.
    """
    live = [request for request in state.requests.values() if request.is_live]
    if any("prompt_token_ids" not in request.arrival for request in live):
        raise ValueError("the trace has no token ids (--trace-no-text), so nothing can go on from it")
    clock = EngineClock(at)
    clock.hold()

    def text(token_ids: Sequence[int], request: Request | None = None) -> list[str]:
        return engine.trace_texts(token_ids, request)

    engine: Engine = Engine(config, recorder=Recorder(sink, clock, text))
    try:
        _go_on(engine, state, live, at)
    except BaseException:
        engine.close()
        raise
    clock.go_on()
    return engine


def arrived_params(arrival: Mapping[str, Any]) -> SamplingParams:
    """Return what an arrival's line says of sampling."""
    given = dict(arrival["params"])
    if given.get("logit_bias"):  # JSON's keys are texts
        given["logit_bias"] = {int(token_id): bias for token_id, bias in given["logit_bias"].items()}
    return SamplingParams(**given)


def _go_on(engine: Engine, state: Replay, live: list[RequestState], at: float) -> None:
    """Hand an engine the live requests of a state, and its trace the line that reports it."""
    engine.inputs.num_requests = len(state.requests)  # so that those to come have noise of their own
    requests = [_request(engine, known) for known in live]
    for request, known in zip(requests, live, strict=True):
        if len(request.token_ids) >= (engine.config.max_model_len or 0):
            raise ValueError(
                f"request {request.request_id!r} has {len(request.token_ids)} tokens, and max_model_len="
                f"{engine.config.max_model_len} leaves it no more: raise max_model_len"
            )
        engine.adopt_request(request)
        request.num_cached_tokens, request.num_preemptions = known.num_cached_tokens, known.num_preemptions
    scheduler = engine.core.scheduler
    scheduler.num_steps = state.step + 1
    for request, known in zip(requests, live, strict=True):
        if request.finished:  # at a stop string, which the trace's next line would have told
            continue
        if known.status == "running":
            _resume(engine, request, known.num_computed_tokens)
        elif known.status == "preempted":
            _preempt(scheduler, request)
    recorder = engine.core.recorder
    assert recorder is not None
    recorder.write(
        "fork",
        scheduler,
        time=at,
        step=state.step,
        requests=[
            {
                "request_id": request.request_id,
                "token_ids": known.output_ids,
                "text": known.output_text,
                "token_times": known.token_times,
                "num_computed_tokens": request.num_computed_tokens,
                "num_cached_tokens": known.num_cached_tokens,
                "num_preemptions": known.num_preemptions,
            }
            for request, known in zip(requests, live, strict=True)
            if not request.finished
        ],
        waiting=waiting_of(scheduler),
    )


def _request(engine: Engine, known: RequestState) -> Request:
    """Build a request as its arrival describes it, with the tokens that it has by now."""
    arrival = known.arrival
    params = arrived_params(arrival)
    request = Request(
        request_id=arrival["request_id"],
        prompt_token_ids=arrival["prompt_token_ids"],
        sampling_params=params,
        eos_token_ids=engine.model_config.eos_token_ids,
        arrival_time=arrival["time"],
        priority=arrival["priority"],
        cache_keys=tuple(arrival.get("cache_keys", ())),
        group=arrival.get("group"),
        child_index=arrival["child_index"],
        seed=arrival["seed"],
        bad_word_token_ids=engine.inputs.bad_word_ids(params),
    )
    request.token_ids.extend(known.output_ids)
    return request


def _resume(engine: Engine, request: Request, num_computed_tokens: int) -> None:
    """Turn a waiting request into a running one whose first tokens are in the cache, if there is room for it."""
    scheduler, executor = engine.core.scheduler, engine.core.executor
    if num_computed_tokens == 0 or not scheduler.config.enable_kv_cache:
        return  # it has nothing, or keeps nothing, of which to make use
    kv = scheduler.kv
    hits = kv.match(request)[: (num_computed_tokens - 1) // kv.block_size]  # the worker's row begins with a token
    has_room = len(scheduler.running) < scheduler.max_num_seqs
    blocks = kv.allocate(request, num_computed_tokens, hits) if has_room else None
    if blocks is None:
        _preempt(scheduler, request)
        return
    scheduler.waiting.remove(request)
    scheduler.running.append(request)
    request.status = RequestStatus.RUNNING
    row: NewRow | None = request.new_row()
    first_block = 0
    for start in range(len(hits) * kv.block_size, num_computed_tokens, scheduler.max_num_batched_tokens):
        num_tokens = min(num_computed_tokens - start, scheduler.max_num_batched_tokens)
        scheduled = ScheduledRequest(request.request_id, start, num_tokens, [], False, first_block, blocks, row)
        executor.sample(executor.execute(SchedulerOutput(BEFORE, [scheduled]))).result()
        row, blocks, first_block = None, [], len(request.block_ids)
    request.num_computed_tokens = num_computed_tokens
    request.last_step = BEFORE
    kv.commit(request)
    kv.retire(BEFORE)


def _preempt(scheduler: Scheduler, request: Request) -> None:
    scheduler.waiting.remove(request)
    request.status = RequestStatus.PREEMPTED
    scheduler.waiting.push(request, WaitReason.PREEMPTED)
