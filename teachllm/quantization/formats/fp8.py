"""Checkpoints in fp8 by the names that models are published with.

    fp8          with `weight_block_size`: blocks of 128 x 128, weight_scale_inv (which multiplies, whatever its name
                 says), and activations by token and 128 inputs; without: one scale, weight_scale, activations "dynamic"
                 or "static"
    fbgemm_fp8   a scale for each output, activations by token

Sources: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3; transformers' `finegrained_fp8.py`, vLLM's
`fp8.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Container

import torch

from teachllm.checkpoint.json_values import JsonObject
from teachllm.layers.weights.quantized_weights import BLOCK, Activations
from teachllm.layers.weights.scheme import Scheme
from teachllm.quantization.formats.scaled import Scaled


def parse(config: JsonObject, names: Container[str] | None) -> Callable[[str], Scheme | None]:
    """Parse a configuration, like `gptq.py`."""
    ignored = [*config.texts("ignored_layers"), *config.texts("modules_to_not_convert"), "lm_head"]
    scheme = _scheme(config, names)

    def scheme_of(name: str) -> Scheme | None:
        if names is None:
            is_ignored = any(name == each or name.startswith(f"{each}.") for each in ignored)
            return None if is_ignored else scheme(name)
        has_scale = any(f"{name}.{each}" in names for each in ("weight_scale_inv", "weight_scale"))
        return scheme(name) if has_scale else None

    return scheme_of


def _scheme(config: JsonObject, names: Container[str] | None) -> Callable[[str], Scaled]:
    """Return a function from the name of a projection that is quantized to how it is."""
    e4m3 = torch.float8_e4m3fn
    if config.text("quant_method") == "fbgemm_fp8":
        return lambda name: Scaled(e4m3, "channel", Activations.BY_TOKEN)
    activation_scheme = config.text("activation_scheme", "dynamic")
    if activation_scheme not in ("dynamic", "static"):
        raise config.refusal("activation_scheme", "dynamic or static")
    block = config.integers("weight_block_size") if config.has("weight_block_size") else None
    if block is not None and (len(block) != 2 or min(block) < 1):
        raise config.refusal("weight_block_size", "two whole numbers from 1")

    def scheme_of(name: str) -> Scaled:
        is_inverse = block is not None if names is None else f"{name}.weight_scale_inv" in names
        scale_name = "weight_scale_inv" if is_inverse else "weight_scale"
        if block is not None:
            # No kernel multiplies blocks of other sizes: activations stay unquantized.
            activations = Activations.BY_BLOCK if block == (BLOCK, BLOCK) else Activations.UNQUANTIZED
            return Scaled(e4m3, "block", activations, scale_name, block=(block[0], block[1]))
        has_own_name = names is not None and f"{name}.activation_scale" in names
        # One scale for the weight, yet one for each token: what one becomes must not depend on the others.
        return Scaled(
            dtype=e4m3,
            per="channel",
            activations=Activations.STATIC if activation_scheme == "static" else Activations.BY_TOKEN,
            scale_name=scale_name,
            input_scale_name="activation_scale" if has_own_name else "input_scale",
        )

    return scheme_of
