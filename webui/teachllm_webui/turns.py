"""Engines of one page that compute one at a time: on one machine two at once would time each other."""

from __future__ import annotations

import threading
from typing import Any

from teachllm.engine.async_llm import AsyncLLM
from teachllm.engine.llm_engine import Engine


class TakingTurns(AsyncLLM):
    """Run an engine whose steps begin when it is its turn.

    Args:
        turn: held during each step.
    """

    def __init__(self, engine: Engine, turn: threading.Lock, **settings: Any) -> None:
        self._turn = turn
        super().__init__(engine, **settings)

    def _step(self) -> None:
        if not self._turn.acquire(blocking=False):
            with self._resting():
                self._turn.acquire()
        try:
            super()._step()
        finally:
            self._turn.release()
