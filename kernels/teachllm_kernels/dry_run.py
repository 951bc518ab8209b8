"""Run a step on meta tensors as a GPU of a given type would: every allocation is made, and no kernel is launched.

A meta tensor has a shape and no memory. Code that runs on meta tensors allocates what it would on a GPU, so counting
the bytes predicts a step's memory before there is anything on the GPU, or without one. Two things stand in the way, and
this module removes them: a Triton kernel cannot read a tensor without memory, and which kernel runs (so, what is
allocated) depends on the GPU.

    dry_run             this thread's launches return at once, and the meta device stands for a GPU
    gpu_type            describes a GPU, or the one for which the meta device stands
    per_device          remembers an answer for each device, and one for each type for which the meta device stands

What would have been launched can be looked at: `variants.py` collects what has to be compiled for it.

PyTorch implements its own operations for meta tensors. Some of them are Python, and load PyTorch's compiler, which
takes seconds, only to say that they are not to be compiled: see `leave_compiler_out`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from threading import RLock
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from teachllm_kernels.gpu_type import GPUType

try:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction
except ImportError:  # a machine without Triton has no GPU to plan for, and no launches to hold back
    driver = JITFunction = None

__all__ = [
    "OnLaunch",
    "compute_capability",
    "dry_run",
    "gpu_type",
    "leave_compiler_out",
    "per_device",
    "replacing_launches",
]

T = TypeVar("T")
OnLaunch = Callable[..., None]  # called with a Triton function and the arguments of its launch
# A thread holds this lock while it replaces Triton's `run`: two threads that replaced it by turns would restore each
# other's. Other threads launch meanwhile, since a replacement asks whose launch it is. The lock is reentrant, because a
# dry run may lie in another.
replacing_launches = RLock()


class _DryRun(NamedTuple):
    """Hold what the dry run of a thread was begun with."""

    gpu: GPUType
    on_launch: OnLaunch | None


_NO_GPU = GPUType("", (0, 0), 0, 99 << 10)  # tiles as for the smallest Ampere
_dry_run: ContextVar[_DryRun | None] = ContextVar("dry_run", default=None)  # per thread


def gpu_type(device: torch.device) -> GPUType:
    """Return the type of a GPU; the one for which the meta device stands; of any other device, one without a target."""
    if device.type == "cuda":
        return _type_of_gpu(torch.cuda.current_device() if device.index is None else device.index)
    dry = _dry_run.get() if device.type == "meta" else None
    return _NO_GPU if dry is None else dry.gpu


@cache
def _type_of_gpu(index: int) -> GPUType:
    """Ask the driver."""
    major, minor = torch.cuda.get_device_capability(index)
    found = driver.active.utils.get_device_properties(index)
    return GPUType(f"sm_{major}{minor}", (major, minor), found["multiprocessor_count"], found["max_shared_mem"])


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return (major, minor) of a GPU, or of the one for which the meta device stands; otherwise (0, 0)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else gpu_type(device).capability


def per_device(ask: Callable[[torch.device], T]) -> Callable[[torch.device], T]:
    """Ask once per device; about the meta device, once per type for which it stands."""
    return _Answers(ask).__getitem__


class _Answers(dict[torch.device, T], Generic[T]):
    """Map a device to its answer. Every launch asks, so looking up an answer that is known calls no Python function."""

    def __init__(self, ask: Callable[[torch.device], T]) -> None:
        super().__init__()
        self._ask = ask
        self._of_types: dict[tuple[torch.device, GPUType], T] = {}

    def __missing__(self, device: torch.device) -> T:
        """Ask about a device; the answer about the meta device depends on the dry run of the thread that asks."""
        if device.type != "meta":
            self[device] = answer = self._ask(device)
            return answer
        key = device, gpu_type(device)
        if key not in self._of_types:
            self._of_types[key] = self._ask(device)
        return self._of_types[key]


@contextmanager
def dry_run(gpu: GPUType, on_launch: OnLaunch | None = None) -> Iterator[None]:
    """Launch nothing from this thread inside of the block, where the meta device is a GPU of this type.

    Other threads launch as usual. One thread at a time is inside; another waits.

    Args:
        on_launch: called for each launch, as `JITFunction.run` would be.
    """
    with replacing_launches, ExitStack() as stack:
        for kind in _launching_classes():
            stack.callback(setattr, kind, "run", kind.run)
            kind.run = _launches_unless_dry(kind.run)
        token = _dry_run.set(_DryRun(gpu, on_launch))
        stack.callback(_dry_run.reset, token)
        yield


def leave_compiler_out() -> None:
    """Keep PyTorch's operations on meta tensors from loading its compiler, in a process that only does dry runs.

    They ask the compiler to leave a function alone. A stand-in answers from now on, unless the compiler is loaded.
    """
    stand_in: Any = ModuleType("torch._dynamo")
    stand_in.disable = lambda function, *_, **__: function
    vars(torch)["_dynamo"] = sys.modules.setdefault(stand_in.__name__, stand_in)


def _launches_unless_dry(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that launches, except from a thread that is inside of a dry run."""

    def launch_or_not(self: Any, *args: Any, **options: Any) -> Any:
        dry = _dry_run.get()
        if dry is None:
            return launch(self, *args, **options)
        if dry.on_launch is not None:
            dry.on_launch(self, *args, **options)
        return None

    return launch_or_not


def _launching_classes() -> list[Any]:
    """Return the classes of Triton's functions; those of its interpreter if it has been loaded."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    found = [JITFunction, None if interpreter is None else interpreter.InterpretedFunction]
    return [each for each in found if each is not None]
