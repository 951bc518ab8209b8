"""A number that the reader commits to before the engine says it."""

from __future__ import annotations

from dataclasses import dataclass

from teachllm_lessons.picture import short


@dataclass(frozen=True)
class Prediction:
    """Describe what was said, and what came of it."""

    question: str
    said: float | None
    found: float
    unit: str
    is_close: bool

    def _repr_markdown_(self) -> str:
        found = f"**{_number(self.found)}{self.unit}**"
        if self.said is None:
            return f"{self.question} The engine says {found}. (Put your number in the cell before you run it.)"
        said = f"You said {_number(self.said)}{self.unit}"
        if self.is_close:
            return f"✓ {self.question} {said}; the engine says {found}."
        return f"✗ {self.question} {said}; the engine says {found}: worth a second look before you go on."

    def __repr__(self) -> str:
        return self._repr_markdown_().replace("**", "")


def predict(question: str, said: float | None, found: float, unit: str = "", *, within: float = 0.0) -> Prediction:
    """Compares a prediction with what the engine says.

    Args:
        said: the reader's number; None: none yet.
        found: the live engine's.
        unit: printed behind numbers, with its space.
        within: how far from it is close enough, as a share of it.
    """
    is_close = said is not None and abs(said - found) <= within * abs(found)
    return Prediction(question, said, found, unit, is_close)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else short(value)
