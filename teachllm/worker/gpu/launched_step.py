"""A step that a GPU has been told to compute, and its output on the way to the host.

Nothing here waits but `PendingStep.result`. Where steps are timed, events mark on the device when a step began and when
its output was there: the host's clock would count its own delays as the device's work, and miss work behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from teachllm.core.scheduler_output import ModelRunnerOutput, TokenLogprobs
from teachllm.sampling.sampler import SamplerOutput
from teachllm.worker.gpu.device_step import DeviceStep


@dataclass(slots=True)
class LaunchedStep:
    """A step under way.

    Attributes:
        rows: the request row of each position that is sampled from.
        variant: of the sampler, see `Sampler.plain_variant`.
        logits: [num_logits or more, vocab_size]; None if nothing is left to sample.
        output: int32 on the host, where sampled ids arrive, `num_fields` numbers for each that samples; used again a
            few steps later, see `DeviceBatch.output`.
        prompt_logprobs: of each request, as `ModelRunnerOutput` has them; None: not asked for.
        graph_mode: as `ModelRunnerOutput` has it.
        began: from when on it is timed, if it is.
        num_fields: of `output`, see `DeviceBatch`.
        to_draft: what is still to be launched: the drafter, told whether any request samples at random.
    """

    step: DeviceStep
    rows: list[int]
    variant: tuple[bool, bool] | None
    logits: torch.Tensor | None
    output: torch.Tensor
    prompt_logprobs: list[list[TokenLogprobs] | None] | None
    graph_mode: str
    began: torch.cuda.Event | None = None
    num_fields: int = 1
    to_draft: Callable[..., None] | None = None


class PendingStep:
    """A step's output on its way to the host.

    Args:
        launched: the step, after its sampling was launched.
        outputs: what the sampler made of those that sample, in order, if it was asked for more than ids.

    Attributes:
        is_taken: the host has asked for it.
        arrived: it is there, and the step done.
    """

    def __init__(self, launched: LaunchedStep, outputs: Sequence[SamplerOutput] = ()) -> None:
        self._launched = launched
        self._outputs = outputs
        self.is_taken = False
        self.arrived = torch.cuda.Event(enable_timing=launched.began is not None)
        self.arrived.record()

    def seconds(self) -> float | None:
        """Wait for the device and return how long the step took; None if it was not timed."""
        self.is_taken = True
        self.arrived.synchronize()
        began = self._launched.began
        return None if began is None else began.elapsed_time(self.arrived) / 1000

    def seconds_until(self, moment: torch.cuda.Event) -> float:
        """Return the seconds from the beginning of the step, which has been waited for and is timed."""
        assert self._launched.began is not None
        return self._launched.began.elapsed_time(moment) / 1000

    def result(self) -> ModelRunnerOutput:
        """Wait for the device and return the output. Call it before `launched.output` is used again."""
        seconds, step = self.seconds(), self._launched.step
        sampled: list[list[int]] = [[] for _ in step.rows]
        logprobs: list[list[TokenLogprobs] | None] = [None for _ in step.rows]
        num_fields = self._launched.num_fields
        told = self._launched.output[: len(step.sampling) * num_fields].view(-1, num_fields).tolist()
        entries = logprobs_of(self._outputs)
        num_drafted = [0] * len(step.rows)
        first = 0
        for order, index in enumerate(step.sampling):
            if num_fields == 1:
                sampled[index] = told[order]
                path: list[int] = []
            else:
                count, num_drafted[index], *token_ids = told[order]
                sampled[index], path = token_ids[:count], token_ids[len(token_ids) // 2 + 1 :][: count - 1]
            if entries and entries[first] is not None:
                at = [first, *(first + 1 + node for node in path)]
                logprobs[index] = [entry for i in at if (entry := entries[i]) is not None]
            first += 1 + (step.num_drafts[order] if step.num_drafts else 0)
        return ModelRunnerOutput(
            sampled,
            logprobs if entries else None,
            self._launched.prompt_logprobs,
            num_drafted=None if num_fields == 1 else num_drafted,
            seconds=seconds,
            graph_mode=self._launched.graph_mode,
        )


def logprobs_of(outputs: Sequence[SamplerOutput]) -> list[TokenLogprobs | None] | None:
    """Return the entries of all outputs, one after the other, as `SamplerOutput.logprobs`; None if not asked for."""
    if not any(output.pending for output in outputs):
        return None
    return [entry for output in outputs for entry in output.logprobs or [None] * len(output.token_ids)]
