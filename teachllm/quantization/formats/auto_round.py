"""Checkpoints of AutoRound have 4 or 8 bits by group, with rounding learned per block (`algorithms/autoround.py`).

AutoRound packs weights as other formats do, and names the packing: `packing_format` is "auto_round:auto_gptq" (GPTQ
without `g_idx`; each zero is stored minus 1, without a borrow from its neighbours), "auto_round" (the same with zeros
as they are) or "auto_round:auto_awq". `extra_config` has the settings of layers that differ. Scales may be negative:
then the quantized value of a group's largest weight is exact.

Sources: Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs", 2023;
intel/auto-round.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from teachllm.checkpoint.json_values import JsonObject
from teachllm.errors import ModelError
from teachllm.layers.weights.scheme import Scheme
from teachllm.quantization.formats.awq import BITS as BITS_OF_AWQ
from teachllm.quantization.formats.awq import Awq
from teachllm.quantization.formats.compressed_tensors import parse as parse_compressed_tensors
from teachllm.quantization.formats.gptq import Gptq, checked_bits
from teachllm.quantization.formats.name_patterns import matches

_SPECIAL = set(r"*+?^$()[]{}|\\")  # a name with one of these is a pattern
_AS_GPTQ = ("auto_round:auto_gptq", "auto_round:gptq", "auto")
_AUTO_ROUND = ("auto_round", "auto_round:gptqmodel")
_AS_AWQ = ("auto_round:auto_awq", "auto_round:awq")


def parse(config: JsonObject, names: Container[str] | None) -> Callable[[str], Scheme | None]:
    """Return the function that returns a projection's scheme by its name; see `gptq.parse`."""
    packing, kind = config.text("packing_format", "auto"), config.text("data_type", "int")
    if kind.startswith(("mx_fp", "nv_fp")):
        raise ModelError(
            f"{config.where}: AutoRound with data_type {kind!r} is not supported, only 'int': take a checkpoint with "
            "this, or one that it has exported to compressed-tensors (nvfp4-, mxfp4-pack-quantized or mxfp8-quantized)"
        )
    if packing == "auto_round:llm_compressor":
        return parse_compressed_tensors(config, names)
    if packing not in (*_AS_GPTQ, *_AUTO_ROUND, *_AS_AWQ):
        supported = ", ".join((*_AS_GPTQ[:1], *_AUTO_ROUND[:1], *_AS_AWQ[:1]))
        raise ModelError(
            f"{config.where}: AutoRound in the packing {packing!r} (packing_format) is not supported, only "
            f"{supported}: take a checkpoint in these"
        )
    if not kind.startswith("int"):
        raise ModelError(
            f"{config.where}: AutoRound with data_type {kind!r} is not supported in the packing {packing!r}, only "
            "'int': take a checkpoint with this"
        )
    is_as_gptq = packing in _AS_GPTQ
    contrary = f"packing_format={(_AUTO_ROUND if is_as_gptq else _AS_GPTQ)[0]!r}"
    blocks = _names(config, "block_name_to_quantize") or _names(config, "to_quant_block_names")
    extra = config.object("extra_config")
    for key, least in (("bits", 1), ("group_size", -1)):  # required, whatever single layers have
        config.integer(key, least=least)

    def settings_of(name: str) -> JsonObject | None:
        """Return the settings of a projection; None: it is not quantized."""
        own = name if name in extra else next((each for each in extra if _is_meant(each, name, extra)), None)
        if own is None and (name == "lm_head" or (blocks and not name.startswith(tuple(blocks)))):
            return None
        settings = config if own is None else config.replaced_by(extra.object(own))
        return None if settings.integer("bits") >= 16 else settings

    def scheme_of(name: str) -> Scheme | None:
        settings = settings_of(name)
        if settings is None or (names is not None and f"{name}.qweight" not in names):
            return None
        group_size, is_symmetric = settings.integer("group_size", least=-1), settings.flag("sym", True)
        in_what = f"{name} in the packing {packing!r}"
        if packing in _AS_AWQ:
            checked_bits(settings, in_what, supported=BITS_OF_AWQ)
            return Awq(group_size, is_symmetric)
        return Gptq(
            bits=checked_bits(settings, in_what),
            group_size=group_size,
            is_symmetric=is_symmetric,
            stored_offset=1 if is_as_gptq else 0,
            adds_to_words=False,
            has_order=not is_as_gptq,
            contrary=contrary,
        )

    return scheme_of


def _is_meant(pattern: str, name: str, extra: JsonObject) -> bool:
    """Return whether a name of `extra_config` is a pattern, and matches anywhere in a projection's name."""
    return bool(_SPECIAL & set(pattern)) and matches(pattern, name, extra, pattern, anywhere=True)


def _names(config: JsonObject, key: str) -> list[str]:
    """Return the names in a name, in several names with commas between them, in a list, or in a list of lists."""

    def names_in(given: Any) -> list[str]:
        if isinstance(given, str):
            return [name for each in given.split(",") if (name := each.strip())]
        if not isinstance(given, list):
            raise config.refusal(key, "names of blocks, or lists of them")
        return [name for each in given for name in names_in(each)]

    return names_in(config.as_dict()[key]) if config.has(key) else []
