"""Checkpoints of AutoRound have 4 or 8 bits by group, with rounding learned per block (`algorithms/autoround.py`).

AutoRound packs weights as other formats do, and names the packing: `packing_format` is "auto_round:auto_gptq" (GPTQ
without `g_idx`; each zero is stored minus 1, without a borrow from its neighbours), "auto_round" (the same with zeros
as they are) or "auto_round:auto_awq". `extra_config` has the settings of layers that differ. Scales may be negative:
then the quantized value of a group's largest weight is exact.

Sources: Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs", 2023;
intel/auto-round.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from typing import Any

from teachllm.errors import ModelError
from teachllm.quantization.formats.awq import BITS as BITS_OF_AWQ
from teachllm.quantization.formats.awq import Awq
from teachllm.quantization.formats.compressed_tensors import parse as parse_compressed_tensors
from teachllm.quantization.formats.gptq import Gptq, checked_bits
from teachllm.quantization.formats.scheme import Scheme

_SPECIAL = set(r"*+?^$()[]{}|\\")  # a name with one of these is a pattern
_AS_GPTQ = ("auto_round:auto_gptq", "auto_round:gptq", "auto")
_AUTO_ROUND = ("auto_round", "auto_round:gptqmodel")
_AS_AWQ = ("auto_round:auto_awq", "auto_round:awq")


def parse(config: Mapping[str, Any], names: Container[str] | None) -> Callable[[str], Scheme | None]:
    """Return the function that returns a projection's scheme by its name; see `gptq.parse`."""
    packing = "auto" if config.get("packing_format") is None else config["packing_format"]
    kind = config.get("data_type", "int")
    if str(kind).startswith(("mx_fp", "nv_fp")):
        raise ModelError(
            f"AutoRound with data_type {kind!r} is not supported, only 'int': take a checkpoint with this, or one that "
            "it has exported to compressed-tensors (nvfp4-, mxfp4-pack-quantized or mxfp8-quantized)"
        )
    if packing == "auto_round:llm_compressor":
        return parse_compressed_tensors(config, names)
    if packing not in (*_AS_GPTQ, *_AUTO_ROUND, *_AS_AWQ):
        supported = ", ".join((*_AS_GPTQ[:1], *_AUTO_ROUND[:1], *_AS_AWQ[:1]))
        raise ModelError(
            f"AutoRound in the packing {packing!r} (packing_format) is not supported, only {supported}: take a "
            "checkpoint in these"
        )
    if not str(kind).startswith("int"):
        raise ModelError(
            f"AutoRound with data_type {kind!r} is not supported in the packing {packing!r}, only 'int': "
            "take a checkpoint with this"
        )
    config = {**config, "bits": config["bits"], "group_size": config["group_size"]}  # or raise KeyError, here
    blocks = _names(config.get("block_name_to_quantize") or config.get("to_quant_block_names"))
    extra = dict(config.get("extra_config") or {})

    def settings_of(name: str) -> Mapping[str, Any] | None:
        """Return the settings of a projection; None: it is not quantized."""
        found = extra.get(name)
        if found is None:
            patterns = (each for each in extra if _SPECIAL & set(each) and re.search(each, name))
            found = extra.get(next(patterns, ""))
        if found is None and (name == "lm_head" or (blocks and not name.startswith(tuple(blocks)))):
            return None
        merged = {**config, **(found or {})}
        return None if merged["bits"] >= 16 else merged

    def scheme_of(name: str) -> Scheme | None:
        settings = settings_of(name)
        if settings is None or (names is not None and f"{name}.qweight" not in names):
            return None
        group_size, is_symmetric = settings["group_size"], settings.get("sym", True)
        in_what = f"{name} in the packing {packing!r}"
        if packing in _AS_AWQ:
            checked_bits(settings["bits"], in_what, BITS_OF_AWQ)
            return Awq(group_size, is_symmetric)
        bits = checked_bits(settings["bits"], in_what)
        offset = 1 if packing in _AS_GPTQ else 0
        return Gptq(bits, group_size, is_symmetric, offset, adds_to_words=False, has_order=packing not in _AS_GPTQ)

    return scheme_of


def _names(given: Any) -> list[str]:
    """Return the names in a name, in several names with commas between them, in a list, or in a list of lists."""
    if not given:
        return []
    if isinstance(given, str):
        return [each.strip() for each in given.split(",")]
    return [name for each in given for name in _names(each)]
