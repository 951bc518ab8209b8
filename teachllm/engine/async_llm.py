"""AsyncLLM: the engine in a thread of its own, and requests as streams.

A stream keeps what its reader has not taken yet as one change, however many steps it took: a slow reader costs no
memory. A limit on the requests that are unfinished makes those who add more wait.

llm = AsyncLLM.start(EngineConfig(model="teachlm"))
async for output in llm.generate("What is a KV cache?"):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from teachllm.config import EngineConfig
from teachllm.engine.engine_thread import EngineThread, Order, carry_out, refuse
from teachllm.engine.input_processor import PreparedPrompt, Prompt, num_characters
from teachllm.engine.llm_engine import Engine, TraceSink
from teachllm.engine.output_stream import OutputStream, RequestStream
from teachllm.engine.text.text_jobs import MAX_INLINE
from teachllm.engine.text.tokenizer import Tokenizer
from teachllm.outputs import RequestOutput
from teachllm.sampling_params import SamplingParams
from teachllm.startup_progress import StartupProgress
from teachllm.worker.errors import FailedStepError


class AsyncLLM(EngineThread):
    """Requests as streams.

    Args:
        engine: belongs to this from now on; `close` closes it.
        max_requests: that are unfinished at once; one more waits in `generate` until another has ended. None: no limit.
        settings: those of `EngineThread`.
    """

    def __init__(self, engine: Engine, *, max_requests: int | None = None, **settings: Any) -> None:
        self._max_requests = max_requests
        self._num_requests = 0
        # The engine's thread alone has these: streams of unfinished requests, and requests for which there is no room.
        self._streams: dict[str, OutputStream] = {}
        self._arriving: deque[tuple[str, Order]] = deque()
        super().__init__(engine, **settings)

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        own_process: bool = True,
        trace_sink: TraceSink | Sequence[TraceSink] | None = None,
        progress: StartupProgress | None = None,
        **settings: Any,
    ) -> AsyncLLM:
        """Load a model, and serve it.

        Args:
            own_process, trace_sink, progress: as in `Engine`.
            settings: of this class.

        Raises:
            ValueError: the checkpoint or the settings are refused; one line says why and what to change.
        """
        engine = Engine(config, own_process=own_process, trace_sink=trace_sink, progress=progress)
        return cls(engine, **settings)

    @property
    def config(self) -> EngineConfig:
        """Return the settings as resolved for the model."""
        return self._engine.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._engine.tokenizer

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids that the model knows."""
        return self._engine.model_config.vocab_size

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of the KV cache; of replicas, each."""
        return self._engine.num_blocks

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """Return the sampling settings that the checkpoint recommends, under SamplingParams' names."""
        return self._engine.generation_defaults

    # -- requests ------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Answer one prompt, yielding its output whenever it has grown. Leaving the loop early aborts it.

        Args:
            prompt, sampling_params, options: as in `Engine.add_request`.
            request_id: None makes one.

        Yields:
            One object, this caller's own, as far as it has come; the last one is finished.

        Raises:
            ValueError: as `Engine.add_request`.
            EngineDeadError: the core's process has ended.
            Exception: a step failed; every request that was unfinished then, at the same replica, ends so.
        """
        stream = await self.submit(prompt, sampling_params, request_id, **options)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> RequestStream:
        """Do the same as `generate`, in two steps: it returns once the engine has taken the request, or raises.

        Returns:
            What `generate` yields. Read it to its end or close it: until then the request runs.

        Raises:
            ValueError: as `Engine.add_request`.
            EngineDeadError: a process of the engine has ended.
        """
        name = request_id or self.next_id()
        params, salt = sampling_params or SamplingParams(), options.pop("cache_salt", None)
        prepare = partial(self._engine.inputs.prepare, prompt, params, salt)
        # Neither the engine's thread nor the caller's loop waits for a long text.
        is_short = num_characters(prompt, params) <= MAX_INLINE
        prepared = prepare() if is_short else await asyncio.to_thread(prepare)
        stream = OutputStream(asyncio.get_running_loop())
        added: Future[None] = Future()
        add = partial(self._add, stream, name, prepared, options)
        queued = self.call(lambda: self._arriving.append((name, (add, added))))
        queued.add_done_callback(partial(_hand_on, added))
        leave = partial(self._ask, partial(self._leave, name, stream))
        try:
            await asyncio.wrap_future(added)
        except asyncio.CancelledError:
            if not added.cancel():  # a cancelled waiter is dropped; an admitted request is aborted
                await leave()
            raise
        return RequestStream(stream, leave)

    async def abort(self, request_id: str) -> None:
        """End a request. Its stream ends with what there is; nothing happens if it has ended already."""
        await self._ask(lambda: self._abort(request_id))

    async def reset_prefix_cache(self) -> None:
        """Forget the KV of all blocks that no request holds."""
        await self._ask(self._engine.reset_prefix_cache)

    def next_id(self) -> str:
        """Return an id that this has given to no other request."""
        self._num_requests += 1
        return f"request-{self._num_requests}"

    async def _ask(self, order: Callable[[], None]) -> None:
        """Do the same as `call`, waited for; of a closed engine nothing is left to be asked for."""
        with contextlib.suppress(RuntimeError):
            done = self.call(order)
            await asyncio.shield(asyncio.wrap_future(done))  # who is cancelled here has still asked

    # -- in the engine's thread ----------------------------------------------------------------------------

    def _take(self, changed: list[RequestOutput]) -> None:
        for output in changed:
            if output.request_id in self._streams:
                self._streams[output.request_id].put(output)
                if output.finished:
                    del self._streams[output.request_id]

    def _let_in(self) -> None:
        while self._arriving and (self._max_requests is None or len(self._streams) < self._max_requests):
            carry_out(*self._arriving.popleft()[1])

    def _fail(self, error: Exception) -> None:
        ended = error.request_ids if isinstance(error, FailedStepError) else list(self._streams)
        for name in ended:
            stream = self._streams.pop(name, None)
            if stream is not None:
                stream.fail(error)
            with contextlib.suppress(Exception):  # a recorder's, say: the stream knows already
                self._engine.abort_request(name)

    def _give_up(self, error: Exception) -> None:
        for _, (_, done) in self._arriving:
            refuse(done, error)

    def _add(self, stream: OutputStream, name: str, prompt: PreparedPrompt, options: dict[str, Any]) -> None:
        stream.begin(self._engine.add_request(name, prompt, **options))
        self._streams[name] = stream

    def _abort(self, name: str) -> None:
        waits = next((entry for entry in self._arriving if entry[0] == name), None)
        if waits is not None and name not in self._streams:  # for room: it comes, and goes at once
            self._arriving.remove(waits)
            carry_out(*waits[1])
        self._engine.abort_request(name)
        stream = self._streams.pop(name, None)
        if stream is not None:
            stream.put(stream.source)

    def _leave(self, name: str, stream: OutputStream) -> None:
        if self._streams.get(name) is stream:  # not another request that had this name first
            self._abort(name)


def _hand_on(added: Future[None], queued: Future[None]) -> None:
    """Refuse what cannot be queued: it will not be added."""
    if (error := queued.exception()) is not None:
        refuse(added, error)
