"""Order the requests (lessons 03 and 06): a policy is a sort key and two questions.

The waiting queue is kept sorted by the key; when blocks run out, the running request with the largest key is
preempted. So a preempted request, which arrived before all others that still wait, returns to the head of the queue by
itself. To try another order, write a class with these methods and pass it to `Scheduler`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Protocol

from teachllm.core.request import Request, Wait, WaitReason

Key = tuple[int, ...]


class Policy(Protocol):
    def key(self, request: Request) -> Key:
        """Return the sort key: the smallest goes first, and no two requests may have the same."""

    def opens_batch(self, num_running: int) -> bool:
        """Return whether waiting requests may join now; called once at the start of a step."""

    def chunk(self, request: Request, num_tokens: int) -> int:
        """Return how many of the `num_tokens` that budget and settings allow to compute now; 0 passes it over."""


class FirstComeFirstServed:
    """Batch continuously, in order of arrival."""

    def key(self, request: Request) -> Key:
        return (request.arrival_index,)

    def opens_batch(self, num_running: int) -> bool:
        return True

    def chunk(self, request: Request, num_tokens: int) -> int:
        return num_tokens


class Priority(FirstComeFirstServed):
    """Put the lower `priority` first, ties in order of arrival."""

    def key(self, request: Request) -> Key:
        return (request.priority, request.arrival_index)


class Static(FirstComeFirstServed):
    """Batch statically, to see what it wastes: no request joins until the whole batch has finished."""

    def opens_batch(self, num_running: int) -> bool:
        return num_running == 0


POLICIES: dict[str, type[FirstComeFirstServed]] = {"fcfs": FirstComeFirstServed, "priority": Priority, "static": Static}


class WaitingQueue:
    """Keep waiting and preempted requests in the policy's order; each knows why it waits."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._entries: list[tuple[Key, Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._entries)

    @property
    def head(self) -> Request | None:
        return self._entries[0][1] if self._entries else None

    def push(self, request: Request, reason: WaitReason = WaitReason.BEHIND_HEAD) -> None:
        request.wait = Wait(reason)
        old_head = self.head
        insort(self._entries, (self._policy.key(request), request), key=lambda entry: entry[0])
        if old_head is not None and self.head is request and old_head.wait != Wait(WaitReason.PREEMPTED):
            old_head.wait = Wait(WaitReason.BEHIND_HEAD)  # why it was refused as the head no longer matters

    def remove(self, request: Request) -> None:
        """Remove a request from any position."""
        index = bisect_left(self._entries, self._policy.key(request), key=lambda entry: entry[0])
        assert self._entries[index][1] is request, "two requests share a policy key"
        del self._entries[index]
        request.wait = None
