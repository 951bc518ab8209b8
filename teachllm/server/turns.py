"""Turns: long work in the event loop, in which everything else goes on."""

from __future__ import annotations

import asyncio
import time

_LONGEST = 0.005  # seconds until others have a turn


class Turns:
    """Lets others have their turns in the course of a loop: await `pass_on` in each of its rounds."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def pass_on(self) -> None:
        """Waits a turn if this work has gone on for long enough."""
        if time.perf_counter() - self._began > _LONGEST:
            await asyncio.sleep(0)
            self._began = time.perf_counter()
