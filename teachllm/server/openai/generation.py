"""Generation: what the engine does for one HTTP request, from its admission to its end.

A request may be several for the engine (a list of prompts). Whatever ends it (an answer, an error, a client that hung
up, the server's own end), `close` frees what it holds, and then it counts no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from teachllm.outputs import RequestOutput
from teachllm.sampling_params import SamplingParams
from teachllm.server.http.errors import ApiError, error_body, refused_as
from teachllm.server.http.sse import DONE, EventStream, event, noticing_hangup
from teachllm.server.service import Service
from teachllm.server.start import has_died
from teachllm.server.turns import Turns

logger = logging.getLogger("teachllm.server")
_JOBS_AT_ONCE = 32  # that are handed to the engine's thread in one turn of it


@dataclass(frozen=True, slots=True)
class Job:
    """One request of the engine."""

    prompt_token_ids: list[int]
    params: SamplingParams


class Answer(Protocol):
    """Define how outputs are laid out for a client."""

    async def whole(self, outputs: list[RequestOutput]) -> bytes:
        """The one body of an answer that is not streamed."""

    def chunk(self, index: int, output: RequestOutput) -> bytes:
        """Events with what is new in the output of job `index`; empty if nothing is worth telling."""

    def last(self) -> bytes:
        """Events after the last output."""


class Generation:
    """The jobs of one request.

    Args:
        name: the engine's requests are called so, and numbered.
        options: further ones of the engine's requests.
    """

    def __init__(self, service: Service, name: str, jobs: list[Job], options: dict[str, Any]) -> None:
        self._service, self._engine = service, service.engine
        self._jobs, self._options = jobs, options
        number = service.next_number()
        self._ids = [f"{name}-{number}" if len(jobs) == 1 else f"{name}-{number}-{i}" for i in range(len(jobs))]
        self.num_completions = sum(job.params.n for job in jobs)
        self._streams: dict[int, AsyncIterator[RequestOutput]] = {}  # by the job's number
        self._outputs: list[RequestOutput | None] = [None] * len(jobs)
        self._has_failed = self._is_refused = False
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when the engine has accepted all jobs; then `close` must be called.

        Raises:
            ApiError: 400 if one is refused (none is left running), 429 if there is no room.
        """
        self._service.admit(self)
        turns = Turns()
        try:
            for first in range(0, len(self._jobs), _JOBS_AT_ONCE):
                numbers = range(first, min(first + _JOBS_AT_ONCE, len(self._jobs)))
                with refused_as():
                    await self._submit(numbers)
                await turns.pass_on()
            for job in self._jobs:
                self._service.metrics.on_params(job.params)
        except BaseException as error:
            self._is_refused = isinstance(error, ApiError)
            self._has_failed = not self._is_refused
            await self.close()
            if isinstance(error, ApiError) or not isinstance(error, Exception):
                raise
            raise self._failure(error) from error

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(job, its output), whenever one has grown.

        Raises:
            ApiError: the engine failed, or the server ends before the answer is complete.
        """
        note, last = self._service.metrics.between_tokens, 0.0
        try:
            async with contextlib.aclosing(self._merged()) as merged:
                async for index, output in merged:
                    now = time.perf_counter()
                    if self._outputs[index] is not None:
                        note(now - last)
                    last = now
                    self._outputs[index] = output
                    yield index, output
        except Exception as error:
            self._has_failed = True
            raise self._failure(error) from error
        if self._service.status == "stopping" and any(
            completion.finish_reason == "abort" for output in self._outputs if output for completion in output.outputs
        ):
            raise ApiError(503, "the server shut down before the answer was complete")

    async def ended(self) -> list[RequestOutput]:
        """All outputs, complete. Raises as `outputs`."""
        async with contextlib.aclosing(self.outputs()) as outputs:
            async for _ in outputs:
                pass
        return [output for output in self._outputs if output is not None]

    async def abort(self) -> None:
        """Ends what is still running; the outputs then end with what there is."""
        for name in self._ids:
            await self._engine.abort(name)

    async def close(self) -> None:
        """Frees everything, even if the caller is cancelled meanwhile. Nothing happens the second time."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        turns = Turns()
        try:
            for number in self._streams:
                name, job, output = self._ids[number], self._jobs[number], self._outputs[number]
                if output is None or not output.finished:
                    with contextlib.suppress(Exception):  # of a dead engine
                        await self._engine.abort(name)
                self._count_end(job, output)
                await turns.pass_on()
        finally:
            self._service.release(self)

    def _count_end(self, job: Job, output: RequestOutput | None) -> None:
        if self._is_refused:  # it counts as that, and as nothing else
            return
        if output is None:
            self._service.metrics.on_silent_end(job.params.n, self._has_failed)
        else:
            self._service.metrics.on_end(output, self._has_failed)

    async def _submit(self, numbers: range) -> None:
        """Hands some jobs to the engine, in one turn of its thread. If one is refused, the others may have begun."""
        if len(numbers) == 1:
            self._streams[numbers[0]] = await self._submit_one(numbers[0])
            return
        tasks: dict[int, asyncio.Task[AsyncIterator[RequestOutput]]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                tasks |= {number: group.create_task(self._submit_one(number)) for number in numbers}
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            begun = {number: task for number, task in tasks.items() if not task.cancelled() and not task.exception()}
            self._streams |= {number: task.result() for number, task in begun.items()}

    async def _submit_one(self, number: int) -> AsyncIterator[RequestOutput]:
        job = self._jobs[number]
        prompt = {"prompt_token_ids": job.prompt_token_ids}
        return await self._engine.submit(prompt, job.params, self._ids[number], **self._options)

    def _failure(self, error: Exception) -> ApiError:
        if has_died(error):
            self._service.died()
        return ApiError(500, f"the engine failed: {type(error).__name__}: {error}")

    def usage(self) -> dict[str, Any]:
        return usage([output for output in self._outputs if output is not None])

    async def _merged(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                yield 0, output
            return
        ready: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(maxsize=1)

        async def pump(index: int, stream: AsyncIterator[RequestOutput]) -> None:
            try:
                async for output in stream:
                    await ready.put((index, output))
                await ready.put(None)
            except Exception as error:
                await ready.put(error)

        pumps = [asyncio.create_task(pump(index, stream)) for index, stream in self._streams.items()]
        try:
            num_left = len(pumps)
            while num_left:
                item = await ready.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_left -= 1
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()


def usage(outputs: list[RequestOutput]) -> dict[str, Any]:
    """OpenAI's `usage` of some outputs."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_generated = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


async def respond(request: Request, generation: Generation, answer: Answer, stream: bool) -> Response:
    """Runs a generation and answers with it.

    Raises:
        ApiError: as `Generation.start`; and as `Generation.outputs` if it is not streamed. In a stream that is an
            error object in place of what is missing.
    """
    await generation.start()
    notes = request.scope.get("teachllm", {})  # for the log

    async def end() -> None:
        notes.update(generation.usage())
        await generation.close()

    if stream:
        return EventStream(_events(generation, answer, notes), generation.abort, end)
    try:
        async with noticing_hangup(request.receive, generation.abort):
            outputs = await generation.ended()
    finally:
        await end()
    return Response(await answer.whole(outputs), media_type="application/json")


async def _events(generation: Generation, answer: Answer, notes: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    try:
        async with contextlib.aclosing(generation.outputs()) as outputs:
            async for index, output in outputs:
                piece = answer.chunk(index, output)
                if piece:
                    yield piece
        yield answer.last()
    except ApiError as error:
        notes["error"] = error.message
        yield event(error_body(error.status, error.message, error.param))
    except Exception as error:  # of ours: the status has been sent already
        logger.exception("a stream failed")
        yield event(error_body(500, f"the server failed: {type(error).__name__}; its log says where"))
    yield DONE
