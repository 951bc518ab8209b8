"""Run a core in a process of its own, or several such replicas (`data_parallel.py`): the API process's end.

To `Engine` it is a core like any other, but for three things: it steps by itself, so `step` waits for its messages;
`interrupt` ends that wait from another thread; and it can die.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import msgspec
import zmq

from teachllm.checkpoint.files import find_folder
from teachllm.config import EngineConfig
from teachllm.core.in_flight import RequestUpdate
from teachllm.core.request import FinishReason, Request
from teachllm.distributed.lockstep import LockstepEnd, close_ends, lockstep_ends
from teachllm.distributed.rendezvous import Rendezvous, listen_here, rendezvous_at
from teachllm.engine.observability.stats import NOTHING, StepStats, together
from teachllm.engine.processes.core_link import CoreLink
from teachllm.engine.processes.core_messages import (
    Add,
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
    Update,
    encode,
)
from teachllm.engine.replicas.data_parallel import Balance
from teachllm.engine.text.token_texts import load_tokenizer
from teachllm.sampling_params import SamplingParams
from teachllm.startup_progress import StartupProgress
from teachllm.worker.errors import EngineDeadError, FailedStepError
from teachllm.worker.processes.child import only_here, refuse_elsewhere, uninterrupted

_SECONDS_TO_END = 4.0
_LAST_WORDS = 100  # milliseconds that what a process said before it ended may take to be here


class CoreClient:
    """Run a core in `data_parallel_size` processes. All methods but `interrupt` are for one thread.

    Args:
        trace_sinks: one for each process, or none; called in this thread, and in that of `step`.
        progress: as of `Engine`, of all processes together.
        choose_replica: of `EngineOverrides`.

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
        trace_sinks: Sequence[Callable[[str], None]] = (),
        progress: StartupProgress | None = None,
        choose_replica: Callable[[Sequence[int], Sequence[int]], int] | None = None,
    ) -> None:
        num_replicas, self._in_lockstep = config.data_parallel_size, config.shares_experts
        self._trace_sinks = trace_sinks
        self._requests: dict[int, tuple[Request, int]] = {}  # unfinished ones, and the replica that has them
        self._numbers: dict[str, int] = {}
        self._num_requests = 0
        self._last: Request | None = None  # that was added
        self._checked: SamplingParams | None = None  # parameters that can be passed on
        self._balance = Balance(num_replicas, choose_replica)
        self._stats = [NOTHING] * num_replicas
        self._has_news = self._is_closed = False
        self._refuse_elsewhere, self._close = refuse_elsewhere(), only_here(self._end_processes)
        self._death: str | None = None
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(self._woken, zmq.POLLIN)
        self._links: list[CoreLink] = []
        self._turn = 0  # whose message is taken first
        try:
            self._start(config)
            self.tokenizer = load_tokenizer(  # while they load
                config,
                str(find_folder(config.model, config.revision, config.load_format, config.trust_remote_code)),
            )
            ready = self._wait_until_ready(progress)
        except BaseException:
            for link in self._links:  # who loads hears nothing
                link.process.kill()
            self.close()
            raise
        for link in self._links:
            link.connected()
        self.config = replace(ready[0].config, trace_path=config.trace_path)
        self.model_config = ready[0].model_config
        self.num_blocks = min(each.num_blocks for each in ready)  # who fits into one replica fits into any

    def _start(self, config: EngineConfig) -> None:
        """Start the processes, and pass what replicas that share experts need to meet and to keep step."""
        num_replicas = config.data_parallel_size
        with contextlib.ExitStack() as stack:
            ends: list[LockstepEnd | None] = [None] * num_replicas
            meeting: list[Rendezvous | None] = [None] * num_replicas
            if config.shares_experts:
                listener, made = stack.enter_context(listen_here()), lockstep_ends(num_replicas)
                stack.callback(close_ends, made)
                ends = [*made]
                first = rendezvous_at(listener)
                meeting = [first, *[first._replace(listener=None)] * (num_replicas - 1)]
            for replica in range(num_replicas):
                name = "the engine's process" if num_replicas == 1 else f"the process of replica {replica}"
                start = Start(config, bool(self._trace_sinks), replica, meeting[replica], ends[replica])
                with uninterrupted():
                    self._links.append(CoreLink(self._context, start, name, self.interrupt))
                self._poller.register(self._links[-1].socket, zmq.POLLIN)

    def _wait_until_ready(self, progress: StartupProgress | None) -> list[Ready]:
        ready: dict[int, Ready] = {}
        done: dict[str, dict[int, int]] = {}  # of a stage, by replica
        while len(ready) < len(self._links):
            replica, message = self._receive() or (0, None)
            match message:
                case Ready():
                    ready[replica] = message
                case Loading():
                    so_far = done.setdefault(message.stage, {})
                    so_far[replica] = message.done
                    if progress is not None:
                        progress(message.stage, sum(so_far.values()), len(self._links) * message.total)
                case Refused():
                    raise RuntimeError(message.error) if message.is_fault else ValueError(message.error)
                case Stepped():  # of a replica that is ready before another
                    self._take(replica, message)
                case Died():  # of such a one, too
                    self._end_all(message.error)
        return [ready[replica] for replica in range(len(ready))]

    # -- as a core -----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Add a request to the queue.

        Raises:
            ValueError: it can never run, or has a parameter that no message can carry; the message says why.
            RuntimeError: this is a child that is forked from the engine's process.
        """
        self._refuse_elsewhere()
        assert self.config.max_model_len is not None
        request.max_len = request.longest(self.config.max_model_len, self.config.block_size, self.num_blocks)
        last, params = self._last, None
        has_sibling = last is not None and request.group is not None and request.group == last.group
        if last is None or not has_sibling or request.sampling_params is not last.sampling_params:
            params = request.sampling_params
            if params.seed is not None:  # a number of any size; its bits follow
                params = replace(params, seed=None)
        self._num_requests += 1
        message = Add(
            self._num_requests,
            request.request_id,
            None if has_sibling else request.token_ids.tobytes(),
            params,
            request.arrival_time,
            request.priority,
            request.cache_keys,
            request.group,
            request.child_index,
            request.seed % 2**64,
            None if has_sibling else request.bad_word_token_ids,
            request.eos_token_ids,
        )
        try:
            if params is not None and params is not self._checked:  # of the types that the core will insist on
                msgspec.msgpack.decode(encode(params), type=SamplingParams)
                self._checked = params
            packed = msgspec.Raw(encode(message))
        except (TypeError, OverflowError, msgspec.ValidationError) as error:
            raise ValueError(f"a parameter cannot be passed on: {error}") from error
        replica = self._balance.choose(request.group)
        self._links[replica].say(packed)
        self._last = request
        self._requests[message.number] = request, replica
        self._numbers[request.request_id] = message.number

    def finish(self, request_id: str, reason: FinishReason, stop_reason: str | int | None = None) -> bool:
        """End a request; return False if it has ended already. The core's later messages about it are dropped."""
        number = self._numbers.pop(request_id, None)
        if number is None:
            return False
        request, replica = self._requests.pop(number)
        request.finish_reason, request.stop_reason = reason, stop_reason
        self._balance.ended(replica)
        self._links[replica].say(Finish(number, reason.value, stop_reason))
        return True

    def step(self) -> list[RequestUpdate]:
        """Return the changes of one step of one replica; empty if something else, or `interrupt`, ended the wait.

        Raises:
            FailedStepError: the step failed, and the requests that the replica had have ended.
            EngineDeadError: a process has ended, and with it the core.
        """
        replica, message = self._receive() or (0, None)
        if isinstance(message, Died):
            self._end_all(message.error)
        if isinstance(message, Failed):
            ended = [self._requests[number][0] for number in message.numbers if number in self._requests]
            raise FailedStepError(message.error, [request.request_id for request in ended])
        return self._take(replica, message) if isinstance(message, Stepped) else []

    def _take(self, replica: int, message: Stepped) -> list[RequestUpdate]:
        self._stats[replica] = self._stats[replica].then(message.stats)
        self._has_news = True
        self._balance.stepped(replica, message.stats.num_running)
        if self._trace_sinks:
            for line in message.lines:
                self._trace_sinks[replica](line)
        return [self._update(update) for update in message.updates if update.number in self._requests]

    def _update(self, update: Update) -> RequestUpdate:
        request, replica = self._requests[update.number]
        request.num_cached_tokens, request.first_scheduled_time = update.num_cached_tokens, update.first_scheduled_time
        request.num_preemptions = update.num_preemptions
        if update.finish_reason is not None:
            request.finish_reason, request.stop_reason = FinishReason(update.finish_reason), update.stop_reason
            del self._requests[update.number], self._numbers[request.request_id]
            self._balance.ended(replica)
        return RequestUpdate(
            request,
            new_token_ids=update.new_token_ids,
            num_drafted=update.num_drafted,
            num_accepted=update.num_accepted,
            logprobs=update.logprobs,
            prompt_logprobs=update.prompt_logprobs,
            start=update.start,
        )

    def reset_prefix_cache(self) -> None:
        for link in self._links:
            link.say(ResetPrefixCache())

    def count(self) -> None:
        """Do nothing: the core's processes always count."""

    def stats(self) -> StepStats | None:
        if not self._has_news:
            return None
        self._has_news = False
        told = together(self._stats)
        self._stats = [stats.without_counts() for stats in self._stats]
        return told

    @property
    def unfinished_ids(self) -> list[str]:
        return list(self._numbers)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._numbers)

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):  # a full pipe will do it, and no process waits at a closed one
            self._waker.send(b"!")

    def close(self) -> None:
        """End the processes and wait for that; in a child that is forked from this process they go on."""
        if not self._is_closed:
            self._is_closed = True
            self._close()

    def _end_processes(self) -> None:
        for link in self._links:
            link.tell_to_end()
        deadline = time.monotonic() + _SECONDS_TO_END
        for link in self._links:
            link.close(deadline)
        self._context.term()
        for end in (self._woken, self._waker):
            end.close()

    # -- the processes -------------------------------------------------------------------------------------

    def _receive(self) -> tuple[int, FromCore] | None:
        """Send the queued messages and wait for the next one; return None if `interrupt` ended the wait.

        Raises:
            EngineDeadError: a process has ended.
        """
        self._refuse_elsewhere()
        if self._death is not None:
            raise EngineDeadError(self._death)
        for link in self._links:
            link.send()
        ready: Mapping[object, int] = dict(self._poller.poll())
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
        for replica, link in enumerate(self._links):
            if link.is_dead:
                if link.socket.poll(_LAST_WORDS):
                    return replica, link.receive()
                self._end_all(link.how_it_ended())
        for replica in (*range(self._turn, len(self._links)), *range(self._turn)):
            if self._links[replica].socket in ready:
                self._turn = (replica + 1) % len(self._links)
                return replica, self._links[replica].receive()
        return None

    def _end_all(self, why: str) -> NoReturn:
        """End all replicas with this one: a restart of the engine starts all of them."""
        self._death = why
        for other in self._links:
            if self._in_lockstep:  # it may wait in a step for the one that is gone
                other.process.kill()
            else:
                other.tell_to_end()
        raise EngineDeadError(self._death)
