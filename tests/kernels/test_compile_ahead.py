"""A pass in which launches compile: nothing runs, other threads launch, and afterwards nothing is left to compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from threading import Event, Lock, Thread, local
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.runtime import _async_compile  # noqa: E402
from triton.runtime._async_compile import active_mode  # noqa: E402

from teachllm_kernels import compile_ahead as module  # noqa: E402
from teachllm_kernels.compile_ahead import compiling_ahead  # noqa: E402
from tests.waiting import HANG_SECONDS, wait_for  # noqa: E402

ROOT = Path(__file__).parent.parent.parent

# The caches are a process's own: the engine's first steps, counted in one that has met no kernel.
FIRST_STEPS = """
from pathlib import Path
import teachllm
import triton
from teachllm import LLM, SamplingParams

compiled = {"ahead": [], "then": []}
def note(when):
    triton.knobs.runtime.jit_post_compile_hook = lambda **what: compiled[when].append(what["fn"].name)

note("ahead")
model = str(Path(teachllm.__file__).parent / "assets" / "teachlm")
llm = LLM(model=model, max_model_len=256, num_gpu_blocks_override=64)
note("then")
params = SamplingParams(**%r, max_tokens=6, ignore_eos=True)
llm.generate({"prompt_token_ids": list(range(%d))}, params, use_tqdm=False)
llm.close()
print(len(compiled["ahead"]), *compiled["then"])
"""


def test_launches_compile_until_the_end_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[str, bool]] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append((args[0], warmup))

    monkeypatch.setattr(triton.JITFunction, "run", run)

    def _kernel(name): ...

    kernel = triton.JITFunction(_kernel)
    kernel[(1,)]("before")
    with compiling_ahead(torch.device("cuda", 0)):
        kernel[(1,)]("inside")
        other = Thread(target=lambda: kernel[(1,)]("another thread's"))
        other.start()
        other.join()
    kernel[(1,)]("behind")
    with pytest.raises(KeyError), compiling_ahead(torch.device("cuda", 0)):
        raise KeyError
    kernel[(1,)]("after an error")
    assert [name for name, is_warmup in launches if is_warmup] == ["inside"]
    assert len(launches) == 5 and triton.JITFunction.run is run


def test_kernels_are_ready_when_it_ends_and_one_that_fails_does_so_where_it_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Kernel:
        name = "_kernel"

        def __init__(self) -> None:
            self.loaded_on: list[torch.device] = []

        @property
        def run(self) -> Any:
            self.loaded_on.append(current.device)
            return print

    class BadError(Exception): ...

    current, kernel, device = local(), Kernel(), torch.device("cuda", 1)
    kernels: dict[str, Kernel] = {}

    def compile_kernel(name: str) -> Kernel:
        if name == "bad":
            raise BadError
        return kernel

    def run(self: Any, name: str, *, grid: Any, warmup: bool) -> None:
        if name not in kernels and warmup:
            mode = active_mode.get()
            assert mode is not None
            mode.submit(name, lambda: compile_kernel(name), lambda made: kernels.update({name: made}))
        elif name not in kernels:
            kernels[name] = compile_kernel(name)

    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "device", device))

    def _kernel(name): ...

    launch = triton.JITFunction(_kernel)[(1,)]
    with compiling_ahead(device):
        launch("good")
        launch("bad")
        assert not kernels  # it waits for the end
        with pytest.raises(RuntimeError, match="already"), compiling_ahead(device):
            pass
    assert kernels == {"good": kernel} and kernel.loaded_on == [device]
    with pytest.raises(BadError):
        launch("bad")


@pytest.mark.parametrize("when", ["in the pass", "in the wait"])
def test_after_an_interruption_everything_can_be_compiled_again(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def interrupt(futures: Any) -> Any:
        if futures and when == "in the wait":
            raise KeyboardInterrupt
        return as_completed(futures)

    def run(self: Any, name: str, *, grid: Any, warmup: bool) -> None:
        kernels, mode = self.device_caches[0][0], active_mode.get()
        assert mode is not None and warmup
        if name not in kernels:  # Triton 3.7 keeps there what is to be a kernel
            kernel = SimpleNamespace(name=name, run=print)
            kernels[name] = mode.submit(name, lambda: kernel, lambda made: kernels.update({name: made}))

    def _kernel(name): ...

    as_completed, function = _async_compile.as_completed, triton.JITFunction(_kernel)
    function.device_caches = {0: ({}, "more")}
    monkeypatch.setattr(triton.JITFunction, "run", run)
    # Threads begin to compile when what waits for them has been given up.
    given_up, shut_down = Event(), module._Pool.shutdown

    def shutdown(self: Any, wait: bool = True, cancel_futures: bool = False) -> None:
        if not cancel_futures:
            given_up.set()
        shut_down(self, wait=wait, cancel_futures=cancel_futures)
        given_up.set()

    monkeypatch.setattr(module._Pool, "shutdown", shutdown)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: given_up.wait(HANG_SECONDS))
    monkeypatch.setattr(_async_compile, "as_completed", interrupt)
    with pytest.raises(KeyboardInterrupt), compiling_ahead(torch.device("cuda", 0)):
        for i in range(100):
            function[(1,)](str(i))
        if when == "in the pass":
            raise KeyboardInterrupt
    assert active_mode.get() is None
    when = "never again"
    with compiling_ahead(torch.device("cuda", 0)):
        for i in range(100):
            function[(1,)](str(i))
    kernels = function.device_caches[0][0]
    assert [kernels[str(i)].name for i in range(100)] == [str(i) for i in range(100)]


def test_of_two_threads_one_waits_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Any, *args: Any, grid: Any, warmup: bool) -> None: ...

    class CountingLock:
        def __enter__(self) -> None:
            asked.append(1)
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr(module, "replacing_launches", CountingLock())
    inside: list[int] = []
    asked: list[int] = []
    most: list[int] = []
    lock = Lock()

    def compile_ahead() -> None:
        with compiling_ahead(torch.device("cuda", 0)):
            inside.append(1)
            wait_for(lambda: len(asked) == 3)  # the others are there, too
            most.append(len(inside))
            inside.clear()

    threads = [Thread(target=compile_ahead) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert triton.JITFunction.run is run and most == [1, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("length", "asked"),
    [
        (7, {"temperature": 0.0}),
        (25, {"temperature": 0.7}),
        (32, {"temperature": 0.7, "top_p": 0.9}),
        (8, {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.5, "logprobs": 2}),
    ],
)
def test_a_first_short_prompt_and_its_decodes_compile_nothing(
    length: int, asked: dict[str, Any], tmp_path: Path
) -> None:
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "kernels"))
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    command = [sys.executable, "-c", FIRST_STEPS % (asked, length)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, *later = done.stdout.splitlines()[-1].split()
    assert int(count) > 10 and not later
