"""Report how far an engine's start has come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

# Bytes of weights; kernels that are compiled, and CUDA graphs that are recorded, on a GPU.
StartupStage: TypeAlias = Literal["weights", "kernels", "graphs"]
StartupProgress: TypeAlias = Callable[[StartupStage, int, int], None]  # called with (stage, how much is done, of what)


def ignore_progress(stage: StartupStage, done: int, total: int) -> None:
    """Do nothing, as a `StartupProgress`."""
