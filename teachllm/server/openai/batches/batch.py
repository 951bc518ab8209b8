"""A batch: requests in a file, answered without a network between.

Each goes through the server's own application, so that it is checked, refused and answered as the server would.
Whatever ends a batch early, the output holds whole answers, and the same command goes on where it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec

from teachllm.config import EngineConfig
from teachllm.server.app import create_app
from teachllm.server.http.errors import error_body
from teachllm.server.openai.batches.batch_file import PASSING, output_line, read_lines
from teachllm.server.options import ServerOptions
from teachllm.server.service import Service
from teachllm.server.start import EngineClient
from teachllm.startup_progress import StartupProgress

_NO_LIMIT = 1 << 40  # on the size of a request and of the queue: no other client is served
logger = logging.getLogger("teachllm.server")


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)


@dataclass
class Totals:
    """Describe what has been answered. `num_refused`: with another status than 200."""

    num_answered: int = 0
    num_refused: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True)
class _Reply:
    status: int
    request_id: str
    body: bytes


class LocalServer:
    """The server without a network.

    Args:
        client: the engine; `close` closes it.
        has_ended: whether that will answer no more.
    """

    def __init__(self, client: EngineClient, options: ServerOptions, has_ended: Callable[[], bool]) -> None:
        self._client, self._has_ended = client, has_ended
        service = Service(client.config.model, options)
        service.started(client)
        self._app = create_app(service)
        self.max_num_seqs = (client.config.max_num_seqs or 1) * client.config.data_parallel_size

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        progress: StartupProgress | None = None,
        **options: Any,
    ) -> LocalServer:
        """Loads a model.

        Args:
            progress: as of `AsyncLLM.start`.
            options: those of `ServerOptions` that say how requests are answered.

        Raises:
            ValueError: the checkpoint or the settings are refused.
        """
        from teachllm.engine.async_llm import AsyncLLM

        limits: dict[str, Any] = {"max_request_bytes": _NO_LIMIT, "max_queued_requests": _NO_LIMIT}
        given = ServerOptions(log_requests=False, allowed_hosts=("*",), **limits, **options)
        if given.tool_call_parser is not None:
            from teachllm.server.openai.tool_parsers import tool_parser

            tool_parser(given.tool_call_parser)  # a wrong name is refused before the model is loaded
        llm = AsyncLLM.start(config, progress=progress)

        def has_ended() -> bool:
            try:
                llm.call(lambda: None)
            except RuntimeError:  # it takes no orders
                return True
            return False

        return cls(llm, given, has_ended)

    def close(self) -> None:
        self._client.close()

    async def answer(
        self,
        source: BinaryIO,
        offsets: list[int],
        write: Callable[[bytes], None],
        *,
        max_concurrency: int,
        totals: Totals,
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        """Answers lines of a batch. Cancelled, it aborts what is open and has written what is complete.

        Args:
            source, offsets: as of `make_plan`.
            write: takes a line of output.
            max_concurrency: requests that are open at a time.
            totals: grows.

        Raises:
            RuntimeError: the engine died; what it did not answer is not written.
        """
        lines = read_lines(source, offsets)

        async def work() -> None:
            for line in lines:  # shared: each takes the next
                reply = await self._post(line.url, bytes(line.body))
                if reply.status in PASSING and self._has_ended():
                    message = msgspec.json.decode(reply.body)["error"]["message"]
                    raise RuntimeError(f"{message}; run the same command again to go on")
                body = msgspec.Raw(reply.body)
                response = {"status_code": reply.status, "request_id": reply.request_id, "body": body}
                write(output_line(line.custom_id, response, None))
                _count(totals, reply)
                on_answer()

        workers = [asyncio.create_task(work()) for _ in range(min(max_concurrency, len(offsets)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _post(self, path: str, body: bytes) -> _Reply:
        """One request, by ASGI's own rules: https://asgi.readthedocs.io/en/latest/specs/www.html"""
        received = iter([{"type": "http.request", "body": body, "more_body": False}])
        sent = _Sent()

        async def receive() -> dict[str, Any]:
            for message in received:
                return message
            await asyncio.Event().wait()  # this client never leaves
            raise AssertionError

        scope = {
            **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": "POST"},
            **{"path": path, "raw_path": path.encode(), "root_path": "", "query_string": b""},
            **{"headers": [(b"content-type", b"application/json")], "client": None, "server": None},
        }
        try:
            await self._app(scope, receive, sent)
        except Exception as error:  # it has been answered as a bug of the server already
            logger.error("a request failed", exc_info=error)
        return sent.reply()


@dataclass
class _Sent:
    """Takes what an application sends."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message.get("body", b"")

    def reply(self) -> _Reply:
        name = self.headers.get(b"x-request-id", b"").decode()
        if self.headers.get(b"content-type") != b"application/json":  # it would break the line that it goes into
            return _Reply(500, name, error_body(500, "the server gave no answer in JSON"))
        return _Reply(self.status, name, bytes(self.body))


def _count(totals: Totals, reply: _Reply) -> None:
    totals.num_answered += reply.status == 200
    totals.num_refused += reply.status != 200
    if reply.status == 200:
        usage = msgspec.json.decode(reply.body, type=_Body).usage
        totals.num_prompt_tokens += usage.prompt_tokens
        totals.num_output_tokens += usage.completion_tokens
