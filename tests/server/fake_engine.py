"""A server in a thread, and an engine that does as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import uvicorn

from teachllm.config import EngineConfig
from teachllm.engine.text.text_jobs import run_text_job
from teachllm.outputs import CompletionOutput, RequestOutput
from teachllm.sampling_params import SamplingParams
from teachllm.server.app import create_app
from teachllm.server.http.connections import PatientProtocol
from teachllm.server.options import ServerOptions
from teachllm.server.service import Service
from teachllm.server.trace_endpoint import TraceHub
from tests.clients import http_client
from tests.waiting import HANG_SECONDS


class FakeEngineClient:
    """An engine whose requests say `words`, one a step, as fast as they are read; or wait for `go` first."""

    def __init__(self, words: list[str] | None = None, **settings: Any) -> None:
        self.config = EngineConfig(model="fake", **settings).resolve(1000)
        self.words = words or ["one", " two", " three"]
        self.tokenizer: Any = FakeTokenizer()
        self.generation_defaults: dict[str, Any] = {}
        self.vocab_size, self.num_blocks = 100, 10
        self.go = asyncio.Event()
        self.go.set()
        self.fails_with: Exception | None = None
        self.refuses_with: Exception | None = None
        self.open: dict[str, asyncio.Event] = {}
        self.aborted: list[str] = []
        self.asked: list[tuple[SamplingParams, dict[str, Any]]] = []
        self.num_steps = 0

    async def submit(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        if self.refuses_with is not None:
            raise self.refuses_with
        self.asked.append((sampling_params, options))
        self.open[request_id] = asyncio.Event()
        return self._run(prompt["prompt_token_ids"], sampling_params, request_id)

    async def _run(self, ids: list[int], params: SamplingParams, name: str) -> AsyncIterator[RequestOutput]:
        output = RequestOutput(name, None, ids, [CompletionOutput(i) for i in range(params.n)])
        for number, word in enumerate(self.words, start=1):
            left = asyncio.create_task(self.open[name].wait())
            go = asyncio.create_task(self.go.wait())
            await asyncio.wait({left, go}, return_when=asyncio.FIRST_COMPLETED)
            left.cancel(), go.cancel()
            if self.fails_with is not None and number > 1:
                del self.open[name]
                raise self.fails_with
            self.num_steps += 1
            for completion in output.outputs:
                if self.open[name].is_set():
                    completion.finish_reason = "abort"
                    continue
                completion.text += word
                completion.token_ids.append(number)
                if number == len(self.words):
                    completion.finish_reason = "stop"
            if output.finished:
                del self.open[name]
            yield output
            if output.finished:
                return

    async def abort(self, request_id: str) -> None:
        if request_id in self.open:
            self.aborted.append(request_id)
            self.open[request_id].set()

    async def reset_prefix_cache(self) -> None:
        pass

    def close(self) -> None:
        pass


class FakeTokenizer:
    """A word is a token."""

    special_ids: frozenset[int] = frozenset()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(word) % 100 for word in text.split()]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(f"w{token_id}" for token_id in token_ids)

    def token_text(self, token_id: int) -> str:
        return f"w{token_id}"

    def check_length(self, name: str, text: str, max_num_tokens: int) -> None:
        """Refuse nothing: a word may have any length."""

    def render_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return " ".join(str(message["content"]).split()[0] for message in messages)

    def encode_rendered(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self.encode(text)


class FakeWorkers:
    """Processes for texts, which are this one."""

    def wait_until_loaded(self) -> None:
        """It is."""

    async def run(self, name: str, arguments: bytes) -> Any:
        tokenizer: Any = FakeTokenizer()
        return run_text_job(tokenizer, name, json.loads(arguments))

    def close(self) -> None:
        """Nothing is left."""


class _Uvicorn(uvicorn.Server):
    """Ends at once: uvicorn itself looks for its end ten times a second, and then rests for as long."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.005)

    async def shutdown(self, sockets: Any = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:
            await asyncio.sleep(0.005)


class Server:
    """A server on a free port, in a thread of its own.

    Attributes:
        http: a client of it.
    """

    def __init__(self, engine_client: Any, trace: TraceHub | None = None, **options: Any) -> None:
        self.engine_client, self.trace = engine_client, trace
        self.options = ServerOptions(**options)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(HANG_SECONDS)
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = http_client(self.url)

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        name = self.engine_client.config.model if self.engine_client is not None else "fake"
        self.service = Service(name, self.options, () if self.trace is None else [self.trace])
        if self.engine_client is not None:
            self.service.started(self.engine_client)
        protocols: dict[str, Any] = {"http": PatientProtocol, "ws": "none", "lifespan": "off"}
        config = uvicorn.Config(create_app(self.service), port=0, log_config=None, access_log=False, **protocols)
        self.uvicorn = _Uvicorn(config)
        serving = asyncio.create_task(self.uvicorn.serve())
        while not self.uvicorn.started:
            await asyncio.sleep(0.005)
        self.port = self.uvicorn.servers[0].sockets[0].getsockname()[1]
        self._ready.set()
        await serving

    def call(self, work: Callable[[], Any]) -> Any:
        """Does something in the server's thread."""

        async def run() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(HANG_SECONDS)

    def until(self, holds: Callable[[], bool]) -> None:
        """Waits, in the server's thread, until something holds."""

        async def wait() -> None:
            while not holds():
                await asyncio.sleep(0.005)

        asyncio.run_coroutine_threadsafe(asyncio.wait_for(wait(), HANG_SECONDS), self.loop).result(2 * HANG_SECONDS)

    def post(self, path: str, content: Any, **headers: str) -> httpx.Response:
        return self.http.post(path, json=content, headers=headers)

    def stream(self, path: str, content: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream, which has to end as it should."""
        response = self.post(path, {**content, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return chunks(response.text)

    def close(self) -> None:
        self.http.close()
        self.uvicorn.should_exit = True
        self._thread.join(HANG_SECONDS)


def chunks(text: str) -> list[dict[str, Any]]:
    events = text.split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


@contextlib.contextmanager
def serving(engine_client: Any, trace: TraceHub | None = None, **options: Any) -> Iterator[Server]:
    server = Server(engine_client, trace, **options)
    try:
        yield server
    finally:
        server.close()


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, which has to be one."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status and error["message"] and "\n" not in error["message"]
    return error
