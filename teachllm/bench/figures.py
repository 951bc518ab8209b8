"""A figure of a benchmark beside the best this machine could do, and both as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
    def of_ceiling(self) -> float:
        """Return how near the value is to its limit: 1 is there."""
        is_time = self.unit in ("s", "ms")
        return self.limit / self.value if is_time else self.value / self.limit


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
