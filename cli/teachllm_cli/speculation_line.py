"""Speculation in a line, for every command that shows figures of an engine that speculates."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from teachllm.engine.observability.speculation_stats import Speculation


def speculation_line(found: Speculation) -> str:
    """Return how many drafts were accepted, how many steps that saved, and the time, as far as that is known."""
    stats, cost = found.stats, found.step_cost
    name = "synthetic speculation (output means nothing)" if found.is_synthetic else "speculation"
    if not stats.num_drafts:
        return f"{name}: nothing was drafted"
    accepted = f"{stats.num_accepted_tokens:,} of {stats.num_draft_tokens:,} drafted tokens accepted"
    line = f"{name}: {accepted} ({found.acceptance:.0%}), mean length {found.mean_length:.2f}"
    line += f"; {found.tokens_per_step:.2f} tokens per step instead of 1: {found.tokens_per_step:.1f} x fewer steps"
    if cost is None or found.speed_up is None:
        return f"{line}; what that does to the time was not measured"
    timed = f"{cost.ratio:.2f} plain ones ({cost.num_drafting:,} timed against {cost.num_plain:,})"
    return f"{line}; once under way a step with drafts takes {timed}: about {found.speed_up:.1f} x as fast"
