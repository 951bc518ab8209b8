"""The front's end of a core that has a process of its own: starts it, talks to it, notices when it is gone.

To `Engine` it is a core like any other, but for three things: it steps by itself, so `step` waits for what it tells;
`interrupt` ends that wait from another thread; and it can die.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec
import zmq

from teachllm.config import EngineConfig
from teachllm.core.in_flight import RequestUpdate
from teachllm.core.request import FinishReason, Request
from teachllm.engine.messages import (
    Add,
    Close,
    Died,
    Failed,
    Finish,
    FromCore,
    Loading,
    Ready,
    Refused,
    ResetPrefixCache,
    Start,
    Stepped,
    ToCore,
    Update,
    decode_from_core,
    encode,
)
from teachllm.engine.stats import StepStats
from teachllm.engine.token_texts import load_tokenizer
from teachllm.models.checkpoint import find_folder
from teachllm.sampling_params import SamplingParams
from teachllm.worker.child import how_it_ended, start_child
from teachllm.worker.errors import EngineDeadError

_SECONDS_TO_END = 4.0


class CoreClient:
    """A core in a process of its own. All but `interrupt` is for one thread.

    Args:
        trace_sink, progress: as of `Engine`; called in the thread that calls `step`.

    Attributes:
        config, model_config: as the core has resolved and read them.
        tokenizer: loaded here, while the core loads its model.

    Raises:
        ValueError: the checkpoint or the settings are refused.
        RuntimeError: loading failed.
    """

    clock = staticmethod(time.perf_counter)  # one for all processes of a machine

    def __init__(
        self,
        config: EngineConfig,
        *,
        trace_sink: Callable[[str], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._trace_sink = trace_sink
        self._requests: dict[int, Request] = {}  # unfinished ones
        self._numbers: dict[str, int] = {}
        self._num_requests = 0
        self._stats: StepStats | None = None
        self._unsent: list[msgspec.Raw] = []
        self._is_dead = self._is_closed = False
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._folder = tempfile.mkdtemp(prefix="teachllm-")  # nobody else may look into it
        address = f"ipc://{self._folder}/core"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.reconnect_ivl = 10  # milliseconds, until the process listens
        self._socket.connect(address)
        self._poller = zmq.Poller()
        for source in (self._socket, self._woken):
            self._poller.register(source, zmq.POLLIN)
        self._process = start_child("teachllm.engine.core_process", address)
        threading.Thread(target=self._watch, name="engine process", daemon=True).start()
        try:
            self._say(Start(config, trace_sink is not None))
            self._send()  # it loads while the tokenizer does here
            self.tokenizer = load_tokenizer(
                config,
                str(find_folder(config.model, config.revision, config.load_format, config.trust_remote_code)),
            )
            ready = self._wait_until_ready(progress)
        except BaseException:
            self.close()
            raise
        shutil.rmtree(self._folder, ignore_errors=True)  # both ends have it open: nobody needs its name any more
        self.config, self.model_config, self._num_blocks = ready.config, ready.model_config, ready.num_blocks

    def _wait_until_ready(self, progress: Callable[[int, int], None] | None) -> Ready:
        while True:
            message = self._receive()
            match message:
                case Ready():
                    return message
                case Loading():
                    if progress is not None:
                        progress(message.num_bytes, message.total)
                case Refused():
                    raise RuntimeError(message.error) if message.is_fault else ValueError(message.error)

    # -- as a core -----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: it can never run, or has a parameter that no message can carry; the message says why.
        """
        assert self.config.max_model_len is not None
        request.max_len = request.longest(self.config.max_model_len, self.config.block_size, self._num_blocks)
        params = replace(request.sampling_params, seed=None)  # a number of any size; its bits follow
        self._num_requests += 1
        message = Add(
            self._num_requests,
            request.request_id,
            request.token_ids.tobytes(),
            params,
            request.arrival_time,
            request.priority,
            request.cache_keys,
            request.group,
            request.child_index,
            request.seed % 2**64,
            request.bad_word_token_ids,
        )
        try:
            msgspec.msgpack.decode(encode(params), type=SamplingParams)  # of the types that the core will insist on
            self._say(message)
        except (TypeError, OverflowError, msgspec.ValidationError) as error:
            raise ValueError(f"a parameter cannot be passed on: {error}") from error
        self._requests[message.number] = request
        self._numbers[request.request_id] = message.number

    def finish(self, request_id: str, reason: FinishReason, stop_reason: str | int | None = None) -> bool:
        """Ends a request; False if it has ended already. What the core still says of it is not passed on."""
        number = self._numbers.pop(request_id, None)
        if number is None:
            return False
        request = self._requests.pop(number)
        request.finish_reason, request.stop_reason = reason, stop_reason
        self._say(Finish(number, reason.value, stop_reason))
        return True

    def step(self) -> list[RequestUpdate]:
        """What one step of the core changed; empty if something else, or `interrupt`, ended the wait.

        Raises:
            RuntimeError: the step failed, and was taken back.
            EngineDeadError: the process has ended, or one that computes for it.
        """
        message = self._receive()
        if isinstance(message, Died):
            raise EngineDeadError(message.error)
        if isinstance(message, Failed):
            raise RuntimeError(message.error)
        if not isinstance(message, Stepped):
            return []
        self._stats = message.stats if self._stats is None else self._stats.then(message.stats)
        if self._trace_sink is not None:
            for line in message.lines:
                self._trace_sink(line)
        return [self._update(update) for update in message.updates if update.number in self._requests]

    def _update(self, update: Update) -> RequestUpdate:
        request = self._requests[update.number]
        request.num_cached_tokens, request.first_scheduled_time = update.num_cached_tokens, update.first_scheduled_time
        if update.finish_reason is not None:
            request.finish_reason, request.stop_reason = FinishReason(update.finish_reason), update.stop_reason
            del self._requests[update.number], self._numbers[request.request_id]
        drafts, logprobs = (update.num_drafted, update.num_accepted), (update.logprobs, update.prompt_logprobs)
        return RequestUpdate(request, update.new_token_ids, *drafts, *logprobs, update.start)

    def reset_prefix_cache(self) -> None:
        self._say(ResetPrefixCache())

    def count(self) -> None:
        """It always does."""

    def stats(self) -> StepStats | None:
        stats, self._stats = self._stats, None
        return stats

    @property
    def unfinished_ids(self) -> list[str]:
        return list(self._numbers)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._numbers)

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):  # a full pipe will do it, and nobody waits at a closed one
            self._waker.send(b"!")

    def close(self) -> None:
        """Ends the process, and waits for that."""
        if self._is_closed:
            return
        self._is_closed = True
        self._say(Close())
        self._send()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._socket.close()
        self._context.term()
        for end in (self._woken, self._waker):
            end.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- the process ---------------------------------------------------------------------------------------

    def _say(self, message: ToCore) -> None:
        """Puts a message to those that go out together; with one send for each, this thread would wait for its turn
        in this process as often."""
        self._unsent.append(msgspec.Raw(encode(message)))

    def _send(self) -> None:
        if self._unsent and not self._is_dead:  # who waits for an answer will hear of it
            self._socket.send(encode(self._unsent))
        self._unsent.clear()

    def _receive(self) -> FromCore | None:
        """Sends what is to be said, and waits for the next message; None if `interrupt` ended the wait."""
        self._send()
        ready: Mapping[object, int] = dict(self._poller.poll())
        if self._socket in ready:
            return decode_from_core(self._socket.recv())
        self._woken.recv(4096)
        if self._is_dead:
            raise EngineDeadError(f"the engine's process has ended with {how_it_ended(self._process.returncode)}")
        return None

    def _watch(self) -> None:
        self._process.wait()
        self._is_dead = True
        self.interrupt()
