"""Checkpoints in fp8 by the names that models are published with.

    fp8          with `weight_block_size`: blocks of 128 x 128, weight_scale_inv (which multiplies, whatever its name
                 says), and activations by token and 128 inputs; without: one scale, weight_scale, activations "dynamic"
                 or "static"
    fbgemm_fp8   a scale for each output, activations by token

Sources: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3; transformers' `finegrained_fp8.py`, vLLM's
`fp8.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch

from teachllm.errors import ModelError
from teachllm.quantization.formats.scaled import Scaled
from teachllm.quantization.formats.scheme import Scheme
from teachllm.quantization.quantized_weights import BLOCK, Activations


def parse(config: Mapping[str, Any], names: Container[str] | None) -> Callable[[str], Scheme | None]:
    """Parse a configuration, like `gptq.py`."""
    ignored = [*(config.get("ignored_layers") or []), *(config.get("modules_to_not_convert") or []), "lm_head"]

    def scheme_of(name: str) -> Scheme | None:
        if names is None:
            return (
                None
                if any(name == each or name.startswith(f"{each}.") for each in ignored)
                else _scheme(config, name, None)
            )
        has_scale = any(f"{name}.{each}" in names for each in ("weight_scale_inv", "weight_scale"))
        return _scheme(config, name, names) if has_scale else None

    return scheme_of


def _scheme(config: Mapping[str, Any], name: str, names: Container[str] | None) -> Scaled:
    e4m3 = torch.float8_e4m3fn
    if config["quant_method"] == "fbgemm_fp8":
        return Scaled(e4m3, "channel", Activations.BY_TOKEN)
    activation_scheme = config.get("activation_scheme", "dynamic")
    if activation_scheme not in ("dynamic", "static"):
        raise ModelError(f"quantization_config: activation_scheme={activation_scheme!r}: must be dynamic or static")
    block = config.get("weight_block_size")
    is_inverse = block is not None if names is None else f"{name}.weight_scale_inv" in names
    scale_name = "weight_scale_inv" if is_inverse else "weight_scale"
    if block is not None:
        # No kernel multiplies blocks of other sizes: activations stay unquantized.
        activations = Activations.BY_BLOCK if tuple(block) == (BLOCK, BLOCK) else Activations.UNQUANTIZED
        return Scaled(e4m3, "block", activations, scale_name, block=tuple(block))
    input_name = "activation_scale" if names is not None and f"{name}.activation_scale" in names else "input_scale"
    of_inputs = Activations.STATIC if activation_scheme == "static" else Activations.BY_TOKEN
    # One scale for the weight, yet one for each token: what one becomes must not depend on the others.
    return Scaled(e4m3, "channel", of_inputs, scale_name, input_name)
