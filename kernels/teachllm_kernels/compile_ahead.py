"""Kernels compiled side by side: a pass through a model in which every launch compiles, and nothing is launched.

Triton compiles a kernel when it is launched for the first time, for the types, the alignment and the constants of its
arguments. A model's first step meets its kernels one after the other, and while one is compiled the other cores rest.
To make the same launches once before, each of them handed to a pool of threads, says what to compile without a list
that would have to be kept: what is not compiled before a step meets it is compiled then, as ever.

Threads suffice: most of a compilation is native code, or another program's (the assembler, and, up to Triton 3.6, the C
compiler, which builds each signature's launcher), and meanwhile other threads run Python.

In the order of time, with what is Triton's own in brackets:

    launch    a kernel's arguments say what to compile; nothing is on its way to the device
    submit    [once for each that is not compiled already] its compilation waits for the pass to be over
    compile   a thread: [source to machine code], then the launcher is built and the machine code loaded
    finish    this thread waits for all: [the next such launch finds the kernel]

Source: Triton's `AsyncCompileMode`, which compiles so what is launched with `warmup`.
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

__all__ = ["compiling_ahead"]

_is_ahead: ContextVar[bool] = ContextVar("is_ahead", default=False)  # of this thread: the others launch
_one_at_a_time = Lock()
_THREADS = 8  # more would take turns at running Python: a fifth of a compilation


class _Pool(ThreadPoolExecutor):
    """Makes kernels ready to be launched."""

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
        """And loads the kernel: Triton does both when it is asked for `run`."""
        with self._building[kernel.name]:  # a kernel's variants have launchers in common: one builds for all
            _ = kernel.run


@contextmanager
def _launches_compile(met: list[Any]) -> Iterator[None]:
    """Inside, this thread's launches are what Triton calls a warm-up; `met` gets the kernels."""
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
    """Leaves nothing behind of a mode that an error or an interruption has ended, but the compilations under way.

    Triton ends its mode only when nothing was raised, and newer ones keep what is to be a kernel among the kernels.
    """
    pool.shutdown(wait=False, cancel_futures=True)
    mode.raw_futures.clear()  # which it would wait for
    mode.__exit__(None, None, None)
    unfinished = set(map(id, mode.future_kernels.values()))
    for kernels, *_ in (caches for function in met for caches in function.device_caches.values()):
        for key in [key for key, kernel in kernels.items() if id(kernel) in unfinished]:
            del kernels[key]


@contextmanager
def compiling_ahead(device: torch.device) -> Iterator[None]:
    """Inside, this thread's launches only compile. What they would have written is not; PyTorch's own work is done.

    Compiling begins when the block ends, and then all of it is waited for. A kernel that does not compile raises
    nothing here, but where it is launched. Other threads' launches go on; one of a kernel that was met here waits, so
    the block must not wait for those threads.

    Args:
        device: the GPU on which they will be launched, with its index; this thread's current one.

    Raises:
        RuntimeError: inside of itself.
        BaseException: of the block; nothing is compiled then that was not under way.
    """
    if _is_ahead.get():
        raise RuntimeError("this thread is compiling ahead already")
    passed = Event()

    def begin() -> None:
        torch.cuda.set_device(device)
        passed.wait()  # the pass is Python, too, and what it meets last may take the longest

    pool = _Pool(initializer=begin)
    mode = triton.AsyncCompileMode(pool, ignore_errors=True)
    met: list[Any] = []
    with _one_at_a_time, pool:
        try:
            with mode:
                try:
                    with _launches_compile(met):
                        yield
                except BaseException:
                    mode.raw_futures.clear()  # nothing is to be waited for
                    raise
                finally:
                    passed.set()
        except BaseException:
            _give_up(mode, pool, met)
            raise
