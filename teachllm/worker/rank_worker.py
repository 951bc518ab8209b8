"""Worker: what one rank does, whoever started it.

Every rank is given every plan, computes its part, and keeps its own rows and KV cache; what the ranks tell each other
in between they do by collectives. All know what was sampled in the end, and one says it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from teachllm.config import EngineConfig
from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from teachllm.distributed.connect import connected
from teachllm.distributed.layout import RankCoords
from teachllm.distributed.ranks import ALONE
from teachllm.distributed.rendezvous import Rendezvous
from teachllm.models.model_config import load_model_config
from teachllm.spec_decode.load import load_drafter_config
from teachllm.spec_decode.step_times import Prior
from teachllm.startup_progress import StartupProgress
from teachllm.worker.cpu.model_runner import ModelRunner
from teachllm.worker.executor import InProcessExecutor
from teachllm.worker.processes.plan_codec import SampledTokens
from teachllm.worker.rank_watch import RankWatch, WatchedStep
from teachllm.worker.runner import PendingOutput, ReadyOutput, Runner


class Worker:
    """A rank's model, KV cache and rows.

    Args:
        config: resolved for the model; `device` is this rank's own.
        coords: where it stands among the ranks.
        rendezvous: where they meet; None: it is alone.
        progress: called with (stage, how much is done, of what), see `startup_progress.py`.
        times_steps: outputs say how long their steps took, on a GPU, and elsewhere what load experts had; and one of
            several ranks watches what it does.

    Attributes:
        num_blocks: KV blocks it has.

    Raises:
        ValueError: the checkpoint or the settings are refused; one line says why and what to change.
    """

    def __init__(
        self,
        config: EngineConfig,
        coords: RankCoords,
        rendezvous: Rendezvous | None = None,
        progress: StartupProgress | None = None,
        *,
        times_steps: bool = False,
    ) -> None:
        assert (rendezvous is not None) == (coords.layout.num_connected > 1)
        self._device = device = torch.device(config.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # before anything makes a context on another one
        model = load_model_config(config, device.type)
        drafter = load_drafter_config(config, model, device.type)
        self._leaving = contextlib.ExitStack()
        ranks = ALONE
        if rendezvous is not None:
            ranks = self._leaving.enter_context(connected(coords, rendezvous, device))
        self._runner: Runner[Any]
        if device.type == "cuda":
            from teachllm.worker.gpu.gpu_model_runner import GPUModelRunner

            self._runner = GPUModelRunner(config, model, device, progress, drafter, ranks)
        else:
            self._runner = ModelRunner(config, model, device, progress, drafter, ranks)
        self._runner.observe(times_steps)
        self._watch: RankWatch | None = None
        self._watched: WatchedStep | None = None
        if times_steps and rendezvous is not None:
            self._watch = RankWatch(coords, ranks.world.traffic, device)
        self._is_output_rank, self._receives_tokens = coords.is_output_rank, not coords.is_last_stage
        self._executor: InProcessExecutor[Any] = InProcessExecutor(self._runner)
        self.num_blocks = self._executor.num_blocks

    def receive_sampled_tokens(self, sampled_tokens: Sequence[SampledTokens]) -> None:
        """Receive what was sampled in earlier steps, and is known since the plan before the next one."""
        if self._receives_tokens:
            for step, sampled_token_ids in sampled_tokens:
                self._runner.receive_sampled_tokens(step, sampled_token_ids)

    def execute(self, plan: SchedulerOutput) -> PendingOutput | None:
        """Compute a plan, or on a GPU launch that. An empty one is a step that other replicas take.

        Returns:
            The pending output, at the output rank; None at any other.
        """
        pending: PendingOutput
        if self._watch is not None:
            self._watch.begin()
        if plan.scheduled:
            pending = self._executor.sample(self._executor.execute(plan))
        else:
            self._runner.execute_dummy_step()
            pending = ReadyOutput(ModelRunnerOutput([]))
        if self._watch is not None:
            self._watched = self._watch.end(pending)
        return pending if self._is_output_rank else None

    def take_watched(self) -> WatchedStep | None:
        """Return once what it did in the executed step; None if that failed, or is not watched."""
        watched, self._watched = self._watched, None
        return watched

    def prepare(self, sizes: Sequence[int], is_adaptive: bool) -> Prior | None:
        """Do the same as `Runner.prepare`."""
        return self._runner.prepare(sizes, is_adaptive)

    def wait(self) -> None:
        """Wait until all that was launched is over: it never is where it waits for a rank that has failed."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Release memory."""
        self._executor.close()
        self._leaving.close()
