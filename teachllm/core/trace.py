"""The trace: one JSON line for everything that happens, the same for notebook, web page, simulator and profiler.

A header, then events in order: arrivals, ends from outside, and one `step` line for each step. The state of the block
pool at any step is a function of the block events up to it. The recorder is handed its sink (what takes a line)
and its clock, so this file opens nothing and never asks the time by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from teachllm.core.in_flight import RequestUpdate
from teachllm.core.request import FinishReason, Request
from teachllm.core.scheduler import Scheduler
from teachllm.core.scheduler_output import ScheduledRequest, SchedulerOutput
from teachllm.sampling_params import SamplingParams

TRACE_VERSION = 1
_DEFAULTS = asdict(SamplingParams())


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds on the recorder's clock: when the step was scheduled, and how long each part took."""

    start: float
    schedule: float
    execute: float
    update: float


class Recorder:
    """Turns what the engine does into trace lines.

    Args:
        sink: takes one line, without its newline.
        clock: seconds since any fixed moment.
        text: gives the text of sampled ids; None leaves ids and text out of the trace.
    """

    def __init__(
        self,
        sink: Callable[[str], None],
        clock: Callable[[], float],
        text: Callable[[list[int]], str] | None = None,
    ) -> None:
        self._sink = sink
        self.clock = clock
        self._text = text

    def header(self, config: dict[str, Any], model: dict[str, Any], num_blocks: int, **worker: Any) -> None:
        what = {"config": config, "model": model, "num_blocks": num_blocks} | worker
        self._write("header", version=TRACE_VERSION, time=self.clock(), **what)

    def arrival(self, request: Request) -> None:
        params = {k: v for k, v in asdict(request.sampling_params).items() if v != _DEFAULTS[k]}
        if self._text is None:  # strings and ids are what the user wrote
            params = {k: v for k, v in params.items() if isinstance(v, int | float)}
        self._write(
            "arrival",
            time=request.arrival_time,
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            prompt_token_ids=list(request.prompt_token_ids) if self._text else None,
            params=params,
            child_index=request.child_index,
            seed=request.seed,
            priority=request.priority,
            max_len=request.max_len,
            group=request.group,
        )

    def end(self, request_id: str, reason: FinishReason) -> None:
        """A request ended from outside, after the step whose line came last: "abort", or "stop" at a stop string."""
        self._write(reason.value, time=self.clock(), request_id=request_id)

    def step(
        self,
        plan: SchedulerOutput,
        updates: Iterable[RequestUpdate],
        scheduler: Scheduler,
        times: StepTimes,
        **worker: Any,
    ) -> None:
        """One step, after its update; `worker` is what only a worker knows (`roofline`: bytes, FLOPs, its bound)."""
        sampled = {update.request.request_id: update for update in updates}
        kv, cached = scheduler.kv, scheduler.kv.pool.num_cached_blocks
        self._write(
            "step",
            step=plan.step,
            time=times.start,
            schedule=times.schedule,
            execute=times.execute,
            update=times.update,
            scheduled=[self._share(share, sampled.get(share.request_id)) for share in plan.scheduled],
            preempted=plan.preempted,
            finished={name: reason.value for name, u in sampled.items() if (reason := u.request.finish_reason)},
            waiting={request.request_id: str(request.wait) for request in scheduler.waiting},
            blocks={"used": kv.num_used_blocks, "cached": cached, "free": kv.pool.num_free_blocks - cached},
            block_events=[event.as_list() for event in kv.drain_events()],
            **worker,
        )

    def _share(self, share: ScheduledRequest, update: RequestUpdate | None) -> dict[str, Any]:
        tokens = update.new_token_ids if update else []
        entry: dict[str, Any] = {
            "request_id": share.request_id,
            "start": share.start,
            "num_tokens": share.num_tokens,
            "num_draft": len(share.draft_token_ids),
            "num_accepted": update.num_accepted if update else 0,
            "phase": "decode" if share.samples and share.num_tokens == 1 + len(share.draft_token_ids) else "prefill",
        }
        if self._text and tokens:
            entry["token_ids"], entry["text"] = tokens, self._text(tokens)
        return entry

    def _write(self, event: str, **fields: Any) -> None:
        self._sink(json.dumps({"event": event} | {k: v for k, v in fields.items() if v is not None}))
