"""Predict how long a step takes: the roofline's floor at the speed that kernels reach, and fixed costs.

    device  floor at a share of each ceiling + layers x the time in which a layer's kernels start
    host    a fixed time and one for each request: schedule, launch and update together

The defaults are fitted to docs/performance.md, see `StepCosts`. Against its first table steps come out within 7%, the
throughput of `mixed` 13% high, that of `batch64`'s prompts up to 20. Of K and V that requests share each reads its own,
while a GPU finds some of it in its L2 cache: `shared` takes up to 1.8 times as long as it should.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from typing import Protocol

from teachllm.core.scheduler_output import SchedulerOutput
from teachllm.engine.observability.step_roofline import StepRoofline
from teachllm.models.model_config import ModelConfig
from teachllm.roofline import Ceilings


class CostModel(Protocol):
    """Define what a simulation needs to know of time. Asked again about the same plan, the answer must be the same."""

    def device_seconds(self, plan: SchedulerOutput) -> float:
        """From the start of a step on the device until its tokens are known; more than 0."""

    def host_seconds(self, plan: SchedulerOutput) -> float:
        """That the host spends on a step: schedule, launch and update together."""


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Describe what is lost between the floor and a step.

    From the first table of docs/performance.md: `single`, `batch64` and `long` steps give `of_bandwidth` and
    `decode_layer`, `prefill16k` gives `of_compute`, the first token of `single` `prompt_layer`; both models agree.
    The last row of "Where the time goes" there gives the host's.

    Attributes:
        of_bandwidth, of_compute: the share of each ceiling that kernels reach, in (0, 1].
        decode_layer: seconds per layer to start kernels, in a step of decodes alone (one CUDA graph).
        prompt_layer: the same in a step with prompt tokens, which launches more kernels one by one.
        host_step, host_request: seconds of the host, for each step and for each request in it.

    Raises:
        ValueError: a share is not in (0, 1], or a time is negative.
    """

    of_bandwidth: float = 0.96
    of_compute: float = 0.85
    decode_layer: float = 12e-6
    prompt_layer: float = 57e-6
    host_step: float = 180e-6
    host_request: float = 5e-6

    def __post_init__(self) -> None:
        for name, value in ((field.name, getattr(self, field.name)) for field in fields(self)):
            if name.startswith("of_") and not 0.0 < value <= 1.0:
                raise ValueError(f"{name}={value}: must be in (0, 1], the share of the ceiling that kernels reach")
            if value < 0.0:
                raise ValueError(f"{name}={value}: must be 0 seconds or more")


class RooflineCost:
    """The cost model of this file's first lines.

    Args:
        ceilings: of the device, for the model's dtype.

    Raises:
        ValueError: they are for another dtype.
    """

    def __init__(self, model: ModelConfig, ceilings: Ceilings, costs: StepCosts | None = None) -> None:
        if ceilings.dtype != model.dtype:
            raise ValueError(
                f"the ceilings of {ceilings.device} are for {ceilings.dtype} and the model is in {model.dtype}: "
                f"give ceilings for {model.dtype}, or the model's shape in {ceilings.dtype}"
            )
        self._costs = costs or StepCosts()
        self._num_layers = model.num_layers
        self._reached = replace(
            ceilings,
            read_bandwidth=ceilings.read_bandwidth * self._costs.of_bandwidth,
            gemm_flops=ceilings.gemm_flops * self._costs.of_compute,
            attention_flops=ceilings.attention_flops * self._costs.of_compute,
        )
        self._roofline = StepRoofline(model, self._reached)

    def device_seconds(self, plan: SchedulerOutput) -> float:
        decodes = all(
            scheduled.samples and scheduled.num_tokens == 1 + len(scheduled.draft_token_ids)
            for scheduled in plan.scheduled
        )
        layer = self._costs.decode_layer if decodes else self._costs.prompt_layer
        work = self._roofline.work(plan, num_held=sys.maxsize)
        return work.seconds(self._reached) + self._num_layers * layer

    def host_seconds(self, plan: SchedulerOutput) -> float:
        return self._costs.host_step + len(plan.scheduled) * self._costs.host_request
