"""Remember which kernels were compiled for an engine's settings, so that a second start need not find that out.

A record lies beside the kernels, in Triton's cache. Its name is a digest of all that decides which kernels there are:
settings, config.json, the type of the GPU, the source code of this package, and versions. Its content lists the kernels
with digests of their code, so a cache that has lost some, or has damaged ones, is noticed before one is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

import teachllm
import teachllm_kernels
from teachllm.config import EngineConfig
from teachllm.models.model_config import ModelConfig
from teachllm.spec_decode.load import DrafterConfig
from teachllm_kernels._triton import triton
from teachllm_kernels.gpu_type import GPUType
from teachllm_kernels.kernel_cache import CachedKernel, forget, is_whole

# Settings of which no kernel depends; what the model is, its own config.json says.
_IRRELEVANT = {
    "model",
    "tokenizer",
    "revision",
    "device",
    "seed",
    "generation_config",
    "override_generation_config",
    "skip_tokenizer_init",
    "trace_path",
    "trace_text",
    "master_addr",
    "master_port",
    "check_invariants",
    "startup",
}


class CompiledRecord:
    """The kernels that were compiled for an engine's settings.

    Args:
        folder: of the cache.
        config: resolved for the model.
        model: the whole of it.
    """

    def __init__(
        self, folder: Path, config: EngineConfig, model: ModelConfig, drafter: DrafterConfig | None, gpu: GPUType
    ) -> None:
        digest = hashlib.sha256(json.dumps(_decisive(config, model, drafter, gpu), default=str).encode())
        self._file = folder / "teachllm" / f"{digest.hexdigest()[:32]}.json"

    def is_complete(self) -> bool:
        """Return whether all kernels are in the cache as they were written. Damaged ones are removed from it."""
        try:
            kernels = [CachedKernel(*each) for each in json.loads(self._file.read_text(encoding="utf-8"))]
        except (OSError, ValueError, TypeError):  # there is none, or it is damaged
            return False
        damaged = [each for each in kernels if not is_whole(each)]
        for each in damaged:
            forget(each)
        return bool(kernels) and not damaged

    def write(self, kernels: Sequence[CachedKernel]) -> None:
        """Remember kernels that are in the cache; where that fails, the next start finds them one by one."""
        new = self._file.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            new.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(kernels), encoding="utf-8")
            new.replace(self._file)


def _decisive(config: EngineConfig, model: ModelConfig, drafter: DrafterConfig | None, gpu: GPUType) -> list[Any]:
    settings = {name: value for name, value in asdict(config).items() if name not in _IRRELEVANT}
    models = [(each.raw, each.dtype, each.quantization) for each in (model, drafter and drafter.model) if each]
    return [settings, models, gpu, torch.__version__, triton.__version__, _digest_of_sources()]


@cache
def _digest_of_sources() -> str:
    """Return a digest of all modules from which it follows what is launched."""
    digest = hashlib.sha256()
    for package in (teachllm, teachllm_kernels):
        for folder in package.__path__:
            for file in sorted(Path(folder).rglob("*.py")):
                digest.update(file.read_bytes())
    return digest.hexdigest()
