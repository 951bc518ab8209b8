"""The trace: one JSON line for everything that happens, the same for notebook, web page, simulator and profiler.

The state of the block pool after any line is a function of the block events up to it. The recorder is handed its sink
(what takes a line) and its clock: this file opens nothing and never asks the time. The format is in docs/trace.md.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from secrets import token_bytes
from typing import Any, NamedTuple, Protocol

from teachllm.core.block_pool import BlockEvent
from teachllm.core.in_flight import RequestUpdate
from teachllm.core.request import FinishReason, Request, Wait
from teachllm.core.scheduler import Scheduler
from teachllm.core.scheduler_output import ScheduledRequest, SchedulerOutput
from teachllm.sampling_params import SamplingParams

TRACE_VERSION = 1
_DEFAULTS = asdict(SamplingParams())
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_OF_A_REQUEST = ("request_id", "num_prompt_tokens", "child_index", "seed", "priority", "max_len", "group")


class StepTimestamps(NamedTuple):
    """Seconds on the recorder's clock: when the step was scheduled, how long each part took, when all was known."""

    time: float
    schedule: float
    execute: float
    wait: float  # for the device
    update: float
    end: float


class Texts(Protocol):
    """Define who knows the text of tokens."""

    def __call__(self, token_ids: Sequence[int], request: Request | None = None) -> list[str]: ...


class Recorder:
    """Turns what the engine does into trace lines.

    Args:
        sink: takes one line, without its newline.
        clock: seconds since any fixed moment.
        text: returns the text of each token id, of a prompt or of a request's newest tokens; None leaves ids and text
            out of the trace.
    """

    def __init__(
        self,
        sink: Callable[[str], None],
        clock: Callable[[], float],
        text: Texts | None = None,
    ) -> None:
        self._sink, self.clock, self._text = sink, clock, text
        self.key = None if text else token_bytes(32)  # without it, hashes would tell which tokens a block holds

    def header(self, config: dict[str, Any], model: dict[str, Any], num_blocks: int, **worker: Any) -> None:
        what: dict[str, Any] = {"config": config, "model": model, "num_blocks": num_blocks} | worker
        self.write("header", version=TRACE_VERSION, time=self.clock(), **what)

    def arrival(self, request: Request) -> None:
        params = {k: v for k, default in _DEFAULTS.items() if (v := getattr(request.sampling_params, k)) != default}
        if self._text is None:  # strings and ids are what the user wrote
            params = {k: v for k, v in params.items() if isinstance(v, int | float)}
        told = {name: getattr(request, name) for name in _OF_A_REQUEST}
        if self._text is not None:
            ids = told["prompt_token_ids"] = list(request.prompt_token_ids)
            told |= {"prompt_text": self._text(ids), "cache_keys": request.cache_keys or None}
        self.write("arrival", time=request.arrival_time, params=params, **told)

    def end(self, request_id: str, reason: FinishReason, scheduler: Scheduler) -> None:
        """A request ended from outside: "abort", or "stop" at a stop string."""
        self.write(reason.value, scheduler, time=self.clock(), request_id=request_id)

    def error(self, error: BaseException, scheduler: Scheduler) -> None:
        """A step failed; it and all that were under way are taken back, and their requests queue again."""
        self.write("error", scheduler, time=self.clock(), message=repr(error))

    def step(
        self,
        plan: SchedulerOutput,
        updates: list[RequestUpdate],
        scheduler: Scheduler,
        times: StepTimestamps,
        **more: Any,
    ) -> None:
        """One step, after its update; `more` is what the loop and the worker know."""
        sampled = {update.request.request_id: update for update in updates}
        kv, cached = scheduler.kv, scheduler.kv.pool.num_cached_blocks
        self.write(
            "step",
            scheduler,
            step=plan.step,
            **times._asdict(),
            scheduled=[
                self._scheduled_entry(scheduled, sampled.get(scheduled.request_id)) for scheduled in plan.scheduled
            ],
            preempted=plan.preempted,
            finished={name: reason.value for name, u in sampled.items() if (reason := u.request.finish_reason)},
            waiting=waiting_of(scheduler),
            held={name: _told(wait) for name, wait in plan.held.items() if name not in plan.preempted} or None,
            blocks={"used": kv.num_used_blocks, "cached": cached, "free": kv.pool.num_free_blocks - cached},
            **more,
        )

    def _scheduled_entry(self, scheduled: ScheduledRequest, update: RequestUpdate | None) -> dict[str, Any]:
        num_draft, start = len(scheduled.draft_token_ids), scheduled.start
        if update is not None and scheduled.samples:  # a plan made ahead took all drafts in flight for accepted
            num_known = len(update.request.token_ids) - len(update.new_token_ids)
            start = num_known - (scheduled.num_tokens - num_draft)
        entry: dict[str, Any] = {
            "request_id": scheduled.request_id,
            "start": start,
            "num_tokens": scheduled.num_tokens,
            "phase": "decode" if scheduled.samples and scheduled.num_tokens == 1 + num_draft else "prefill",
        }
        if num_draft:
            entry["num_draft"], entry["num_accepted"] = num_draft, update.num_accepted if update else 0
            if update is not None and update.num_drafted != num_draft:
                entry["num_proposed"] = update.num_drafted
        if scheduled.why is not None:
            entry["next_draft"] = [scheduled.num_next_drafts, scheduled.why]
        if update is not None and update.new_token_ids:
            entry["num_sampled"] = len(update.new_token_ids)
            if self._text is not None:
                entry["token_ids"] = update.new_token_ids
                entry["text"] = self._text(update.new_token_ids, update.request)
        return entry

    def write(self, event: str, scheduler: Scheduler | None = None, **fields: Any) -> None:
        """A line, without the fields that are None; with a scheduler's block events since the line before."""
        if scheduler is not None:
            fields["block_events"] = [block_event(each, self.key) for each in scheduler.kv.drain_events()]
        self._sink(_encode({"event": event} | {k: v for k, v in fields.items() if v is not None}))


def block_event(event: BlockEvent, key: bytes | None = None) -> list[str | int]:
    """The fields that are set, hashes in hexadecimal, hidden by a key if there is one."""
    fields = (event.kind, event.block_id, event.request_id, event.block_hash, event.parent_hash)
    told = (hmac.digest(key, f, "sha256") if key and isinstance(f, bytes) else f for f in fields if f is not None)
    return [f.hex() if isinstance(f, bytes) else f for f in told]


def waiting_of(scheduler: Scheduler) -> dict[str, list[str]]:
    """{request id: [reason, the same in words]}, in the queue's order."""
    return {r.request_id: _told(r.wait) for r in scheduler.waiting if r.wait}


def _told(wait: Wait) -> list[str]:
    return [wait.reason.name.lower(), str(wait)]
