"""A program that prints, as JSON, the kernels that engines of several settings may launch. Without TRITON_INTERPRET."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

from teachllm.config import EngineConfig
from teachllm.worker.gpu.startup.compilation import variants_of
from teachllm_kernels.dry_run import leave_compiler_out
from teachllm_kernels.gpu_type import GPU_TYPES

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "hopper": ("sm_90", {}),
    "ampere": ("sm_80", {}),
    "int4": ("sm_90", {"quantization": "int4"}),
    "stages": ("sm_90", {"pipeline_parallel_size": 2}),
    "drafts": ("sm_90", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
}


def main() -> None:
    leave_compiler_out()
    found = {
        name: Counter(variant.name for variant in variants_of(EngineConfig(**settings), GPU_TYPES[target]))
        for name, (target, settings) in SETTINGS.items()
    }
    print(json.dumps({"kernels": found, "loads PyTorch's compiler": hasattr(sys.modules["torch._dynamo"], "__file__")}))


if __name__ == "__main__":
    main()
