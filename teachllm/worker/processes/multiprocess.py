"""MultiprocessExecutor: one process per rank. The engine's own computes nothing, it hands out plans.

    execute(plan) ──▶ every rank        result() ◀── the output rank             failed ◀── any rank

A plan that fails is a failed step: the engine takes it back, the ranks pass over what was sent behind it until all have
met again, and go on. A process that ends, or a rank that does not come out of a step in which another has failed, is
the end of all. Where replicas share experts a failed step is the end, too: the others wait in it.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from teachllm.config import EngineConfig
from teachllm.core.memory import NotEnoughMemoryError
from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from teachllm.distributed.layout import layout_of
from teachllm.distributed.lockstep import Lockstep
from teachllm.distributed.rendezvous import Rendezvous
from teachllm.spec_decode.step_times import Prior
from teachllm.startup_progress import StartupProgress
from teachllm.worker.errors import EngineDeadError
from teachllm.worker.processes.agreement import check_agreement
from teachllm.worker.processes.answers import Kind
from teachllm.worker.processes.plan_codec import SampledTokens, decode_output, encode_plan
from teachllm.worker.processes.rank_lines import RankLines, RankWork
from teachllm.worker.processes.rank_processes import RankProcesses
from teachllm.worker.processes.worker_process import ORDER, prior_of

_SECONDS_TO_COME_OUT = 20.0  # after a failed step: the time in which all come to the next message, or twice a step's
_REMEMBERED = 64  # steps; a rank says that it has failed long before
_CAUSE_FIRST = 0.2  # seconds: a step fails at all replicas when one of them has died, which is to be heard before


class Peers(NamedTuple):
    """Describe what joins the ranks of a replica with those of others, with which they share experts.

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
        self.began = time.monotonic()
        self.watched: dict[int, dict[str, Any]] = {}  # what each rank did, as far as they have told
        self.verdict: ModelRunnerOutput | Exception | None = None

    def result(self) -> ModelRunnerOutput:
        """Wait for the step's output.

        Raises:
            EngineDeadError: a process has ended.
            RuntimeError: the step failed; names rank and reason.
        """
        return self._executor.wait_for(self)


