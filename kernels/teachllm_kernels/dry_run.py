"""Run a step on meta tensors as a named card would: every allocation is made, and no kernel is launched.

A meta tensor has a shape and no memory. Code that runs on meta tensors allocates what it would on a GPU, so counting
the bytes predicts a step's memory before there is anything on the GPU, or without one. Two things stand in the way, and
this module removes them: a Triton kernel cannot read a tensor without memory, and which kernel runs (so, what is
allocated) depends on the card.

    dry_run             this thread's launches return at once, and the meta device stands for a card
    compute_capability  asks a GPU, or names the card for which the meta device stands
    per_device          remembers an answer for each device, and one for each card for which the meta device stands

PyTorch's own operations need nothing: PyTorch implements them for meta tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from threading import RLock
from typing import Any, Generic, TypeVar

import torch

try:
    from triton.runtime.jit import JITFunction
except ImportError:  # a machine without Triton has no GPU to plan for, and no launches to hold back
    JITFunction = None

__all__ = ["compute_capability", "dry_run", "per_device", "replacing_launches"]

T = TypeVar("T")

# A thread holds this lock while it replaces Triton's `run`: two threads that replaced it by turns would restore each
# other's. Other threads launch meanwhile, since a replacement asks whose launch it is. The lock is reentrant, because a
# dry run may lie in another.
replacing_launches = RLock()
_card: ContextVar[tuple[int, int] | None] = ContextVar("card", default=None)  # per thread


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return (major, minor) of a GPU; the card's for which the meta device stands; otherwise (0, 0)."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    card = _card.get() if device.type == "meta" else None
    return card or (0, 0)


def per_device(ask: Callable[[torch.device], T]) -> Callable[[torch.device], T]:
    """Ask once per device; about the meta device, once per card for which it stands."""
    return _Answers(ask).__getitem__


class _Answers(dict[torch.device, T], Generic[T]):
    """Map a device to its answer. Every launch asks, so looking up an answer that is known calls no Python function."""

    def __init__(self, ask: Callable[[torch.device], T]) -> None:
        super().__init__()
        self._ask = ask
        self._of_cards: dict[tuple[torch.device, tuple[int, int]], T] = {}

    def __missing__(self, device: torch.device) -> T:
        """Ask about a device; the answer about the meta device depends on the dry run of the thread that asks."""
        if device.type != "meta":
            self[device] = answer = self._ask(device)
            return answer
        key = device, compute_capability(device)
        if key not in self._of_cards:
            self._of_cards[key] = self._ask(device)
        return self._of_cards[key]


@contextmanager
def dry_run(capability: tuple[int, int]) -> Iterator[None]:
    """Launch nothing from this thread inside of the block, where the meta device is a card of this compute capability.

    Other threads launch as usual. One thread at a time is inside; another waits.
    """
    with replacing_launches, ExitStack() as stack:
        for kind in _launching_classes():
            stack.callback(setattr, kind, "run", kind.run)
            kind.run = _launches_unless_dry(kind.run)
        token = _card.set(capability)
        stack.callback(_card.reset, token)
        yield


def _launches_unless_dry(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that launches, except from a thread that is inside of a dry run."""

    def launch_or_not(self: Any, *args: Any, **options: Any) -> Any:
        return launch(self, *args, **options) if _card.get() is None else None

    return launch_or_not


def _launching_classes() -> list[Any]:
    """Return the classes of Triton's functions; those of its interpreter if it has been loaded."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    found = [JITFunction, None if interpreter is None else interpreter.InterpretedFunction]
    return [each for each in found if each is not None]
