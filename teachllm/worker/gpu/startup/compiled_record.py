"""Remember what a start has found out about an engine's settings: which kernels they need, and how much memory.

A record lies beside the kernels, in Triton's cache. Its name is a digest of all that decides what is in it: settings,
config.json, the type of the GPU, the source code of this package, and versions. It lists the kernels with digests of
their files, so a cache that has lost some, or has damaged ones, is noticed before one is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import teachllm
import teachllm_kernels
from teachllm.checkpoint.files import quantization_config
from teachllm.config import EngineConfig
from teachllm.models.model_config import ModelConfig
from teachllm.spec_decode.load import DrafterConfig
from teachllm.worker.gpu.memory.predicted import PredictedNeeds
from teachllm_kernels._triton import triton
from teachllm_kernels.gpu_type import GPUType
from teachllm_kernels.kernel_cache import CachedKernel, forget, is_whole
from teachllm_kernels.variants import compiler_version

# Settings on which neither kernels nor memory depend; what the model is, its own files say.
_WITHOUT_EFFECT = {
    "model",
    "tokenizer",
    "revision",
    "device",
    "seed",
    "generation_config",
    "override_generation_config",
    "skip_tokenizer_init",
    "gpu_memory_utilization",
    "trace_path",
    "trace_text",
    "master_addr",
    "master_port",
    "check_invariants",
    "startup",
}


class Found(NamedTuple):
    """What a start has found out.

    Attributes:
        kernels: that are in the cache.
        needs: predicted memory, of a rank of each pipeline stage.
    """

    kernels: list[CachedKernel]
    needs: list[PredictedNeeds]


class CompiledRecord:
    """The record of an engine's settings.

    Args:
        folder: the folder of the cache.
        config: resolved for the model.
        model: the whole model, not a rank's part.
    """

    def __init__(
        self, folder: Path, config: EngineConfig, model: ModelConfig, drafter: DrafterConfig | None, gpu: GPUType
    ) -> None:
        digest = hashlib.sha256(json.dumps(_decisive(config, model, drafter, gpu), default=str).encode())
        self._file = folder / "teachllm" / f"{digest.hexdigest()[:32]}.json"

    def read(self) -> Found | None:
        """Return what is on record if all kernels are in the cache as they were written; otherwise None."""
        found = self._read()
        return found if found is not None and all(map(is_whole, found.kernels)) else None

    def remove_damaged(self) -> None:
        """Remove kernels from the cache that are not as they were written. They will be compiled again."""
        for kernel in () if (found := self._read()) is None else found.kernels:
            if not is_whole(kernel):
                forget(kernel.key)

    def write(self, found: Found) -> None:
        """Write the record; where that fails, the next start finds it out again."""
        new = self._file.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            new.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(found), encoding="utf-8")
            new.replace(self._file)

    def _read(self) -> Found | None:
        """Return what is on record; None: there is none, or it is damaged."""
        try:
            kernels, needs = json.loads(self._file.read_text(encoding="utf-8"))
            return Found([CachedKernel(*each) for each in kernels], [PredictedNeeds(*each) for each in needs])
        except (OSError, ValueError, TypeError):
            return None


def _decisive(config: EngineConfig, model: ModelConfig, drafter: DrafterConfig | None, gpu: GPUType) -> list[Any]:
    settings = {name: value for name, value in asdict(config).items() if name not in _WITHOUT_EFFECT}
    models = [_described(each) for each in (model, drafter and drafter.model) if each]
    versions = [sys.version, torch.__version__, triton.__version__, compiler_version(gpu), _digest_of_sources()]
    return [settings, models, gpu, versions]


def _described(model: ModelConfig) -> list[Any]:
    """Return what of a checkpoint decides which kernels read it, quantized weights included."""
    quantization = quantization_config(model.raw, Path(model.path))
    sizes = [model.weight_bytes, model.active_bytes, model.num_w8a8_parameters]  # differ if other projections are
    return [model.raw, model.dtype, model.quantization, sizes, quantization and quantization.as_dict()]


@cache
def _digest_of_sources() -> str:
    """Return a digest of all modules from which it follows what is launched."""
    digest = hashlib.sha256()
    for package in (teachllm, teachllm_kernels):
        for folder in package.__path__:
            for file in sorted(Path(folder).rglob("*.py")):
                digest.update(file.read_bytes())
    return digest.hexdigest()
