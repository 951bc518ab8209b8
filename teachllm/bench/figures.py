"""A figure of a benchmark beside the best this machine could do, and both as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from teachllm.roofline import Ceilings

if TYPE_CHECKING:
    from teachllm import LLM


_ROUNDING = 1e-9  # relative


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


def within_ceilings(
    llm: LLM, figures_under: Callable[[Ceilings], list[Figure]], measured: Ceilings
) -> tuple[list[Figure], Ceilings]:
    """Return figures and the ceilings that they keep to, see `raise_ceilings`.

    With speculation these stay as measured: it needs fewer steps than the ceilings count.
    """
    if llm.config.speculative_config is not None:
        return figures_under(measured), measured
    return raise_ceilings(figures_under, measured)


def raise_ceilings(
    figures_under: Callable[[Ceilings], list[Figure]], ceilings: Ceilings
) -> tuple[list[Figure], Ceilings]:
    """Return figures and the ceilings that they keep to: as measured, or higher where a figure exceeds its limit.

    Then the ceilings were measured too low, or the model fits a cache. Bandwidth is raised alone if that is enough, or
    else FLOPs, or else both.

    Args:
        figures_under: the figures with their limits under given ceilings.
    """
    figures = figures_under(ceilings)
    excess = max((figure.of_ceiling for figure in figures), default=1.0)
    if excess <= 1.0:
        return figures, ceilings
    for raised in (ceilings.scaled(excess, 1.0), ceilings.scaled(1.0, excess), ceilings.scaled(excess, excess)):
        figures = figures_under(raised)
        if max(figure.of_ceiling for figure in figures) <= 1.0 + _ROUNDING:
            break
    return figures, raised


def as_json(
    llm: LLM,
    options: Any,
    results: dict[str, Any],
    figures: Sequence[Figure],
    ceilings: Ceilings,
    measured: Ceilings,
) -> dict[str, Any]:
    """Return what `--output-json` writes: the results under vLLM's names, then figures, ceilings and what was run."""
    return {
        **results,
        "figures": {
            f.name: {"value": f.value, "unit": f.unit, "limit": f.limit, "of_ceiling": f.of_ceiling} for f in figures
        },
        "ceilings": asdict(ceilings),
        "measured_ceilings": asdict(measured),
        "options": asdict(options),
        "engine": asdict(llm.config),
    }
