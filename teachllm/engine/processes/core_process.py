"""Run the engine's core in a process of its own: while it steps, no other Python code is in its way.

    the API process                                      this process

    HTTP, text <-> token ids        ── Add, Finish ──▶   EngineCore: schedule, execute, update
    streams, stop strings           ◀── Stepped ──       one message per step, for all requests

In one process, tokenizing one user's prompt and writing another's answer would hold up the step of all requests, since
one Python thread runs at a time. Here the two overlap, and only token ids cross: a few bytes per token, over a ZeroMQ
socket that only this user can open, as the messages of `core_messages.py`. The other end is `core_client.py`.

The process ends when it is told to, and when its parent has ended for whatever reason.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from array import array
from collections.abc import Callable
from functools import partial

import zmq

from teachllm.core.in_flight import RequestUpdate
from teachllm.core.request import FinishReason, Request
from teachllm.core.scheduler_output import SchedulerOutput
from teachllm.distributed.lockstep import Lockstep
from teachllm.engine.engine_core import EngineCore
from teachllm.engine.make_core import make_core
from teachllm.engine.processes.core_messages import (
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
    decode_to_core,
    encode,
)
from teachllm.engine.replicas.replica import replica_config, take_share_of_threads
from teachllm.models.model_config import ModelConfig
from teachllm.sampling_params import SamplingParams
from teachllm.worker.errors import EngineDeadError
from teachllm.worker.processes.child import end_with_the_parent, leave_signals_to_the_parent
from teachllm.worker.processes.multiprocess import Peers

log = logging.getLogger(__name__)
_MOST_BETWEEN_STEPS = 256  # messages; more of them wait, and the next step does not
_MAX_FAILURES = 5  # a GPU that has gone wrong stays so


def main(address: str) -> None:
    """Load what the first message asks for, then step and answer until told to end.

    Args:
        address: ZeroMQ's, to listen on.
    """
    leave_signals_to_the_parent()
    end_with_the_parent()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set_hwm(0)  # what is under way is bounded by the requests
        socket.bind(address)
        [start, *_] = decode_to_core(socket.recv())
        assert isinstance(start, Start)
        lines: list[str] = []

        def send(message: FromCore) -> None:
            socket.send(encode(message))

        try:
            config, peers = replica_config(start.config, start.replica), None
            if start.rendezvous is not None and start.lockstep is not None:
                peers = Peers(start.replica, start.rendezvous, Lockstep(start.lockstep))
            if config.device == "cpu":
                take_share_of_threads(config)
            core, model_config, _ = make_core(
                config,
                needs_tokenizer=False,
                trace_sink=lines.append if start.traces else None,
                progress=lambda *progress: send(Loading(*progress)),
                peers=peers,
            )
        except ValueError as error:
            send(Refused(str(error), is_fault=False))
            return
        except Exception as error:
            log.exception("loading failed")
            send(Refused(f"{type(error).__name__}: {error}", is_fault=True))
            return
        gc.collect()
        gc.freeze()  # what is loaded stays: no collection has to look at it again
        send(Ready(core.config, model_config, core.executor.num_blocks))
        try:
            lockstep = None if peers is None else peers.lockstep
            CoreProcess(socket, core, model_config, lines, lockstep).run()
        finally:
            core.close()


class CoreProcess:
    """A core that is told what to do by messages.

    Args:
        lines: of the trace, as they come; emptied as they are told.
        lockstep: with replicas that share experts; None: this one steps by itself.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        core: EngineCore,
        model_config: ModelConfig,
        lines: list[str],
        lockstep: Lockstep | None = None,
    ) -> None:
        self._socket, self._core, self._lines, self._lockstep = socket, core, lines, lockstep
        self._is_leaving = False
        self._requests: dict[int, Request] = {}  # unfinished ones, by the client's numbers
        self._numbers: dict[str, int] = {}  # the other way round, by the ids the core knows them by
        self._num_failures = 0  # in a row
        self._prompt: array[int]  # of the request that came last, and what else the next one may share with it
        self._params: SamplingParams
        self._bad_words: tuple[tuple[int, ...], ...]
        self._sources = zmq.Poller()  # of what there is to do while there is no step
        self._sources.register(socket, zmq.POLLIN)
        if core.executor.sentinel is not None:
            self._sources.register(core.executor.sentinel, zmq.POLLIN)
        if lockstep is not None:
            self._sources.register(lockstep.hears, zmq.POLLIN)
        core.count()

    def run(self) -> None:
        """Run until told to end."""
        has_news = True
        while True:
            if has_news and not self._core.has_unfinished:
                self._tell([])  # no step will
                has_news = False
            if self._is_leaving and self._lockstep is not None and self._lockstep.all_leave and not self._has_steps:
                return
            ready = dict(self._sources.poll(0 if self._has_steps else None))
            if self._lockstep is not None and self._lockstep.hears in ready and not self._lockstep.hear():
                self._sources.unregister(self._lockstep.hears)  # all others have gone, as the client will notice
            if self._socket in ready:
                if self._obey_some():
                    return
                has_news = True
            elif self._core.executor.sentinel in ready:  # it has died, as it says to whoever wants something
                self._safely(partial(self._core.executor.execute, SchedulerOutput(0)))
                continue
            if self._has_steps:
                self._safely(self._step)

    def _obey_some(self) -> bool:
        """Do what has been said, as far as a step may wait for it; return whether the process is to end."""
        num_obeyed = 0
        while num_obeyed < _MOST_BETWEEN_STEPS and self._socket.poll(0):
            for message in decode_to_core(self._socket.recv()):
                num_obeyed += 1
                if not isinstance(message, Close):
                    self._safely(partial(self._obey, message))
                elif self._lockstep is None:
                    return True
                else:
                    self._leave(self._lockstep)
        return False

    def _safely(self, act: Callable[[], None]) -> None:
        """Run `act`; a failure ends all requests here, as the request it belongs to is not known, and is reported
        once. Many failures in a row end the process."""
        try:
            act()
        except EngineDeadError as error:
            self._socket.send(encode(Died(str(error))))
            sys.exit(1)
        except Exception as error:
            log.exception("a step failed")
            failed = list(self._requests)
            for request in list(self._requests.values()):
                self._forget(request)
                with contextlib.suppress(Exception):  # a recorder's, say, that has failed already
                    self._core.finish(request.request_id, FinishReason.ABORT)
            self._socket.send(encode(Failed(f"{type(error).__name__}: {error}", failed)))
            self._num_failures += 1
            if self._num_failures == _MAX_FAILURES:
                raise

    def _obey(self, message: ToCore) -> None:
        match message:
            case Add():
                request = self._request(message)
                self._requests[message.number] = request  # first: it ends with whatever fails
                self._numbers[request.request_id] = message.number
                self._core.add(request)
            case Finish():
                known = self._requests.get(message.number)
                if known is not None:  # it may have ended by itself meanwhile
                    self._forget(known)
                    self._core.finish(known.request_id, FinishReason(message.reason), message.stop_reason)
            case ResetPrefixCache():
                self._core.reset_prefix_cache()

    def _request(self, add: Add) -> Request:
        if add.prompt is not None:
            self._prompt = array("q")
            self._prompt.frombytes(add.prompt)
        if add.sampling_params is not None:
            self._params = add.sampling_params
        if add.bad_word_token_ids is not None:
            self._bad_words = add.bad_word_token_ids
        return Request(
            request_id=add.request_id,
            prompt_token_ids=self._prompt,
            sampling_params=self._params,
            eos_token_ids=add.eos_token_ids,
            arrival_time=add.arrival_time,
            priority=add.priority,
            cache_keys=add.cache_keys,
            group=add.group,
            child_index=add.child_index,
            seed=add.seed,
            bad_word_token_ids=self._bad_words,
        )

    @property
    def _has_steps(self) -> bool:
        """Return whether there is one to take, of its own or with others."""
        return self._core.has_unfinished or (self._lockstep is not None and self._lockstep.is_behind)

    def _step(self) -> None:
        if self._core.has_unfinished:
            self._tell([self._update(update) for update in self._core.step()])
        else:
            self._core.execute_dummy_step()
            if self._lines:
                self._tell([])
        self._num_failures = 0

    def _leave(self, lockstep: Lockstep) -> None:
        """End as soon as no other replica needs this one's experts: others may be in the middle of a step."""
        if self._is_leaving:  # the others count one word per replica
            return
        self._is_leaving = True
        for request in list(self._requests.values()):
            self._forget(request)
            self._core.finish(request.request_id, FinishReason.ABORT)
        lockstep.leave()

    def _update(self, update: RequestUpdate) -> Update:
        request = update.request
        told = Update(
            self._numbers[request.request_id],
            update.new_token_ids,
            update.num_drafted,
            update.num_accepted,
            update.start,
            request.num_cached_tokens or 0,
            request.num_preemptions,
            request.first_scheduled_time,
            None if request.finish_reason is None else request.finish_reason.value,
            request.stop_reason,
            update.logprobs,
            update.prompt_logprobs,
        )
        if request.finish_reason is not None:
            self._forget(request)
        return told

    def _forget(self, request: Request) -> None:
        del self._requests[self._numbers.pop(request.request_id)]

    def _tell(self, updates: list[Update]) -> None:
        stats = self._core.stats()
        assert stats is not None
        self._socket.send(encode(Stepped(updates, stats, self._lines)))
        self._lines.clear()


if __name__ == "__main__":
    main(sys.argv[1])
