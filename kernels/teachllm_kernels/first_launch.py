"""Notice a kernel's first launch, above all where it must not happen: while a CUDA graph is recorded.

The first launch of a kernel compiles it, or finds it on disk, and loads it; and it makes the tensors that the kernel
keeps from launch to launch. The driver refuses the former while a graph is recorded. The latter would be worse: the
recording would hold that the tensor is filled, nothing would fill it now, and another graph might read it first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

try:
    from triton import knobs
except ImportError:  # nor is there anything to record
    knobs = None

__all__ = ["FirstLaunchError", "kept", "observing_first_launches", "refusing_first_launches"]

_refusing = threading.local()


class FirstLaunchError(RuntimeError):
    """A kernel was launched for the first time, and nothing could be loaded or made for it."""


class _Listeners:
    """Call several listeners, and the one that was set before, though Triton calls only one.

    Listeners may be added and removed in any order and by any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[Callable[..., None]] = []
        self._before: Callable[..., None] | None = None

    @contextmanager
    def hearing(self, listener: Callable[..., None]) -> Iterator[None]:
        """Inside, the listener is called too."""
        with self._lock:
            if not self._all:
                self._before, knobs.compilation.listener = knobs.compilation.listener, self._call
            self._all.append(listener)
        try:
            yield
        finally:
            with self._lock:
                self._all.remove(listener)
                if not self._all and knobs.compilation.listener == self._call:
                    knobs.compilation.listener = self._before

    def _call(self, **compilation: Any) -> None:
        for listener in ([] if self._before is None else [self._before]) + list(self._all):
            listener(**compilation)


_listeners = _Listeners()


@contextmanager
def observing_first_launches(observe: Callable[[str, bool], None]) -> Iterator[None]:
    """Inside, `observe` is called at each first launch, with the kernel's name and whether it was found on disk."""
    if knobs is None:
        yield
        return

    def listen(**compilation: Any) -> None:
        observe(compilation["src"].name, bool(compilation["cache_hit"]))

    with _listeners.hearing(listen):
        yield


@contextmanager
def refusing_first_launches() -> Iterator[None]:
    """Inside, a launch from this thread of a kernel that is not loaded raises.

    Raises:
        FirstLaunchError: at such a launch.
    """
    if knobs is None:
        yield
        return
    here = threading.get_ident()

    def refuse(**compilation: Any) -> None:
        if threading.get_ident() == here:
            raise FirstLaunchError(f"{compilation['src'].name} was launched for the first time")

    with _listeners.hearing(refuse):
        _refusing.is_on = True
        try:
            yield
        finally:
            _refusing.is_on = False


def kept(make: Callable[[torch.device], torch.Tensor]) -> Callable[[torch.device], torch.Tensor]:
    """Make a tensor once for each device, for a kernel that keeps it from launch to launch.

    Raises:
        FirstLaunchError: it would be made inside of `refusing_first_launches`.
    """

    @cache
    def made(device: torch.device) -> torch.Tensor:
        if getattr(_refusing, "is_on", False):
            raise FirstLaunchError(f"{make.__module__} would make a tensor that it keeps")
        return make(device)

    return made
