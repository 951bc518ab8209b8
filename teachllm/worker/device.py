"""Select the device that an engine computes on, and say what one lacks that cannot be used."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path

import torch

_NO_CUDA = "this PyTorch is a build for CPUs: install one with CUDA, see https://pytorch.org/get-started"
_DRIVER = Path("/dev/nvidiactl")  # there where NVIDIA's driver is


def select_device(name: str) -> torch.device:
    """Return the device for a setting; "auto" is the GPU where there is one.

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
    """Return a GPU that can be used, or the CPU; warn about a GPU that cannot be used."""
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
    """Tell why the kernels cannot run on a GPU that is there, and what to do about it; return None if they can."""
    try:
        major, minor = torch.cuda.get_device_capability(device)
    except RuntimeError as error:  # of a driver that is too old, or does not run: torch's own words say which
        reason = str(error).splitlines()[0].split(". ")[0].rstrip(".")
        return f"PyTorch cannot use the GPU ({reason}): update its driver"
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        return f"{name} is AMD's: the kernels are compiled for it, and were never run"
    if major < 8:
        return f"{name} has compute capability {major}.{minor}: the kernels need 8.0 (Ampere) or newer"
    if find_spec("triton") is None:
        return "the kernels need Triton: pip install 'teachllm[gpu]'"
    return None
