"""A server that speaks OpenAI's protocol and has no model: a token is a word, and a step gives every stream one chunk.

As a program it is what the load generator is measured against, in a process of its own:

    python tests/bench/serve/fake_openai.py [--port 8000] [--steps-per-second 120]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MODEL = "fake-model"


@dataclass
class Answer:
    """What one request gets.

    Attributes:
        num_tokens: None is as many as it asks for.
        tokens_per_chunk: servers merge what a client is slow to take.
        status: an error of that status in place of a stream.
        fails_after: an error object in the stream, after so many tokens.
        hangs_up_after: the connection is closed, after so many tokens.
        has_usage: the stream ends with token counts.
        held: not a byte before it is set.
    """

    num_tokens: int | None = None
    tokens_per_chunk: int = 1
    status: int = 200
    fails_after: int | None = None
    hangs_up_after: int | None = None
    has_usage: bool = True
    held: asyncio.Event | None = None


@dataclass
class Stream:
    """An answer on its way."""

    writer: asyncio.StreamWriter
    answer: Answer
    is_chat: bool
    num_prompt_tokens: int
    num_tokens: int
    done: asyncio.Event
    num_sent: int = 0


@dataclass
class FakeServer:
    """What it was asked is in `bodies` and `headers`; `max_open` is how many requests it had at a time."""

    answer: Callable[[dict[str, Any]], Answer] = lambda body: Answer()
    step_s: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_open: int = 0
    max_open: int = 0
    num_chunks: int = 0
    on_open: Callable[[int], None] = lambda num_open: None
    _streams: list[Stream] = field(default_factory=list)
    _has_streams: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, port: int, on_ready: Callable[[int], None]) -> None:
        """Until cancelled. on_ready: called with the port."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", port, backlog=1024, limit=1 << 24)
        on_ready(server.sockets[0].getsockname()[1])
        try:
            await self._steps()
        finally:
            server.close()

    async def _steps(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            await self._has_streams.wait()
            due = max(due + self.step_s, loop.time())
            await asyncio.sleep(due - loop.time())
            for stream in self._streams:
                self._step(stream)
            self._streams = [stream for stream in self._streams if not stream.done.is_set()]
            if not self._streams:
                self._has_streams.clear()

    def _step(self, stream: Stream) -> None:
        transport, answer = stream.writer.transport, stream.answer
        if transport.get_write_buffer_size() > 1 << 16:
            return
        if transport.is_closing() or stream.num_sent == answer.hangs_up_after:
            transport.abort()
            stream.done.set()
            return
        if stream.num_sent == answer.fails_after:
            error = {"error": {"message": "the engine died", "type": "InternalServerError"}}
            transport.write(_event(json.dumps(error)) + _event("[DONE]") + b"0\r\n\r\n")
            stream.done.set()
            return
        num = min(answer.tokens_per_chunk, stream.num_tokens - stream.num_sent)
        stream.num_sent += num
        self.num_chunks += 1
        is_last = stream.num_sent == stream.num_tokens
        data = _event(_chunk(" word" * num, stream.is_chat, is_last))
        if is_last:
            if answer.has_usage:
                usage = {"prompt_tokens": stream.num_prompt_tokens, "completion_tokens": stream.num_sent}
                data += _event(json.dumps({"choices": [], "usage": usage}))
            data += _event("[DONE]") + b"0\r\n\r\n"
            stream.done.set()
        transport.write(data)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while not writer.transport.is_closing():
                await self._request(reader, writer)
        writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        path = first.split()[1]
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
        text = await reader.readexactly(int(headers.get("content-length", 0)))
        if path in ("/health", "/v1/models"):
            _reply(writer, 200, {"data": [{"id": MODEL}]})
        elif path not in ("/v1/completions", "/v1/chat/completions"):
            _reply(writer, 404, {"error": {"message": f"no route {path}"}})
        else:
            await self._complete(writer, path, headers, json.loads(text))

    async def _complete(
        self, writer: asyncio.StreamWriter, path: str, headers: dict[str, str], body: dict[str, Any]
    ) -> None:
        self.bodies.append(body)
        self.headers.append(headers)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        self.on_open(self.num_open)
        try:
            answer = self.answer(body)
            if answer.held is not None:
                await answer.held.wait()
            if answer.status != 200:
                _reply(writer, answer.status, {"error": {"message": f"refused with {answer.status}"}})
                return
            is_chat = path.endswith("chat/completions")
            prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
            num_prompt_tokens = len(prompt.split() if isinstance(prompt, str) else prompt)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            if is_chat:
                role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
                writer.write(_event(json.dumps(role)))
            num_tokens = body["max_tokens"] if answer.num_tokens is None else answer.num_tokens
            stream = Stream(writer, answer, is_chat, num_prompt_tokens, num_tokens, asyncio.Event())
            self._streams.append(stream)
            self._has_streams.set()
            await stream.done.wait()
        finally:
            self.num_open -= 1


def _chunk(text: str, is_chat: bool, is_last: bool) -> str:
    words = f'"delta":{{"content":"{text}"}}' if is_chat else f'"text":"{text}"'
    reason = '"length"' if is_last else "null"
    choice = f'{{"index":0,{words},"logprobs":null,"finish_reason":{reason}}}'
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    return f'{{"id":"cmpl-0123456789abcdef","object":"{kind}","created":1,"model":"{MODEL}","choices":[{choice}]}}'


def _event(data: str) -> bytes:
    body = b"data: " + data.encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(body), body)


def _reply(writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} Said\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


@contextlib.contextmanager
def running(server: FakeServer) -> Iterator[str]:
    """The server's address, while it runs in a thread."""
    from tests.waiting import HANG_SECONDS  # which this file, as a program, need not find

    ready, port = threading.Event(), 0
    runner: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = []

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        runner.append((asyncio.get_running_loop(), task))

        def on_ready(number: int) -> None:
            nonlocal port
            port = number
            ready.set()

        with contextlib.suppress(asyncio.CancelledError):
            await server.run(0, on_ready)

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert ready.wait(HANG_SECONDS)
    yield f"http://127.0.0.1:{port}"
    loop, task = runner[0]
    loop.call_soon_threadsafe(task.cancel)
    thread.join(HANG_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--steps-per-second", type=float, default=0.0, help="0: as many as it can")
    options = parser.parse_args()
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    server = FakeServer(step_s=1 / options.steps_per_second if options.steps_per_second else 0.0)
    asyncio.run(server.run(options.port, lambda port: print(f"http://127.0.0.1:{port}", flush=True)))


if __name__ == "__main__":
    main()
