"""The ceilings of this machine, as far as they are known: the best of what was measured here and of a known card's.

`teachllm bench` measures them and leaves them in the user's cache, where the best of every measurement stays: what a
machine has done once it can do, and a floor computed from less could lie above a measured time. An engine that is
traced looks them up and never measures, since that takes gigabytes and seconds. What is not known is None.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

import torch

from teachllm.roofline import Ceilings

# The best that `measure_ceilings` has found on several cards, rounded up: no floor may exceed what one of them takes.
_KNOWN = [
    Ceilings("NVIDIA H200", "bfloat16", 4.45e12, 4.26e12, 803e12, 654e12),
    Ceilings("NVIDIA H100 80GB HBM3", "bfloat16", 3.15e12, 3.05e12, 805e12, 670e12),
]

_CPUINFO = Path("/proc/cpuinfo")


def device_name(device: str) -> str:
    """Return what a device is called: "NVIDIA H200", or a CPU's model (or architecture) and threads."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{_cpu_model() or platform.machine()}, {torch.get_num_threads()} threads"


def _cpu_model() -> str:
    """Return the CPU's name as its maker calls it; "" where that is not known."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def known_ceilings(device: str, dtype: str) -> Ceilings | None:
    """Return a named device's ceilings for one dtype: the best of what was measured here and what such cards did."""
    found = [each for each in [*_remembered(), *_KNOWN] if (each.device, each.dtype) == (device, dtype)]
    return _best(found) if found else None


def at_best(measured: Ceilings) -> Ceilings:
    """Return what was measured, or the best known, where that is higher."""
    return _best([measured, known_ceilings(measured.device, measured.dtype) or measured])


def _best(several: Sequence[Ceilings]) -> Ceilings:
    """Return the highest of each kind, of ceilings of one device for one dtype.

    One process finds less than another on the same card, by as much as 5% of the reads, while kernels take as long as
    before: what the device has done once it can do.
    """
    columns = zip(*(asdict(each).values() for each in several), strict=True)
    return Ceilings(*map(max, columns))


def remember(measured: Ceilings) -> None:
    """Store the measured ceilings, and keep the best of these and of earlier ones."""
    kept = {(each.device, each.dtype): each for each in _remembered()}
    key = (measured.device, measured.dtype)
    kept[key] = _best([measured, kept.get(key, measured)])
    path = _path()
    with contextlib.suppress(OSError):  # a home that cannot be written to has no memory
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([asdict(each) for each in kept.values()], indent=2) + "\n", encoding="utf-8")


def _remembered() -> list[Ceilings]:
    try:
        entries = json.loads(_path().read_text(encoding="utf-8"))
        names = {field.name for field in fields(Ceilings)}
        return [Ceilings(**entry) for entry in entries if entry.keys() == names]
    except (OSError, ValueError, AttributeError, TypeError):  # nothing yet, or a file that is not ours
        return []


def _path() -> Path:
    """Return the path in TEACHLLM_CACHE, or in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get("TEACHLLM_CACHE") or f"{base}/teachllm"
    return Path(folder).expanduser() / "ceilings.json"
