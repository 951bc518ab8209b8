"""Memory that the C library has left over from long answers, between what is still in use, goes back to the system."""

from __future__ import annotations

import asyncio
import ctypes

_INTERVAL = 5.0  # seconds


async def give_back_freed_memory() -> None:
    """Asks for it now and then, until cancelled; some milliseconds each time.

    glibc gives back by itself what lies at the end of its heap, and keeps what lies between: after every kind of long
    answer has been there once, that is some megabytes. Other C libraries have no `malloc_trim` and need none.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await asyncio.sleep(_INTERVAL)
        trim(0)
