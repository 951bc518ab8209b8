"""A number that the reader commits to before the engine computes it.

A lesson's helpers declare the prediction: what it asks, what the answer is, why, and which misconceptions lead to which
wrong numbers. A notebook hands over the reader's number and the live engine's. Until there is a number, nothing of the
answer is shown, so a committed notebook gives nothing away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from teachllm_lessons.picture import short

PREDICTION_TYPE = "application/vnd.teachllm.prediction+json"  # a notebook's output says with it how far the reader is
_TRAP_WIDTH = 0.02  # where rounding is allowed, a number within this share of a trap was reached by its misconception
_TRAP_ITSELF = 0.005  # within this share it is wrong, even where the answer is near
_MARKS = {"right": "✓", "wrong": "✗", "open": "…"}


@dataclass(frozen=True)
class Prediction:
    """A question with a number as its answer, which the reader can derive from what stands before it.

    Attributes:
        asks: what is counted, as a label: "Blocks after the first step".
        answer: the number, as the engine computes it in the committed notebook.
        because: how to derive it, shown after the reader's number; `{name}` takes values given to `compare`.
        unit: printed after numbers.
        within: how far from the answer is close enough, as a share of it; 0: exactly.
        traps: what a wrong number says of how it was reached, by that number.
    """

    asks: str
    answer: float
    because: str
    unit: str = ""
    within: float = 0.0
    traps: Mapping[float, str] = field(default_factory=dict)

    def compare(self, yours: float | None, found: float, **values: Any) -> PredictionVerdict:
        """Return what the reader's number is worth.

        Args:
            yours: the reader's number; None: there is none yet, and nothing of the answer is shown.
            found: the live engine's number.
            values: fill the gaps of `because`.

        Raises:
            ValueError: the engine computes another number than the lesson expects.
        """
        if not self._is_near(found):
            raise ValueError(f"{self.asks}: the engine computes {found}, and this lesson expects {self.answer}")
        if yours is None:
            text = f"**{self.asks}:** put your number in the place of `None`, and run the cell again."
            return PredictionVerdict("open", text)
        because = self.because.format(**values)
        said, engine = self._number(yours), f"The engine computes **{self._number(found)}**."
        trap = min(self.traps, key=lambda number: abs(number - yours), default=math.nan)
        is_trap = abs(yours - trap) <= (_TRAP_ITSELF * abs(trap) if self.within else 0.0)
        if abs(yours - found) <= self.within * abs(found) and not is_trap:
            return PredictionVerdict("right", f"**{self.asks}: {said}.** {engine} {because}")
        told = self.traps[trap] if is_trap or self._is_beside(yours, trap) else ""
        return PredictionVerdict("wrong", " ".join(filter(None, [f"**{self.asks}: {said}?**", told, engine, because])))

    def _is_beside(self, yours: float, trap: float) -> bool:
        """Return whether a number is a trap's but for rounding, where the answer may be rounded, too."""
        width = min(_TRAP_WIDTH * abs(trap), abs(trap - self.answer) / 2) if self.within else 0.0
        return abs(yours - trap) <= width

    def _is_near(self, found: float) -> bool:
        return abs(found - self.answer) <= max(self.within, 1e-6) * abs(self.answer)

    def _number(self, value: float) -> str:
        return (f"{value:,}" if isinstance(value, int) else short(value)) + self.unit


@dataclass(frozen=True)
class PredictionVerdict:
    """The verdict on a number, as Markdown in a notebook."""

    verdict: Literal["right", "wrong", "open"]
    text: str

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        said = f"{_MARKS[self.verdict]} {self.text}"
        return {"text/plain": repr(self), "text/markdown": said, PREDICTION_TYPE: {"verdict": self.verdict}}

    def __repr__(self) -> str:
        return f"{_MARKS[self.verdict]} {self.text}".replace("**", "").replace("`", "")
