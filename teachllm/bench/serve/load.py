"""All requests of a load, each at its time, and how well the client kept up.

A measurement can be wrong in one direction only: a client that has no time sends late, stamps late, and reports its own
delays as the server's. So its lateness and how busy its processor was belong to the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from teachllm.bench.serve.client import Target, ask, ask_model, open_session
from teachllm.bench.serve.dataset import Prompt
from teachllm.bench.serve.record import Record

if TYPE_CHECKING:
    import aiohttp

_BUSY = 0.9  # of one core, from which on time stamps cannot be trusted
_LATE = 0.1  # of the median TTFT, from which on it is the client's as much as the server's
_LATE_S = 0.005
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Load:
    """Describe what a run brought.

    Attributes:
        model: that was asked.
        records: in the order of arrival.
        duration_s: from the first arrival to the end of the last request.
        busy: share of one core that the client used, at its busiest second.
    """

    model: str
    records: list[Record]
    duration_s: float
    busy: float

    @property
    def finished(self) -> list[Record]:
        return [record for record in self.records if not record.error]

    @property
    def failed(self) -> list[Record]:
        return [record for record in self.records if record.error]

    def doubts(self) -> list[str]:
        """Return where the client, not the server, decided what was measured; and where it had to guess."""
        found = []
        if self.busy > _BUSY:
            found.append(
                f"the client used {self.busy:.0%} of a core, so its times are late: send less, or measure from several"
            )
        if self.finished:
            late_s, ttft_s = _p99([r.late_s for r in self.records]), statistics.median(r.ttft_s for r in self.finished)
            if late_s > max(_LATE_S, _LATE * ttft_s):
                found.append(
                    f"the client sent one request in a hundred {1000 * late_s:.0f} ms late or more, beside a median "
                    f"TTFT of {1000 * ttft_s:.0f} ms: the load was not the one that was asked for"
                )
        if num := sum(not record.has_usage for record in self.finished):
            found.append(f"the server gave no usage for {num} requests: their tokens are counted by chunks")
        return found


def run(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Do the same as `asyncio.run`, on uvloop where it is installed."""
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


async def measure(
    target: Target,
    prompts: Sequence[Prompt],
    arrivals_s: Sequence[float],
    max_concurrency: int | None = None,
    warmups: Sequence[Prompt] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Load:
    """Send every prompt at its time.

    Args:
        target: without a model, the server's first is asked.
        arrivals_s: [num_prompts] seconds, rising.
        max_concurrency: requests that are out at a time; what arrives beyond it waits here, unsent.
        warmups: sent before, all at once, and not counted.
        progress: called with (requests done, requests in all).

    Raises:
        ConnectionError: no server answers.
        RuntimeError: a warm-up failed.
        ValueError: `max_concurrency` is below 1, the server names no model, or token ids were given for a chat.
        ImportError: an extra is not installed.
    """
    if max_concurrency is not None and max_concurrency < 1:
        raise ValueError(f"max_concurrency={max_concurrency}: must be at least 1")
    num_done, num_all = 0, len(warmups) + len(prompts)

    def count() -> None:
        nonlocal num_done
        num_done += 1
        if progress is not None:
            progress(num_done, num_all)

    async with open_session() as session:
        target = replace(target, model=await ask_model(session, target))
        for record in await _send_all(session, target, warmups, [0.0] * len(warmups), max_concurrency, count):
            if record.error:
                raise RuntimeError(f"a warm-up failed: {record.error}")
        with _little_garbage_collection():
            watch = _Watch()
            watching = asyncio.create_task(watch.run())
            records = await _send_all(session, target, prompts, arrivals_s, max_concurrency, count)
            watching.cancel()
            busy = watch.busiest()
    return Load(target.model, records, max(record.end_s for record in records), busy)


async def _send_all(
    session: aiohttp.ClientSession,
    target: Target,
    prompts: Sequence[Prompt],
    arrivals_s: Sequence[float],
    max_concurrency: int | None,
    on_done: Callable[[], None],
) -> list[Record]:
    bodies = [target.body(prompt) for prompt in prompts]  # before the clock starts
    records = [Record(due_s, prompt.output_len) for due_s, prompt in zip(arrivals_s, prompts, strict=True)]
    limit = asyncio.Semaphore(max_concurrency or max(len(prompts), 1))
    start = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - start

    async def send(body: bytes, record: Record) -> None:
        is_held = limit.locked()
        async with limit:
            record.free_s = now() if is_held else record.due_s
            await ask(session, target, body, record, now)
        on_done()

    async with asyncio.TaskGroup() as group:
        for body, record in zip(bodies, records, strict=True):
            while (wait_s := record.due_s - now()) > 0:  # uvloop's timers are up to a millisecond early
                await asyncio.sleep(wait_s)
            group.create_task(send(body, record))
    return records


class _Watch:
    """How busy this process is, second by second."""

    def __init__(self) -> None:
        self._ticks = [(time.perf_counter(), time.process_time())]

    async def run(self) -> None:
        while True:
            await asyncio.sleep(1)
            self._ticks.append((time.perf_counter(), time.process_time()))

    def busiest(self) -> float:
        """Share of one core. What is left after the last whole second counts only where there is no other."""
        if len(self._ticks) == 1:
            self._ticks.append((time.perf_counter(), time.process_time()))
        pairs = zip(self._ticks, self._ticks[1:], strict=False)
        return max((cpu - cpu_before) / (wall - wall_before) for (wall_before, cpu_before), (wall, cpu) in pairs)


@contextlib.contextmanager
def _little_garbage_collection() -> Iterator[None]:
    """Freeze what is here already: a garbage collection stops every stream for as long as it looks at objects."""
    was_frozen = gc.get_freeze_count() > 0  # by a caller who wants it to stay so
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]
