"""Checkpoints of NVIDIA's ModelOpt: fp8 and NVFP4. What they are says config.json, or hf_quant_config.json beside it.

Source: NVIDIA/Model-Optimizer (`unified_export_hf`), as vLLM's `modelopt.py` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from fnmatch import fnmatchcase

import torch

from teachllm.checkpoint.json_values import JsonObject
from teachllm.errors import ModelError
from teachllm.layers.weights.quantized_weights import Activations
from teachllm.layers.weights.scheme import Scheme
from teachllm.quantization.formats.fp4 import Fp4
from teachllm.quantization.formats.scaled import Scaled

_E4M3 = torch.float8_e4m3fn
_SCHEMES: dict[str, Scheme] = {
    "FP8": Scaled(_E4M3, "channel", Activations.STATIC),
    "FP8_PER_CHANNEL_PER_TOKEN": Scaled(_E4M3, "channel", Activations.BY_TOKEN),
    "FP8_PB_WO": Scaled(_E4M3, "block", Activations.UNQUANTIZED),
    "NVFP4": Fp4("nvfp4", "weight", "weight_scale", "weight_scale_2", global_divides=False),
    "W4A16_NVFP4": Fp4("nvfp4", "weight", "weight_scale", "weight_scale_2", global_divides=False),
}


def parse(config: JsonObject, names: Container[str] | None) -> Callable[[str], Scheme | None]:
    """Parse a configuration, like `gptq.py`; `config` may also be what hf_quant_config.json holds."""
    if config.has("quantization"):
        config = config.object("quantization")
    algorithm = config.text("quant_algo").upper()
    scheme = _SCHEMES.get(algorithm)
    if scheme is None:
        raise ModelError(
            f"{config.where}: ModelOpt's {algorithm} is not supported (quant_algo), only {', '.join(_SCHEMES)}: take a "
            "checkpoint in these"
        )
    ignored = config.texts("ignore") or config.texts("exclude_modules")

    def scheme_of(name: str) -> Scheme | None:
        if names is not None:
            return scheme if f"{name}.weight_scale" in names else None
        return None if any(each in name or fnmatchcase(name, each) for each in ignored) else scheme

    return scheme_of
