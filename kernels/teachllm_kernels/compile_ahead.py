"""Compile kernels in parallel: run a model once so that every launch compiles its kernel and launches nothing.

Triton compiles a kernel at its first launch, for the types, the alignment and the constants of its arguments. A model's
first step meets its kernels one after the other, and while one compiles the other cores are idle. This module makes the
same launches once beforehand and hands each of them to a thread pool. No list of kernels has to be maintained: a kernel
that was not compiled here is compiled at its first launch, as usual.

Threads suffice: most of a compilation is native code or another program (the assembler and, up to Triton 3.6, the C
compiler, which builds the launcher of each signature), and meanwhile other threads run Python.

The steps in order, with Triton's own part in brackets:

    launch    a kernel's arguments determine what to compile; nothing is sent to the device
    submit    [once per kernel that is not compiled yet] its compilation waits for the pass to end
    compile   a thread: [source to machine code], then the launcher is built and the machine code loaded
    finish    this thread waits for all: [the next launch finds the kernel]

Source: Triton's `AsyncCompileMode`, which compiles in this way what is launched with `warmup`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event, Lock
from typing import Any

import torch

from teachllm_kernels._triton import triton
from teachllm_kernels.dry_run import replacing_launches

__all__ = ["compiling_ahead"]

_is_ahead: ContextVar[bool] = ContextVar("is_ahead", default=False)  # per thread: the other threads launch
_THREADS = 8  # more would only take turns at the Python part, a fifth of a compilation


class _Pool(ThreadPoolExecutor):
    """A thread pool that compiles kernels until they are ready to be launched."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(_THREADS, **settings)
        self._building: defaultdict[str, Lock] = defaultdict(Lock)

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        def make_ready() -> Any:
            kernel = compile_kernel()
            self._build_launcher(kernel)
            return kernel

        return super().submit(make_ready)

    def _build_launcher(self, kernel: Any) -> None:
        """Build the kernel's launcher and load the kernel: Triton does both on access to `run`."""
        with self._building[kernel.name]:  # a kernel's variants share launchers: one thread builds for all
            _ = kernel.run


@contextmanager
def _launches_compile(met: list[Any]) -> Iterator[None]:
    """Inside, this thread's launches are what Triton calls a warm-up. Each kernel is appended to `met`."""
    jit = triton.JITFunction
    launch = jit.run

    def launch_or_compile(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        if _is_ahead.get():
            met.append(self)
        return launch(self, *args, warmup=warmup or _is_ahead.get(), **options)

    jit.run = launch_or_compile
    token = _is_ahead.set(True)
    try:
        yield
    finally:
        _is_ahead.reset(token)
        jit.run = launch


def _give_up(mode: Any, pool: _Pool, met: list[Any]) -> None:
    """Clean up after a mode that an error or an interruption has ended; only compilations under way continue.

    Triton ends its mode only if nothing was raised, and newer versions keep unfinished kernels among the kernels.
    """
    pool.shutdown(wait=False, cancel_futures=True)
    mode.raw_futures.clear()  # the mode would wait for them
    mode.__exit__(None, None, None)
    unfinished = set(map(id, mode.future_kernels.values()))
    for kernels, *_ in (caches for function in met for caches in function.device_caches.values()):
        for key in [key for key, kernel in kernels.items() if id(kernel) in unfinished]:
            del kernels[key]


@contextmanager
def compiling_ahead(device: torch.device) -> Iterator[None]:
    """Inside, this thread's launches compile and write nothing. PyTorch's own operations run as usual.

    Compilation begins when the block ends, and the exit waits for all of it. A kernel that does not compile raises
    where it is launched, not here. Other threads' launches go on; a launch of a kernel that was met here waits, so the
    block must not wait for those threads.

    Args:
        device: the GPU on which they will be launched, with its index; this thread's current one.

    Raises:
        RuntimeError: if called inside itself.
        BaseException: whatever the block raises; only compilations under way are then finished.
    """
    if _is_ahead.get():
        raise RuntimeError("this thread is compiling ahead already")
    passed = Event()

    def begin() -> None:
        torch.cuda.set_device(device)
        passed.wait()  # the pass is Python, too, and the kernel that it meets last may take the longest

    pool = _Pool(initializer=begin)
    mode = triton.AsyncCompileMode(pool, ignore_errors=True)
    met: list[Any] = []
    with replacing_launches, pool:
        try:
            with mode:
                try:
                    with _launches_compile(met):
                        yield
                except BaseException:
                    mode.raw_futures.clear()  # do not wait for any compilation
                    raise
                finally:
                    passed.set()
        except BaseException:
            _give_up(mode, pool, met)
            raise
