"""Service: what every route shares. The engine and its health, the names it goes by, and who may come in.

starting ──▶ healthy ──▶ stopping          an engine that dies is dead from any of these
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Sequence
from hashlib import sha256
from itertools import count
from typing import TYPE_CHECKING, Literal

from teachllm.server.http.errors import ApiError, refused_as
from teachllm.server.metrics import Metrics
from teachllm.server.options import ServerOptions
from teachllm.server.start import EngineClient
from teachllm.server.text_service import TextService, Workers
from teachllm.startup_progress import StartupStage

if TYPE_CHECKING:
    from teachllm.engine.text.tokenizer import Tokenizer
    from teachllm.server.openai.generation import Generation
    from teachllm.server.trace_endpoint import TraceHub

_LEAST_MAX_BYTES = 1 << 20
_BYTES_PER_TOKEN = 64  # of a body; a token has 4 or so, in JSON's escapes 6 for each of its characters
Status = Literal["starting", "healthy", "stopping", "dead"]
_WHY = {
    "starting": "the model is still loading: try again in a moment",
    "stopping": "the server is shutting down: ask another one",
    "dead": "the engine has died: restart the server, its log says why",
}


class Service:
    """One server's state. Belongs to the event loop, but for `metrics`.

    Args:
        model: as the engine was told; its name unless there are others.

    Attributes:
        created: seconds since 1970.
        startup: while it starts, which stage it has come to, and how far: "stage", "done", "of".
        open: requests that have been admitted and have not ended.
        num_open: their completions.
        traces: subscribers of each replica's trace; none without that endpoint.
    """

    def __init__(self, model: str, options: ServerOptions, traces: Sequence[TraceHub] = ()) -> None:
        self.model, self.options, self.traces = model, options, traces
        self.names = options.served_model_names or (model,)
        self.metrics = Metrics(self.names[0])
        self.created = int(time.time())
        self.status: Status = "starting"
        self.startup: dict[str, str | int] = {}
        self.open: set[Generation] = set()
        self.num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._client: EngineClient | None = None
        self._text: TextService | None = None
        self._keys = [sha256(key.encode()).digest() for key in options.api_keys]
        self._numbers = count(1)

    # -- health --------------------------------------------------------------------------------------------

    def starts(self, stage: StartupStage, done: int, total: int) -> None:
        """Note how far the engine is on its way, as a `StartupProgress`."""
        self.startup = {"stage": stage, "done": done, "of": total}

    def started(self, client: EngineClient, workers: Workers | None = None) -> None:
        """The engine is there.

        Args:
            workers: for strangers' texts; None: threads of this process work on them.
        """
        assert client.tokenizer is not None  # serve.py sees to it
        self._client, self._text = client, TextService(client.tokenizer, workers)
        self.metrics.on_start(client.config, client.num_blocks)
        if self.status == "starting":
            self.status = "healthy"

    def stop(self) -> None:
        """Accept no more requests."""
        if self.status != "dead":
            self.status = "stopping"

    def died(self) -> None:
        self.status = "dead"

    @property
    def engine(self) -> EngineClient:
        """The engine, ready for work.

        Raises:
            ApiError: 503, and why.
        """
        if self._client is None or self.status != "healthy":
            raise ApiError(503, _WHY.get(self.status, _WHY["starting"]), headers={"retry-after": "1"})
        return self._client

    @property
    def client(self) -> EngineClient | None:
        """The engine in whatever state; None before it has been started."""
        return self._client

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None
        return tokenizer

    @property
    def text(self) -> TextService:
        """What turns texts into token ids. Raises as `engine`."""
        self.engine  # noqa: B018 - is it ready for work?
        assert self._text is not None
        return self._text

    @property
    def max_model_len(self) -> int:
        return self.engine.config.max_model_len or 0

    # -- what one request may be ---------------------------------------------------------------------------

    @property
    def max_request_bytes(self) -> int:
        """Return how long a request's body may be: a request that fits into the context is shorter."""
        given, client = self.options.max_request_bytes, self._client
        max_model_len = 0 if client is None else client.config.max_model_len or 0
        return max(_LEAST_MAX_BYTES, _BYTES_PER_TOKEN * max_model_len) if given is None else given

    def check_text(self, text: str, param: str) -> None:
        """Refuse a text that cannot fit into the context, before anything looks at it.

        Raises:
            ApiError: 400, naming the field.
        """
        with refused_as(param):
            self.tokenizer.check_length(f"the {param}", text, self.max_model_len)

    # -- who may come in -----------------------------------------------------------------------------------

    def is_key(self, key: bytes) -> bool:
        """Return whether one of the API keys, or none is needed. Takes as long for a near miss as for a far one."""
        given = sha256(key).digest()
        return not self._keys or any([hmac.compare_digest(given, known) for known in self._keys])

    def name_of(self, asked: str | None) -> str:
        """The model that is asked for, if it is the one.

        Raises:
            ApiError: 404, naming those that there are.
        """
        if asked is None or asked in self.names:
            return asked or self.names[0]
        raise ApiError(404, f"the model {asked!r} does not exist here: there is {', '.join(self.names)}", "model")

    def next_number(self) -> int:
        """Makes the engine's request ids differ, whatever clients call theirs."""
        return next(self._numbers)

    @property
    def max_open(self) -> int:
        """Completions that may be open at once."""
        return (self.engine.config.max_num_seqs or 1) * self.engine.config.data_parallel_size + (
            self.options.max_queued_requests
        )

    def check_fits(self, num_completions: int) -> None:
        """Refuses a request that would not fit into an empty queue, before anything is done for it.

        Raises:
            ApiError: 400.
        """
        if num_completions > self.max_open:
            what = f"{num_completions} completions in one request"
            raise ApiError(400, f"{what}: the server takes {self.max_open} at once; ask for fewer")

    def admit(self, generation: Generation) -> None:
        """Makes room for a request's completions, until `release`.

        Raises:
            ApiError: 429 if the queue is full; 400 if they would not fit into an empty one.
        """
        limit, num_wanted = self.max_open, generation.num_completions
        self.check_fits(num_wanted)
        if self.num_open + num_wanted > limit:
            raise ApiError(
                429,
                f"{self.num_open} completions are open, and the server takes {limit}: try again later, or raise "
                "--max-queued-requests",
                headers={"retry-after": "1"},
            )
        self.num_open += num_wanted
        self.open.add(generation)
        self._idle.clear()

    def release(self, generation: Generation) -> None:
        if generation in self.open:
            self.open.remove(generation)
            self.num_open -= generation.num_completions
        if not self.open:
            self._idle.set()

    async def idle(self) -> None:
        """Returns when no request is open."""
        await self._idle.wait()
