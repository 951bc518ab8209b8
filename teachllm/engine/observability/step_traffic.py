"""Compute what ranks have to send in a step, as the trace carries it beside what they sent.

What goes beyond it is for more than tokens: log-probabilities, rows that are gathered whole, a drafter, padding on a
GPU, and of a mixture in stages the load of its experts, for the trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from teachllm.config import EngineConfig
from teachllm.core.request import Request
from teachllm.core.scheduler_output import SchedulerOutput
from teachllm.distributed.group import Counts
from teachllm.distributed.layout import layout_of
from teachllm.distributed.step_bytes import step_bytes
from teachllm.models.model_config import DTYPE_BYTES, ModelConfig
from teachllm.models.own_model import model_of_rank
from teachllm.sampling.shared_filters import MOST_CANDIDATES


class StepTraffic:
    """Compute what each rank of an engine has to send.

    Args:
        config: with more than one rank, or experts that replicas share.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig) -> None:
        layout = layout_of(config)
        self._all_coords = [layout.coords(rank) for rank in range(layout.num_ranks)]
        firsts = [layout.coords(layout.stage(stage)[0]) for stage in range(layout.pipeline)]
        self._stages = [model_of_rank(model, coords) for coords in firsts]  # ranks of a stage have equal layers
        self._is_on_gpu = config.device.startswith("cuda")
        self._dtype_bytes, self._vocab_size = DTYPE_BYTES[model.dtype], model.vocab_size
        self._shard_size = -(-model.vocab_size // layout.tensor)  # columns of the logits that a rank has
        self._spreads = layout.replicas > 1

    def expected(self, plan: SchedulerOutput, requests: Mapping[str, Request]) -> list[Counts]:
        """Return `step_bytes` of each rank. What goes to other replicas' experts is not known beforehand and left out,
        as is what sampling on a GPU takes.

        Args:
            requests: the requests that have not ended. Whether others have filters is not known.
        """
        num_sampled, filtered = 0, []
        for scheduled in plan.scheduled:
            if scheduled.samples:
                num_rows = 1 + len(scheduled.draft_token_ids)
                num_sampled += num_rows
                filtered += [self._num_candidates(requests.get(scheduled.request_id))] * num_rows
        filtered = [each for each in filtered if each]
        found = []
        for coords in self._all_coords:
            part = self._stages[coords.stage]
            num_told = min(max(filtered, default=0), MOST_CANDIDATES, self._shard_size)
            num_spread = part.experts.num_layers if self._spreads and part.experts is not None else 0
            counts = step_bytes(
                coords,
                num_layers=part.num_layers,
                hidden_size=part.hidden_size,
                dtype_bytes=self._dtype_bytes,
                num_tokens=plan.num_tokens,
                num_sampled=num_sampled,
                num_filtered=len(filtered),
                num_told=num_told,
                rows=[(0, 0)] * num_spread,
            )
            for unknown in ("all_to_all", *(["all_gather"] if self._is_on_gpu else [])):
                counts.pop(unknown, None)
            found.append(counts)
        return found

    def _num_candidates(self, request: Request | None) -> int:
        """Return how many tokens a request's filters may leave; 0: it has none, or draws nothing."""
        if request is None or not request.sampling_params.has_filter(self._vocab_size):
            return 0
        return request.sampling_params.num_candidates(self._vocab_size)
