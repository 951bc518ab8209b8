"""A figure of a benchmark beside the best this machine could do, and both as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from teachllm.roofline import Ceilings

if TYPE_CHECKING:
    from teachllm import LLM


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        name, unit: what it is; "ms" and "s" are times, anything else is a rate.
        value: measured.
        limit: the same at the machine's ceilings.
    """

    name: str
    unit: str
    value: float
    limit: float

    @property
    def is_time(self) -> bool:
        """Return whether less is better."""
        return self.unit in ("s", "ms")

    @property
    def of_ceiling(self) -> float:
        """Return how near the value is to its limit: 1 is there."""
        return self.limit / self.value if self.is_time else self.value / self.limit


def raise_ceilings(figures: Sequence[Figure], ceilings: Ceilings) -> tuple[list[Figure], Ceilings]:
    """Return figures and ceilings, these no lower than what was measured.

    Where a figure exceeds its limit, the ceilings were measured too low, or the model fits a cache.
    """
    excess = max(1.0, *(figure.of_ceiling for figure in figures))
    raised = [replace(each, limit=each.limit / excess if each.is_time else each.limit * excess) for each in figures]
    return raised, ceilings.scaled(excess, excess)


def as_json(
    llm: LLM, options: Any, results: dict[str, Any], figures: Sequence[Figure], ceilings: Ceilings
) -> dict[str, Any]:
    """Return what `--output-json` writes: the results under vLLM's names, then figures, ceilings and what was run."""
    return {
        **results,
        "figures": {
            f.name: {"value": f.value, "unit": f.unit, "limit": f.limit, "of_ceiling": f.of_ceiling} for f in figures
        },
        "ceilings": asdict(ceilings),
        "options": asdict(options),
        "engine": asdict(llm.config),
    }
