"""Executors: where a plan is carried out. Here, in this process; elsewhere by the same two calls.

`execute` starts a step and returns at once if the device works on its own; `sample` continues it and returns
something whose `result()` waits for the token ids. The engine may hold several such results before it asks.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch

from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from teachllm.worker.cpu.model_runner import ModelRunner
from teachllm.worker.gpu.gpu_model_runner import GPUModelRunner

_NO_CUDA = "this PyTorch is a build for CPUs: install one with CUDA, see https://pytorch.org/get-started"
_DRIVER = Path("/dev/nvidiactl")  # there where NVIDIA's driver is


class PendingOutput(Protocol):
    def result(self) -> ModelRunnerOutput:
        """Waits for the step's output."""


class Executor(Protocol):
    """Define what the engine needs of whatever computes.

    Attributes:
        num_blocks: KV blocks it has.
        max_in_flight: plans it can work on at once (pipeline stages); 1 for a single device.
        sentinel: a descriptor that is readable once what computes has died; None: it dies with this process.
    """

    num_blocks: int
    max_in_flight: int
    sentinel: int | None

    def execute(self, plan: SchedulerOutput) -> Any:
        """Starts the forward pass of a plan; the handle goes to `sample`."""

    def sample(self, handle: Any) -> PendingOutput:
        """Samples from a started step."""

    def close(self) -> None:
        """Gives back memory and processes."""


def select_device(name: str) -> torch.device:
    """The device for a setting; "auto" is the GPU where there is one.

    Raises:
        ValueError: torch does not know the name, or this machine has no such device.
    """
    if name == "auto":
        return _best_device()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r}: use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r}: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.backends.cuda.is_built():
        raise ValueError(f"device={name!r}: {_NO_CUDA}, or use device=cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name!r}: this machine has {torch.cuda.device_count()} CUDA devices; use device=cpu")
    if device.type == "cuda" and (missing := _what_a_gpu_lacks(device)):
        raise ValueError(f"device={name!r}: {missing}, or use device=cpu")
    return device


def _best_device() -> torch.device:
    """A GPU that can be used, or the CPU; a GPU that cannot is not passed over in silence."""
    if torch.cuda.device_count() == 0:
        if _DRIVER.exists() and not torch.backends.cuda.is_built():
            warnings.warn(f"running on the CPU, though there is a GPU: {_NO_CUDA}", stacklevel=3)
        return torch.device("cpu")
    device = torch.device("cuda")
    missing = _what_a_gpu_lacks(device)
    if missing is None:
        return device
    warnings.warn(f"running on the CPU: {missing}", stacklevel=3)
    return torch.device("cpu")


def _what_a_gpu_lacks(device: torch.device) -> str | None:
    """Why the kernels cannot run on a GPU that is there, and what to do about it; None if they can."""
    try:
        major, minor = torch.cuda.get_device_capability(device)
    except RuntimeError as error:  # of a driver that is too old, or does not run: torch's own words say which
        reason = str(error).splitlines()[0].split(". ")[0].rstrip(".")
        return f"PyTorch cannot use the GPU ({reason}): update its driver"
    if major < 8:
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {major}.{minor}: the kernels need 8.0 (Ampere) or newer"
    if find_spec("triton") is None:
        return "the kernels need Triton: pip install 'teachllm[gpu]'"
    return None


class ReadyOutput:
    """An output that is already there."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def result(self) -> ModelRunnerOutput:
        return self._output


class InProcessExecutor:
    """Runs the model in this process. On a CPU every call finishes before it returns; a GPU is only told what to do."""

    def __init__(self, runner: ModelRunner | GPUModelRunner) -> None:
        self._runner: Any = runner
        self.num_blocks = runner.memory.num_blocks
        self.max_in_flight = 1
        self.sentinel: int | None = None

    def execute(self, plan: SchedulerOutput) -> Any:
        return self._open().execute(plan)

    def sample(self, handle: Any) -> PendingOutput:
        output = self._open().sample(handle)
        return ReadyOutput(output) if isinstance(output, ModelRunnerOutput) else output

    def close(self) -> None:
        if isinstance(self._runner, GPUModelRunner):
            self._runner.close()
        self._runner = None

    def _open(self) -> Any:
        if self._runner is None:
            raise RuntimeError("the engine is closed")
        return self._runner
