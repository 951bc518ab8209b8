"""What all who wait for an engine hear when it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from teachllm.worker.errors import EngineDeadError


async def all_hear_that(why: str, streams: Sequence[AsyncGenerator[Any]]) -> None:
    """Reads streams to their end, which for each is an error that says why; all within five seconds."""
    began = time.monotonic()
    for stream in streams:
        with pytest.raises(EngineDeadError, match=why):
            async with asyncio.timeout(5):
                async for _ in stream:
                    pass
        await stream.aclose()
    assert time.monotonic() - began < 5
