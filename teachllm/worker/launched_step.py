"""A step that a GPU has been told to compute, and its output on the way to the host.

Nothing here waits but `PendingStep.result`. Where steps are timed, events mark on the device when a step began and when
its output was there: the host's clock would count its own delays as the device's work, and miss work behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from teachllm.core.scheduler_output import ModelRunnerOutput, TokenLogprobs
from teachllm.sampling.sampler import SamplerOutput
from teachllm.worker.device_batch import DeviceStep


@dataclass(slots=True)
class LaunchedStep:
    """A step under way.

    Attributes:
        rows: the request row of each that samples.
        variant: of the sampler, see `Sampler.plain_variant`.
        logits: [num_sampling or more, vocab_size]; None if nothing is left to sample.
        output: [num_sampling or more] int32 on the host, where sampled ids arrive; used again a few steps later, see
            `DeviceBatch.output`.
        prompt_logprobs: of each request, as `ModelRunnerOutput` has them; None: nobody asked.
        graph_mode: as `ModelRunnerOutput` has it.
        began: from when on it is timed, if it is.
    """

    step: DeviceStep
    rows: list[int]
    variant: tuple[bool, bool] | None
    logits: torch.Tensor | None
    output: torch.Tensor
    prompt_logprobs: list[list[TokenLogprobs] | None] | None
    graph_mode: str
    began: torch.cuda.Event | None = None


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

    def result(self) -> ModelRunnerOutput:
        """Waits for the device. To be asked for before `launched.output` is used again."""
        self.is_taken = True
        self.arrived.synchronize()
        step, began = self._launched.step, self._launched.began
        seconds = None if began is None else began.elapsed_time(self.arrived) / 1000
        sampled: list[list[int]] = [[] for _ in step.rows]
        logprobs: list[list[TokenLogprobs] | None] = [None for _ in step.rows]
        token_ids = self._launched.output[: len(step.sampling)].tolist()
        entries = logprobs_of(self._outputs)
        for order, (index, token_id) in enumerate(zip(step.sampling, token_ids, strict=True)):
            sampled[index] = [token_id]
            entry = entries[order] if entries else None
            logprobs[index] = None if entry is None else [entry]
        scores, mode = self._launched.prompt_logprobs, self._launched.graph_mode
        return ModelRunnerOutput(sampled, logprobs if entries else None, scores, seconds=seconds, graph_mode=mode)


def logprobs_of(outputs: Sequence[SamplerOutput]) -> list[TokenLogprobs | None] | None:
    """Of all that sampled, one after the other, as `SamplerOutput.logprobs`; None if nobody asked."""
    if not any(output.pending for output in outputs):
        return None
    return [entry for output in outputs for entry in output.logprobs or [None] * len(output.token_ids)]
