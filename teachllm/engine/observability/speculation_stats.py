"""Measure what speculation was worth: how many drafts were accepted, how many steps that saved, and how much time.

acceptance         accepted drafts / drafted tokens
mean length        tokens that a verification of drafts yields: 1 + accepted drafts / verifications
tokens per step    of a request, over all steps that gave it any: 1 without speculation, so this many times fewer
speed-up           the same in time: steps with drafts take longer, by as much as the engine has timed
"""

from __future__ import annotations

from dataclasses import dataclass

from teachllm.engine.observability.stats import StepStats
from teachllm.spec_decode.draft_length import StepCost


@dataclass(frozen=True, slots=True)
class Speculation:
    """Sum up the speculation of some stretch of an engine's work.

    Attributes:
        stats: counted in it.
        step_cost: what a step with drafts takes, as far as the engine has timed both kinds; None: it has not.
        is_synthetic: drafts were accepted at random, for a benchmark.
    """

    stats: StepStats
    step_cost: StepCost | None
    is_synthetic: bool = False

    @property
    def acceptance(self) -> float:
        """Return the acceptance rate, from 0 to 1; 0 if nothing was drafted."""
        return self.stats.num_accepted_tokens / max(self.stats.num_draft_tokens, 1)

    @property
    def mean_length(self) -> float:
        """Return the mean length; 1 if nothing was drafted."""
        return 1 + self.stats.num_accepted_tokens / max(self.stats.num_drafts, 1)

    @property
    def tokens_per_step(self) -> float:
        return self.stats.num_generation_tokens / max(self.stats.num_samplings, 1)

    @property
    def speed_up(self) -> float | None:
        """Estimate the speed-up of the same tokens over plain steps; all steps that verified nothing count as plain."""
        if self.step_cost is None or not self.stats.num_samplings:
            return None
        num_plain = self.stats.num_samplings - self.stats.num_drafts
        return self.stats.num_generation_tokens / (num_plain + self.stats.num_drafts * self.step_cost.ratio)

    def as_json(self) -> dict[str, float | bool | None]:
        """Return counts by the names of `StepStats`, the figures, and whether they are synthetic."""
        counts = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        figures = ("acceptance", "mean_length", "tokens_per_step", "speed_up")
        counted: dict[str, float | bool | None] = {name: getattr(self.stats, name) for name in counts}
        return counted | {name: getattr(self, name) for name in figures} | {"is_synthetic": self.is_synthetic}
