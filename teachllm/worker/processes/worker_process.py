"""A worker in a process of its own: reads plans from the ring, says what came of them.

    the engine's process                           this one, as many as there are ranks

    plans, calls     ── ring ──▶          execute, execute ...      (this thread)
    outputs          ◀── pipe ──          wait for a result, tell   (another one, so that a GPU never waits for a plan)

Standard input first holds what to load; after that it is the sign of life of the parent. The other end of all this is
`multiprocess.py`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import struct
import threading
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from teachllm.config import EngineConfig
from teachllm.core.memory import NotEnoughMemoryError
from teachllm.core.scheduler_output import SchedulerOutput
from teachllm.distributed.group import CollectiveError
from teachllm.distributed.layout import Layout
from teachllm.distributed.rendezvous import Rendezvous
from teachllm.distributed.ring import RingEnd, RingReader
from teachllm.distributed.spin_wait import spin_seconds
from teachllm.spec_decode.step_times import Prior
from teachllm.worker.processes.agreement import facts_of
from teachllm.worker.processes.answers import Answers, Kind
from teachllm.worker.processes.child import end_with_the_parent, leave_signals_to_the_parent, what_to_do
from teachllm.worker.processes.plan_codec import decode_plan, encode_output
from teachllm.worker.rank_watch import WatchedStep
from teachllm.worker.rank_worker import Worker
from teachllm.worker.runner import PendingOutput

log = logging.getLogger(__name__)
ORDER = struct.Struct("=?q")  # how a message of the ring begins: whether it is a plan (else a call), and its number


class WorkerStart(NamedTuple):
    """Describe what a process is told to begin with.

    Attributes:
        config: settings; `device` is the rank's own.
        layout: of the ranks, as `Layout`.
        place: its rank, and its replica where several share experts.
        answers: descriptor of the pipe back.
    """

    config: dict[str, Any]
    layout: tuple[int, int, bool, int]
    place: tuple[int, int]
    rendezvous: tuple[str, int, int | None] | None
    ring: tuple[int, ...]
    answers: int
    times_steps: bool


class _Raised:
    """In place of an output."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> Any:
        raise self._error


class WorkerProcess:
    """A worker, the ring that it reads and the pipe that it answers in."""

    def __init__(self, worker: Worker, config: EngineConfig, ring: RingReader, answers: Answers) -> None:
        self._worker, self._config, self._ring, self._answers = worker, config, ring, answers
        self._results: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._telling = threading.Thread(target=self._tell, name="answers", daemon=True)
        self._has_failed = False

    def run(self) -> None:
        """Run until the ring ends. Failing to receive tokens sampled elsewhere ends the process."""
        self._telling.start()
        while (message := self._ring.read()) is not None:
            is_plan, number = ORDER.unpack_from(message)
            content = message[ORDER.size :]
            result: Any
            if is_plan:
                plan, sampled_tokens = decode_plan(content)
                self._worker.receive_sampled_tokens(sampled_tokens)
                result = self._execute(plan)
            else:
                result = self._answer(*json.loads(content))
            if result is not None:  # as it is at ranks that do not speak
                self._results.put((number, result))
            if is_plan and (watched := self._worker.take_watched()) is not None:
                self._results.put((number, watched))
        self._results.put(None)
        self._telling.join()

    def _execute(self, plan: SchedulerOutput) -> PendingOutput | None:
        """Execute a plan; after a failed step compute nothing until all ranks have met again."""
        if self._has_failed:
            return _Raised(RuntimeError("not computed, since a step before it failed"))
        try:
            return self._worker.execute(plan)
        except Exception as error:
            _log("a step failed", error)
            self._has_failed = True
            return _Raised(error)

    def _answer(self, name: str, *arguments: Any) -> Any:
        """Answer a call that is no plan; every rank does."""
        if name == "meet":
            self._worker.wait()
            self._has_failed = False
            return {}  # that all before it is over is the answer
        assert name == "prepare"
        try:
            prior = self._worker.prepare(*arguments)
        except Exception as error:
            return _Raised(error)
        return {} if prior is None else table_of(prior, self._config.max_num_seqs or 1, len(arguments[0]))

    def _tell(self) -> None:
        if self._config.device.startswith("cuda"):
            torch.cuda.set_device(torch.device(self._config.device))  # which one is current is each thread's own
        with contextlib.suppress(BrokenPipeError):  # the engine has gone
            while (item := self._results.get()) is not None:
                number, result = item
                try:
                    if isinstance(result, dict):
                        self._answers.say(Kind.RESULT, result, number)
                    elif isinstance(result, WatchedStep):
                        self._answers.say(Kind.WATCHED, result.result(), number)
                    else:
                        self._answers.say(Kind.OUTPUT, _encoded(result), number)
                except BrokenPipeError:
                    raise
                except Exception as error:
                    self._answers.say(Kind.FAILED, one_line(error), number)


def _encoded(pending: PendingOutput) -> bytes:
    return encode_output(pending.result())


def table_of(prior: Prior, max_num_seqs: int, num_levels: int) -> dict[str, Any]:
    """Convert a prior to numbers: a function cannot be sent to another process."""
    ratios = [[prior.ratio(count, level) for level in range(num_levels)] for count in range(1, max_num_seqs + 1)]
    return {"ratios": ratios, "per_token_behind": prior.per_token_behind}


def prior_of(table: dict[str, Any]) -> Prior | None:
    """Return the prior of a table; None if there was none."""
    if not table:
        return None
    ratios = table["ratios"]
    return Prior(lambda count, level: ratios[min(max(count, 1), len(ratios)) - 1][level], table["per_token_behind"])


def one_line(error: BaseException) -> str:
    """Return what went wrong, without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def main() -> None:
    """Load what standard input describes, then work until the ring ends."""
    leave_signals_to_the_parent()
    start = WorkerStart(*json.loads(what_to_do()))
    end_with_the_parent()
    config = EngineConfig(**start.config)
    answers, ring = Answers(start.answers), RingReader(RingEnd(*start.ring), spin_seconds(config))
    with contextlib.suppress(BrokenPipeError):
        worker = _load(start, config, answers)
        if worker is None:
            ring.read()  # to be told to end: the reason must not be taken for the end of a process
            return
        gc.collect()
        gc.freeze()  # what is loaded stays: no collection has to look at it again
        answers.say(Kind.READY, worker.num_blocks)
        WorkerProcess(worker, config, ring, answers).run()
        worker.close()


def _load(start: WorkerStart, config: EngineConfig, answers: Answers) -> Worker | None:
    """Load the worker; return None if it was refused, or loading failed, and that was reported."""
    answers.say(Kind.FACTS, facts_of(config))
    rendezvous = None if start.rendezvous is None else Rendezvous(*start.rendezvous)
    try:
        return Worker(
            config,
            Layout(*start.layout).coords(*start.place),
            rendezvous,
            lambda *progress: answers.say(Kind.LOADING, progress),
            times_steps=start.times_steps,
        )
    except ValueError as error:
        table = error.table if isinstance(error, NotEnoughMemoryError) else None
        answers.say(Kind.REFUSED, [str(error), False, table])
    except BrokenPipeError:
        raise
    except Exception as error:
        _log("loading failed", error)
        answers.say(Kind.REFUSED, [one_line(error), True, None])
    return None


def _log(what: str, error: Exception) -> None:
    """Record an error with its traceback, unless the ranks could not exchange something: as a rule another rank has
    ended, and the cause is not here. What was to be exchanged is reported, as every failure."""
    log.log(logging.DEBUG if isinstance(error, CollectiveError) else logging.ERROR, what, exc_info=error)


if __name__ == "__main__":
    main()
