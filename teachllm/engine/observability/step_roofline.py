"""A step's place under the roofline, as the trace carries it."""

from __future__ import annotations

from typing import Any

from teachllm.core.scheduler_output import SchedulerOutput
from teachllm.models.model_config import ModelConfig
from teachllm.roofline import Ceilings, Step, Work, step_work


class StepRoofline:
    """What each step of a model costs at least, and what bound it.

    Args:
        ceilings: of the device; None where they are not known: then neither is what bound a step.
    """

    def __init__(self, model: ModelConfig, ceilings: Ceilings | None) -> None:
        self.ceilings = ceilings
        self._model = model

    def work(self, plan: SchedulerOutput, num_held: int) -> Work:
        """What a plan cannot do without; `num_held` as in `Step`."""
        shares = plan.scheduled
        query_lens = [share.num_tokens for share in shares]
        kv_lens = [share.start + share.num_tokens for share in shares]
        num_sampled = sum(1 + len(share.draft_token_ids) for share in shares if share.samples)
        return step_work(self._model, Step(query_lens, kv_lens, num_sampled, num_held=num_held))

    def verdict(self, work: Work, seconds: float) -> dict[str, Any]:
        """For the trace: bytes and FLOPs of a step, the seconds that it took, its floor, its bound (`Work.bound`)."""
        ceilings = self.ceilings
        return {
            "num_bytes": work.num_bytes,
            "num_flops": work.matrix_flops + work.attention_flops,
            "seconds": seconds,
            "floor": None if ceilings is None else work.seconds(ceilings),
            "bound": None if ceilings is None else work.bound(ceilings, seconds),
        }