class MultiprocessExecutor:
    """Starts a process per rank of `config`, and is their `Executor`. All is for one thread.

    Args:
        config: resolved for the model.
        progress: called as rank 0 gets on, with (stage, how much is done, of what), see `startup_progress.py`.
        times_steps: as of `Worker`.
        peers: with which the ranks share experts; None: there are none.

    Attributes:
        num_blocks: KV blocks that every rank has.
        sentinel: readable once a process has ended without being told to.

    Raises:
        ValueError: the checkpoint or the settings are refused; one line says why and what to change.
        RuntimeError: loading failed, or a process ended (EngineDeadError).
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: StartupProgress | None = None,
        *,
        times_steps: bool = False,
        peers: Peers | None = None,
    ) -> None:
        self._config, self._progress, self._peers = config, progress, peers
        self._layout = layout_of(config)
        self._num_ranks = self._layout.num_ranks
        self._output_rank = next(r for r in range(self._num_ranks) if self._layout.coords(r).is_output_rank)
        self.max_in_flight = config.pipeline_parallel_size
        self._facts: dict[int, dict[str, Any]] = {}
        self._num_blocks: dict[int, int] = {}
        self._steps: dict[int, RemoteStep] = {}  # under way, by number
        self._is_watched = times_steps and self._layout.num_connected > 1
        self._watched: dict[int, RemoteStep] = {}  # of which some ranks have not told what they did
        self._results: dict[int, Any] = {}  # of the call under way, by rank
        self._number = 0  # of the last plan or call
        self._sampled_tokens: list[SampledTokens] = []
        self._succeeded: deque[int] = deque(maxlen=_REMEMBERED)  # numbers of steps
        self._longest = 0.0  # seconds that a step has taken
        self._ranks = lines_to_ranks(config)
        self.sentinel: int | None = self._ranks.sentinel
        try:
            self._start(times_steps)
            while len(self._num_blocks) < self._num_ranks:
                self._receive()
        except BaseException:
            self._ranks.kill()  # it may take minutes to load
            self.close()
            raise
        self.num_blocks = min(self._num_blocks.values())

    # -- as an executor ------------------------------------------------------------------------------------

    def execute(self, plan: SchedulerOutput) -> RemoteStep:
        """Send the plan to every rank; an empty one for a step that other replicas take.

        Raises:
            EngineDeadError: a process has ended.
        """
        step = RemoteStep(self, plan.step)
        step.is_told = not plan.scheduled
        encoded = encode_plan(plan, self._sampled_tokens)
        if self._peers is not None:  # only now: others wait in a step that was announced
            self._peers.lockstep.begin()
        self._write(encoded, is_plan=True)
        self._sampled_tokens.clear()
        self._steps[self._number] = step
        if self._is_watched:
            self._watched[self._number] = step
        return step

    def sample(self, step: RemoteStep) -> RemoteStep:
        """Return the step: its ranks sample without being told."""
        return step

    def wait_for(self, step: RemoteStep) -> ModelRunnerOutput:
        """Do the same as `RemoteStep.result`."""
        while step.verdict is None or self._ranks.death is not None:
            self._receive()
        if self._is_watched and isinstance(step.verdict, ModelRunnerOutput):
            while len(step.watched) < self._num_ranks:  # a moment: all have computed by now
                self._receive()
            step.verdict.ranks = [step.watched[rank] for rank in range(self._num_ranks)]
        if isinstance(step.verdict, Exception):
            if self._peers is not None:
                time.sleep(_CAUSE_FIRST)
                self._end(f"a step that all replicas took failed: {step.verdict}")
            self._meet(str(step.verdict))
            raise step.verdict
        if self.max_in_flight > 1 and not step.is_told:  # stages before the last one do not know
            self._sampled_tokens.append((step.number, step.verdict.sampled_token_ids))
            step.is_told = True
        return step.verdict

    def prepare(self, sizes: Sequence[int], is_adaptive: bool) -> Prior | None:
        """Do the same as `Runner.prepare` at all ranks; return what was timed at the output rank."""
        return prior_of(self._call("prepare", list(sizes), is_adaptive)[self._output_rank])

    def close(self) -> None:
        """End the processes, after the step under way, and wait for that."""
        self._ranks.close()

    # -- the processes -------------------------------------------------------------------------------------

    def _start(self, times_steps: bool) -> None:
        replica, meeting = (0, None) if self._peers is None else self._peers[:2]
        self._ranks.start(RankWork(self._config, replica, meeting, times_steps))

    # -- what is said to them, and what they say -----------------------------------------------------------

    def _write(self, content: bytes, *, is_plan: bool) -> None:
        self._number += 1
        self._ranks.write(ORDER.pack(is_plan, self._number) + content)

    def _receive(self, seconds: float | None = None) -> None:
        """Wait for whatever any rank sends, or for `seconds`.

        Raises:
            EngineDeadError: a process has ended.
            ValueError, RuntimeError: it cannot be loaded.
        """
        if not self._ranks.frames:
            self._ranks.receive(seconds)
        while frames := self._ranks.frames:
            self._take(*frames[0])
            frames.popleft()  # only now: an interrupt must not lose it, and to take one twice does no harm

    def _end(self, why: str) -> NoReturn:
        self._ranks.end(why)
        raise EngineDeadError(self._ranks.death or why)

    def _take(self, rank: int, kind: Kind, number: int, content: bytes) -> None:
        if kind is Kind.OUTPUT:
            step = self._steps.get(number)
            if step is not None:
                step.verdict = decode_output(content)
                self._longest = max(self._longest, time.monotonic() - step.began)
                self._succeeded.append(number)
                del self._steps[number]
            return
        said = json.loads(content)
        match kind:
            case Kind.FACTS:
                self._facts[rank] = said
                if len(self._facts) == self._num_ranks:
                    check_agreement(self._facts)
            case Kind.LOADING:
                if rank == 0 and self._progress is not None:
                    self._progress(*said)
            case Kind.READY:
                self._num_blocks[rank] = said
            case Kind.REFUSED:
                raise _refusal(rank if self._num_ranks > 1 else None, *said)
            case Kind.RESULT:
                if number == self._number:  # of a call that Ctrl-C ended it is not wanted any more
                    self._results[rank] = said
            case Kind.FAILED:
                self._fail(rank, number, said)
            case Kind.WATCHED:
                step = self._watched.get(number)
                if step is not None:
                    step.watched[rank] = said
                    if len(step.watched) == self._num_ranks:
                        del self._watched[number]

    def _fail(self, rank: int, number: int, why: str) -> None:
        """Record that a plan or a call has failed at a rank, and maybe at others, too."""
        step = self._steps.get(number)
        if step is not None:
            step.verdict = RuntimeError(f"rank {rank}: {why}")
            del self._steps[number]
        elif number in self._succeeded:
            self._end(f"rank {rank} failed in a step that the others completed: {why}")
        elif rank not in self._results and number == self._number:
            self._results[rank] = RuntimeError(f"rank {rank}: {why}")

    def _call(self, name: str, *arguments: Any, seconds: float | None = None) -> dict[int, Any]:
        """Return what each rank answers; fewer answers if there is a limit of time."""
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
        """Wait, after a failure somewhere, until all ranks are through with that step; end the engine if one is not."""
        met = self._call("meet", seconds=max(_SECONDS_TO_COME_OUT, 2 * self._longest))
        self._watched.clear()  # who failed tells nothing
        missing = [rank for rank in range(self._num_ranks) if rank not in met]
        if missing:
            self._end(f"{why}; and rank {', '.join(map(str, missing))} did not come out of that step")


def lines_to_ranks(config: EngineConfig) -> RankLines:
    """Return the lines to ranks that are not started yet, wherever the settings place them.

    Raises:
        ImportError: a package is missing; names the extra that has it.
        ValueError: it cannot be there.
    """
    if config.nnodes == 1 and config.distributed_executor_backend in (None, "mp"):
        return RankProcesses(range(config.num_ranks))
    try:
        from teachllm.worker.processes.host_plan import plan_of
        from teachllm.worker.processes.rank_hosts import RankHosts
    except ModuleNotFoundError as error:
        raise ImportError(f"ranks on other machines need {error.name}: pip install 'teachllm[serve]'") from None
    return RankHosts(plan_of(config))


def _refusal(rank: int | None, error: str, is_fault: bool, table: str | None) -> Exception:
    if table is not None:
        return NotEnoughMemoryError(error.removesuffix(f"\n{table}"), table)
    return RuntimeError(error if rank is None else f"rank {rank}: {error}") if is_fault else ValueError(error)
