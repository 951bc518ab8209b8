"""Replay a trace: an engine's state after any line, from the lines up to it.

The pool follows from the block events alone. All blocks are free at first, and the free list is in the order of reuse:

    allocate   the head of the list, whose content is forgotten already, goes to the end of a request's table
    hit        a block of the wanted content does; it leaves the list if it was there
    commit     the content gets its hash, by which others can find it
    evict      it loses it
    free       a request lets go; with the last one the block goes to the end of the list

Requests follow from arrivals, scheduled tokens and ends. An event that cannot have happened is an error, so a whole
trace that replays is sound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Line = Mapping[str, Any]


class ReplayError(ValueError):
    """A line that cannot follow those before it; one sentence says why."""


@dataclass(slots=True)
class BlockState:
    """A block of the pool.

    Attributes:
        users: the request of each use, in the order in which they came.
        block_hash, parent_hash: of its content, if that can be found.
        last_step: the last step whose line named it, -1 for none.
    """

    users: list[str] = field(default_factory=list)
    block_hash: str | None = None
    parent_hash: str | None = None
    last_step: int = -1


@dataclass(slots=True)
class RequestState:
    """A request.

    Attributes:
        arrival: its line.
        output_ids, output_text: sampled so far; empty in a trace without text.
        num_output_tokens: sampled so far.
        table: block ids.
        num_computed_tokens: whose KV is in the cache.
        num_cached_tokens: found in the cache when it was first admitted; None before.
        status: "waiting", "running", "preempted", "finished" or "aborted".
        wait: (reason, the same in words) while it waits, as of the last step's line.
        finish_reason: "stop", "length" or "abort".
        token_times: when each output token was known.
        end_time: when it ended.
    """

    arrival: Line
    output_ids: list[int] = field(default_factory=list)
    output_text: list[str] = field(default_factory=list)
    num_output_tokens: int = 0
    table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    status: str = "waiting"
    wait: tuple[str, str] | None = None
    finish_reason: str | None = None
    token_times: list[float] = field(default_factory=list)
    end_time: float | None = None

    @property
    def is_live(self) -> bool:
        return self.finish_reason is None


class Replay:
    """The state after the lines given to `apply`.

    Args:
        header: the trace's first line.

    Attributes:
        blocks: by id.
        free: ids of free blocks in the order of reuse.
        requests: by id, in the order of arrival, ended ones included.
        step: number of the last step, -1 before the first.
    """

    def __init__(self, header: Line) -> None:
        self.block_size: int = header["config"]["block_size"]
        self.blocks = [BlockState() for _ in range(header["num_blocks"])]
        self.free: dict[int, None] = dict.fromkeys(range(header["num_blocks"]))
        self.requests: dict[str, RequestState] = {}
        self._live: dict[str, RequestState] = {}  # those of them that have not ended
        self.step = -1

    def apply(self, line: Line) -> None:
        """Moves on by one line. Those of kinds that it does not know change nothing.

        Raises:
            ReplayError: it cannot follow; the state is then of no use.
        """
        kind = line["event"]
        if kind == "arrival":
            self._arrive(line)
        elif kind in ("step", "fork"):
            self.step = line["step"]
        for event in line.get("block_events", ()):
            self._apply_block_event(*event)
        if kind == "step":
            self._apply_step(line)
        elif kind == "fork":
            self._apply_fork(line)
        elif kind == "error":
            for request in self._live.values():
                if request.status == "running":
                    request.status, request.num_computed_tokens = "preempted", 0
        elif kind in ("abort", "stop"):
            self._end(self._request(line["request_id"]), kind, line["time"])

    def state_text(self) -> str:
        """Pool and tables as one text, by which two of them can be compared."""
        blocks = [[len(block.users), block.block_hash] for block in self.blocks]
        tables = {name: request.table for name, request in self.requests.items() if request.table}
        return state_text(blocks, list(self.free), tables)

    # -- requests ------------------------------------------------------------------------------------------

    def _arrive(self, line: Line) -> None:
        name = line["request_id"]
        if name in self._live:
            raise ReplayError(f"request {name!r} arrives a second time")
        before = self.requests.pop(name, None)  # an id may be used again: in the order of arrival
        table = [] if before is None else before.table  # which a plan in flight may still pin
        self.requests[name] = self._live[name] = RequestState(line, table=table)

    def _request(self, name: str) -> RequestState:
        if name not in self.requests:
            raise ReplayError(f"request {name!r} has never arrived")
        return self.requests[name]

    def _apply_step(self, line: Line) -> None:
        for name in line["preempted"]:
            self._request(name).num_preemptions += 1
        for scheduled in line["scheduled"]:
            request = self._request(scheduled["request_id"])
            if request.arrival["time"] <= line["time"]:  # else it is of one that had the id before, and too late
                self._apply_scheduled(request, scheduled, line["end"])
        for name, reason in line["finished"].items():
            self._end(self._request(name), reason, line["end"])
        for name, request in self._live.items():
            self._place(request, line["waiting"].get(name))

    def _apply_fork(self, line: Line) -> None:
        for known in line["requests"]:
            request = self._request(known["request_id"])
            request.output_ids, request.output_text = list(known["token_ids"]), list(known["text"])
            request.num_output_tokens, request.token_times = len(known["token_ids"]), list(known["token_times"])
            for name in ("num_computed_tokens", "num_cached_tokens", "num_preemptions"):
                setattr(request, name, known.get(name))
            self._place(request, line["waiting"].get(known["request_id"]))

    def _apply_scheduled(self, request: RequestState, scheduled: Line, time: float) -> None:
        request.num_computed_tokens = num_computed_after(scheduled)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = scheduled["start"]
        request.output_ids += scheduled.get("token_ids", ())
        request.output_text += scheduled.get("text", ())
        request.num_output_tokens += scheduled.get("num_sampled", 0)
        request.token_times += [time] * scheduled.get("num_sampled", 0)

    def _place(self, request: RequestState, wait: tuple[str, str] | None) -> None:
        if wait is None:
            request.status, request.wait = "running", None
            return
        request.wait = (wait[0], wait[1])
        has_run = request.num_cached_tokens is not None or wait[0] == "preempted"
        request.status = "preempted" if has_run else "waiting"
        request.num_computed_tokens = 0

    def _end(self, request: RequestState, reason: str, time: float) -> None:
        request.finish_reason, request.end_time, request.wait = reason, time, None
        request.status = "aborted" if reason == "abort" else "finished"
        self._live.pop(request.arrival["request_id"], None)

    # -- blocks --------------------------------------------------------------------------------------------

    def _apply_block_event(
        self, kind: str, block_id: int, name: str = "", block_hash: str = "", parent_hash: str = ""
    ) -> None:
        if not 0 <= block_id < len(self.blocks):
            raise ReplayError(f"block {block_id} is not one of the {len(self.blocks)}")
        block = self.blocks[block_id]
        block.last_step = self.step
        if kind in ("allocate", "hit"):
            if kind == "allocate" and next(iter(self.free), None) != block_id:
                raise ReplayError(f"block {block_id} is allocated and was not the next free one")
            self.free.pop(block_id, None)
            block.users.append(name)
            self._request(name).table.append(block_id)
        elif kind == "free":
            table = self._request(name).table
            if name not in block.users or block_id not in table:
                raise ReplayError(f"request {name!r} frees block {block_id} and does not use it")
            block.users.remove(name)
            table.remove(block_id)
            if not block.users:
                self.free[block_id] = None
        elif kind == "commit":
            block.block_hash, block.parent_hash = block_hash, parent_hash
        elif kind == "evict":
            block.block_hash = block.parent_hash = None
        else:
            raise ReplayError(f"{kind!r} is no block event")


def num_computed_after(scheduled: Line) -> int:
    """Return the tokens of a request whose KV is in the cache after a step, rejected drafts not counted."""
    num_rejected: int = scheduled.get("num_draft", 0) - scheduled.get("num_accepted", 0)
    return scheduled["start"] + scheduled["num_tokens"] - num_rejected


def state_text(blocks: list[list[Any]], free: list[int], tables: Mapping[str, list[int]]) -> str:
    """A pool as one text.

    Args:
        blocks: [number of users, hash in hexadecimal or None] of each.
        free: ids of free blocks in the order of reuse.
        tables: block ids by request, of those that have any.
    """
    state = {"blocks": blocks, "free": free, "tables": tables}
    return json.dumps(state, sort_keys=True, separators=(",", ":"))
