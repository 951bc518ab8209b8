"""An executor that makes the engine run ahead on a CPU, and may propose drafts, good and bad ones.

Up to `depth` plans are in flight at once, as on a device that is still busy or has several stages: until their
results are asked for, the engine plans with tokens it does not know.
"""

from __future__ import annotations

from collections.abc import Callable

from teachllm.config import EngineConfig
from teachllm.worker.executor import Executor
from tests.worker.engines import DraftingExecutor

Guess = Callable[[str, int], list[int]]


def withheld(depth: int, guess: Guess | None = None) -> Callable[[EngineConfig, Executor], Executor]:
    """For `Engine(make_executor=...)`; `guess` as in `DraftingExecutor`."""

    def make(config: EngineConfig, inner: Executor) -> Executor:
        executor = inner if guess is None else DraftingExecutor(inner, guess)
        executor.max_in_flight = depth
        return executor

    return make
