"""What a checkpoint's settings say that its scales of K and V are scales of; see `layers/kv_scale_slots.py`.

Source: vLLM, `layers/quantization/kv_cache.py`; compressed-tensors, `modeling/kvcache.py`.
"""

from __future__ import annotations

import torch

from teachllm.checkpoint.json_values import JsonObject

_DTYPES = {"float": torch.float8_e4m3fn, "FP8": torch.float8_e4m3fn, "int": torch.int8, "INT8": torch.int8}


def dtype_of_kv_scales(config: JsonObject | None) -> torch.dtype | None:
    """Return the dtype of K and V that a checkpoint's scales are for; None: one that this engine lacks.

    Args:
        config: what the checkpoint says of its quantization, if it says anything.
    """
    if config is None:
        return _DTYPES["float"]
    if config.has("quantization"):
        config = config.object("quantization")
    usual = config.text("kv_cache_quant_algo", "float")
    if config.has("kv_cache_scheme") and not config.is_object("kv_cache_scheme"):  # of fp8, by name
        return None if config.text("kv_cache_scheme") == "dynamic" else _DTYPES.get(usual)
    scheme = config.object("kv_cache_scheme")
    is_supported = scheme.integer("num_bits", 8) == 8 and scheme.flag("symmetric", True)
    return _DTYPES.get(scheme.text("type", usual)) if is_supported and not scheme.flag("dynamic", False) else None
