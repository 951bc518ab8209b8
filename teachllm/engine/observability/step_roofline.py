"""A step's place under the roofline, as the trace carries it."""

from __future__ import annotations

from typing import Any

from teachllm.core.scheduler_output import SchedulerOutput
from teachllm.models.model_config import ModelConfig
from teachllm.roofline import Ceilings, StepShape, Work, step_work


class StepRoofline:
    """Compute what each step of a model costs at least, and what bounds it.

    Args:
        ceilings: of the device; None where they are not known: then neither is what bound a step.
        num_devices: that share each layer, each with a part of its weights and heads.

    Attributes:
        ceilings: of all devices together, as given.
    """

    def __init__(self, model: ModelConfig, ceilings: Ceilings | None, num_devices: int = 1) -> None:
        self.ceilings = None if ceilings is None else ceilings.scaled(num_devices, num_devices)
        self._reached = self.ceilings  # those, or higher ones, where a step has come to more
        self._model = model

    def work(self, plan: SchedulerOutput, num_held: int) -> Work:
        """Return what a plan cannot do without; `num_held` as in `StepShape`."""
        scheduled_requests = plan.scheduled
        query_lens = [scheduled.num_tokens for scheduled in scheduled_requests]
        kv_lens = [scheduled.start + scheduled.num_tokens for scheduled in scheduled_requests]
        num_sampled = sum(1 + len(scheduled.draft_token_ids) for scheduled in scheduled_requests if scheduled.samples)
        return step_work(self._model, StepShape(query_lens, kv_lens, num_sampled, num_held=num_held))

    def verdict(self, work: Work, seconds: float) -> dict[str, Any]:
        """Return a step's bytes and FLOPs, seconds, floor and bound (`Work.bound`), for the trace.

        Ceilings that a step exceeds rise to what it came to, and stay there: then the verdict has them, as "raised".
        """
        if self._reached is not None and seconds > 0:  # a clock may stand still
            self._reached = work.raised(self._reached, seconds)
        ceilings = self._reached
        found: dict[str, Any] = {
            "num_bytes": work.num_bytes,
            "num_flops": work.matrix_flops + work.attention_flops,
            "seconds": seconds,
            "floor": None if ceilings is None else work.seconds(ceilings),
            "bound": None if ceilings is None else work.bound(ceilings, seconds),
        }
        if ceilings is not None and ceilings != self.ceilings:
            found["raised"] = {"read_bandwidth": ceilings.read_bandwidth, "gemm_flops": ceilings.gemm_flops}
        return found
