"""Settings of the C library that a CPU worker is faster with."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt's names for them, from malloc.h


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory instead of giving it back to the system.

    A step allocates and frees the same few megabytes in every layer (gathered K and V, scores). By default glibc
    returns each at once and the next step faults it in again page by page, which costs more than filling it.
    Other C libraries have no `mallopt` and need none.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 25)
        mallopt(_TRIM_THRESHOLD, 1 << 30)
