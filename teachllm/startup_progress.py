"""Tell how far an engine is on its way from the first weight to the first request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

# Bytes of weights; kernels that are compiled, and CUDA graphs that are recorded, on a GPU.
StartupStage: TypeAlias = Literal["weights", "kernels", "graphs"]
StartupProgress: TypeAlias = Callable[[StartupStage, int, int], None]  # called with (stage, how much is done, of what)


def nobody_listens(stage: StartupStage, done: int, total: int) -> None:
    """Stand for a `StartupProgress` where nobody wants to know."""
