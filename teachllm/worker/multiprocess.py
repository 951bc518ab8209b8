"""MultiprocessExecutor: one process per rank. The engine's own computes nothing, it hands out plans.

                         ┌── ring (shared memory) ──▶ rank 0 ── pipe ──┐
    execute(plan) ───────┼──────────────────────────▶ rank 1 ── pipe ──┼──▶ result() of the one that speaks
                         └──────────────────────────▶ ...    ── pipe ──┘

A plan that fails is a failed step: the engine takes it back, and the ranks go on. A process that ends, or a rank that
does not come out of a step in which another has failed, is the end of all: half of a model computes nothing. Where
replicas share experts a failed step is the end, too: the others wait in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, replace
from typing import Any, NamedTuple

import torch

from teachllm.config import EngineConfig
from teachllm.core.memory import NotEnoughMemoryError
from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from teachllm.distributed.layout import layout_of
from teachllm.distributed.lockstep import Lockstep
from teachllm.distributed.plan_codec import Told, decode_output, encode_plan
from teachllm.distributed.rendezvous import Rendezvous, listen_here, rendezvous_at
from teachllm.distributed.ring import RingWriter
from teachllm.spec_decode.step_times import Prior
from teachllm.worker.agreement import check_agreement
from teachllm.worker.answers import Kind, Listener
from teachllm.worker.child import how_it_ended, start_child
from teachllm.worker.errors import EngineDeadError
from teachllm.worker.worker_process import LENGTH, ORDER, Start, prior_of

_SECONDS_TO_END = 4.0
_SECONDS_TO_MEET = 20.0  # after a failed step: the time in which all come to the next message of the ring
_REMEMBERED = 64  # steps; a rank says that it has failed long before
_SECONDS_TO_DIE = 5.0  # from a closed pipe to the end of its process
_CAUSE_FIRST = 0.2  # seconds: a step fails at all replicas when one of them has died, which is to be heard before


class Peers(NamedTuple):
    """What joins the ranks of a replica with those of others, with which they share experts.

    Attributes:
        replica: which of them this one is.
        rendezvous: where the ranks of all meet; rank 0 of replica 0 listens.
        lockstep: counts this replica's steps.
    """

    replica: int
    rendezvous: Rendezvous
    lockstep: Lockstep


class RemoteStep:
    """A plan that the ranks have been given; `result` may be asked for more than once."""

    def __init__(self, executor: MultiprocessExecutor, number: int) -> None:
        self._executor, self.number, self.is_told = executor, number, False
        self.verdict: ModelRunnerOutput | Exception | None = None

    def result(self) -> ModelRunnerOutput:
        """Waits for the step's output.

        Raises:
            EngineDeadError: a process has ended.
            RuntimeError: the step failed; names rank and reason.
        """
        return self._executor.wait_for(self)


class MultiprocessExecutor:
    """Starts a process per rank of `config`, and is their `Executor`. All but `close` is for one thread.

    Args:
        config: resolved for the model.
        progress: called with (bytes loaded, bytes in all) while weights load, as rank 0 does.
        times_steps: as of `Worker`.
        peers: with which the ranks share experts; None: there are none.

    Attributes:
        num_blocks: KV blocks that every rank has.
        sentinel: readable from the moment on at which a process has ended and nobody told it to.

    Raises:
        ValueError: the checkpoint or the settings are refused; one line says why and what to change.
        RuntimeError: loading failed, or a process ended (EngineDeadError).
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[int, int], None] | None = None,
        *,
        times_steps: bool = False,
        peers: Peers | None = None,
    ) -> None:
        self._config, self._progress, self._peers = config, progress, peers
        self._layout = layout_of(config)
        self._num_ranks = self._layout.num_ranks
        self._speaker = next(r for r in range(self._num_ranks) if self._layout.place(r).speaks)
        self._devices = devices_of(config)
        self.max_in_flight = config.pipeline_parallel_size
        self._facts: dict[int, dict[str, Any]] = {}
        self._num_blocks: dict[int, int] = {}
        self._steps: dict[int, RemoteStep] = {}  # under way, by number
        self._results: dict[int, Any] = {}  # of the call under way, by rank
        self._number = 0  # of the last plan or call
        self._told: list[Told] = []
        self._succeeded: deque[int] = deque(maxlen=_REMEMBERED)  # numbers of steps
        self._lock = threading.Lock()
        self._death: str | None = None
        self._is_closing = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watchers: list[threading.Thread] = []
        self._listeners = [Listener() for _ in range(self._num_ranks)]
        self._selector = selectors.DefaultSelector()
        sentinel, self._sentinel_end = os.pipe()
        self.sentinel: int | None = sentinel
        self._selector.register(sentinel, selectors.EVENT_READ, None)
        self._ring = RingWriter(self._num_ranks)
        try:
            self._start(times_steps)
            while len(self._num_blocks) < self._num_ranks:
                self._receive()
        except BaseException:
            self.close()
            raise
        self.num_blocks = min(self._num_blocks.values())

    # -- as an executor ------------------------------------------------------------------------------------

    def execute(self, plan: SchedulerOutput) -> RemoteStep:
        """Gives every rank the plan; an empty one for a step that other replicas take.

        Raises:
            EngineDeadError: a process has ended.
        """
        step = RemoteStep(self, plan.step)
        step.is_told = not plan.scheduled
        if self._peers is not None:
            self._peers.lockstep.begin()
        self._write(encode_plan(plan, self._told), is_plan=True)
        self._told.clear()
        self._steps[self._number] = step
        return step

    def sample(self, handle: RemoteStep) -> RemoteStep:
        """The ranks do that by themselves."""
        return handle

    def wait_for(self, step: RemoteStep) -> ModelRunnerOutput:
        """As `RemoteStep.result`."""
        while step.verdict is None or self._death is not None:
            self._receive()
        if isinstance(step.verdict, Exception):
            if self._peers is not None:
                time.sleep(_CAUSE_FIRST)
                self._end(f"a step that all replicas took failed: {step.verdict}")
                self._receive()
            elif self._num_ranks > 1:
                self._meet(str(step.verdict))
            raise step.verdict
        if self.max_in_flight > 1 and not step.is_told:  # stages before the last one do not know
            self._told.append((step.number, step.verdict.sampled_token_ids))
            step.is_told = True
        return step.verdict

    def record_ahead(self, sizes: Sequence[int], is_adaptive: bool) -> Prior | None:
        """As `GPUModelRunner.record_ahead`, at all ranks; what was timed at the one that speaks."""
        return prior_of(self._call("record_ahead", list(sizes), is_adaptive)[self._speaker])

    def close(self) -> None:
        """Ends the processes, after the step under way, and waits for that."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        if self._death is not None or len(self._num_blocks) < self._num_ranks:
            self._kill()  # one is dead, or may take minutes to load
        self._ring.close()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)  # who still has something to say need not wait for somebody to hear it
        self._selector.close()
        end = time.monotonic() + _SECONDS_TO_END
        for watcher in self._watchers:
            watcher.join(max(end - time.monotonic(), 0))
        self._kill()
        for watcher in self._watchers:
            watcher.join()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        if self._death is None:
            os.close(self._sentinel_end)

    # -- the processes -------------------------------------------------------------------------------------

    def _start(self, times_steps: bool) -> None:
        num_threads = max(torch.get_num_threads() // self._num_ranks, 1)
        with contextlib.ExitStack() as stack:
            meeting = self._meeting(stack)
            for rank, end in enumerate(self._ring.ends):
                answers, answers_end = os.pipe()
                self._selector.register(answers, selectors.EVENT_READ, rank)
                stack.callback(os.close, answers_end)
                rendezvous, passed = None, [*end.descriptors, answers_end]
                if meeting is not None:
                    rendezvous = meeting if rank == 0 else meeting._replace(listener=None)
                    passed += [] if rendezvous.listener is None else [rendezvous.listener]
                start = Start(
                    asdict(self._config_of(rank)),
                    astuple(self._layout),
                    (rank, 0 if self._peers is None else self._peers.replica),
                    *(rendezvous, tuple(end), answers_end, times_steps),
                )
                process = start_child(
                    "teachllm.worker.worker_process",
                    pass_fds=passed,
                    environment={"OMP_NUM_THREADS": str(num_threads)},
                )
                self._processes.append(process)
                self._watchers.append(threading.Thread(target=self._watch, args=(rank,), daemon=True))
                self._watchers[-1].start()
                data = json.dumps(start).encode()
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # it has ended already, as will be noticed
                    process.stdin.write(LENGTH.pack(len(data)) + data)
                    process.stdin.flush()
            self._ring.hand_over()

    def _meeting(self, stack: contextlib.ExitStack) -> Rendezvous | None:
        """Where the ranks meet, and the socket for it, which `stack` closes here; None: there is one."""
        if self._peers is not None:
            if self._peers.rendezvous.listener is not None:
                stack.callback(os.close, self._peers.rendezvous.listener)
            return self._peers.rendezvous
        if self._num_ranks == 1:
            return None
        return rendezvous_at(stack.enter_context(listen_here()))

    def _config_of(self, rank: int) -> EngineConfig:
        return replace(self._config, device=self._devices[rank])

    def _watch(self, rank: int) -> None:
        returncode = self._processes[rank].wait()
        self._end(f"the process of rank {rank} has ended with {how_it_ended(returncode)}")

    def _end(self, why: str) -> None:
        """The first reason counts; what it leads to does not."""
        with self._lock:
            if self._is_closing or self._death is not None:
                return
            self._death = why
            os.close(self._sentinel_end)
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    # -- what is said to them, and what they say -----------------------------------------------------------

    def _write(self, content: bytes, *, is_plan: bool) -> None:
        if self._is_closing:
            raise RuntimeError("the engine is closed")
        if self._death is not None:
            raise EngineDeadError(self._death)
        self._number += 1
        try:
            self._ring.write(ORDER.pack(is_plan, self._number) + content)
        except BrokenPipeError:
            self._wait_for_death()

    def _wait_for_death(self) -> None:
        """A pipe has closed: its process is about to end, or has stopped listening, which is as bad."""
        end = time.monotonic() + _SECONDS_TO_DIE
        while time.monotonic() < end:
            self._receive(end - time.monotonic())
        self._end("a rank has closed its pipe")
        self._receive()

    def _receive(self, seconds: float | None = None) -> None:
        """Waits for whatever any of them says, or for so long.

        Raises:
            EngineDeadError: a process has ended.
            ValueError, RuntimeError: it cannot be loaded.
        """
        if self._is_closing:
            raise RuntimeError("the engine is closed")
        for key, _ in self._selector.select(seconds):
            if self._death is not None:
                raise EngineDeadError(self._death)
            data = os.read(key.fd, 1 << 20)
            if not data:
                self._selector.unregister(key.fd)  # whoever watches the process will say more
                os.close(key.fd)
                continue
            for frame in self._listeners[key.data].frames(data):
                self._take(key.data, *frame)

    def _take(self, rank: int, kind: Kind, number: int, content: bytes) -> None:
        if kind is Kind.OUTPUT:
            step = self._steps.pop(number, None)
            if step is not None:
                step.verdict = decode_output(content)
                self._succeeded.append(number)
            return
        said = json.loads(content)
        match kind:
            case Kind.FACTS:
                self._facts[rank] = said
                if len(self._facts) == self._num_ranks:
                    check_agreement([self._facts[each] for each in range(self._num_ranks)])
            case Kind.LOADING:
                if rank == 0 and self._progress is not None:
                    self._progress(*said)
            case Kind.READY:
                self._num_blocks[rank] = said
            case Kind.REFUSED:
                raise _refusal(rank if self._num_ranks > 1 else None, *said)
            case Kind.RESULT:
                self._results[rank] = said
            case Kind.FAILED:
                self._fail(rank, number, said)

    def _fail(self, rank: int, number: int, why: str) -> None:
        """A plan or a call has failed at a rank, and maybe at others, too."""
        step = self._steps.pop(number, None)
        if step is not None:
            step.verdict = RuntimeError(f"rank {rank}: {why}")
        elif number in self._succeeded:
            self._end(f"rank {rank} failed in a step that the others completed: {why}")
        elif rank not in self._results and number == self._number:
            self._results[rank] = RuntimeError(f"rank {rank}: {why}")

    def _call(self, name: str, *arguments: Any, seconds: float | None = None) -> dict[int, Any]:
        """What each rank answers; fewer answers if there is a limit of time."""
        self._results = {}
        self._write(json.dumps([name, *arguments]).encode(), is_plan=False)
        end = None if seconds is None else time.monotonic() + seconds
        while len(self._results) < self._num_ranks and (end is None or time.monotonic() < end):
            self._receive(None if end is None else max(end - time.monotonic(), 0))
        for result in self._results.values():
            if isinstance(result, Exception):
                raise result
        return self._results

    def _meet(self, why: str) -> None:
        """After a failure somewhere: goes on only if all ranks are through with that step."""
        met = self._call("meet", seconds=_SECONDS_TO_MEET)
        missing = [rank for rank in range(self._num_ranks) if rank not in met]
        if missing:
            self._end(f"{why}; and rank {', '.join(map(str, missing))} did not come out of that step")
            self._receive()


def devices_of(config: EngineConfig) -> list[str]:
    """Of each rank; GPUs from the one that is named on.

    Raises:
        ValueError: there are fewer than ranks.
    """
    device, count = torch.device(config.device), config.num_ranks
    if device.type != "cuda":
        return [config.device] * count
    first, there = device.index or 0, torch.cuda.device_count()
    if first + count > there:
        name = "tensor_parallel_size" if config.tensor_parallel_size > 1 else "pipeline_parallel_size"
        sizes = f"tensor_parallel_size={config.tensor_parallel_size}, pipeline_parallel_size="
        raise ValueError(
            f"{sizes}{config.pipeline_parallel_size} need {count} GPUs from cuda:{first} on, and this machine has "
            f"{there} CUDA devices: lower {name}"
        )
    return [f"cuda:{first + rank}" for rank in range(count)]


def _refusal(rank: int | None, error: str, is_fault: bool, table: str | None) -> Exception:
    if table is not None:
        return NotEnoughMemoryError(error.removesuffix(f"\n{table}"), table)
    return RuntimeError(error if rank is None else f"rank {rank}: {error}") if is_fault else ValueError(error)
