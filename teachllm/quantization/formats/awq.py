"""Checkpoints of AWQ: 4 bits by group, of weights that were scaled where activations are large (`algorithms/awq.py`).

    qweight  int32 [in, out / 8]   quantized values along the outputs, in an order that suited one kernel
    qzeros   int32 [groups, out / 8]   the same way, as they are
    scales   float16 [groups, out]

Sources: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", MLSys 2024;
`WQLinear_GEMM` of casper-hansen/AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

import torch

from teachllm.checkpoint.json_values import JsonObject
from teachllm.errors import ModelError
from teachllm.layers.weights.quantized_weights import GroupedWeight
from teachllm.layers.weights.scheme import FLOATS, Scheme, Stored
from teachllm.quantization.formats import rounding
from teachllm.quantization.formats.gptq import LEAVE_OUT, check_sizes, checked_bits, grouped_bytes, num_groups
from teachllm.quantization.formats.packing import pack, unpack

BITS = (4,)
_PER_WORD = 8
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # field i of a word is that of its columns
_INT = (torch.int32,)


@dataclass(frozen=True)
class Awq:
    """A projection of such a checkpoint; `group_size` -1: all inputs share a scale."""

    group_size: int
    is_symmetric: bool = False

    def __str__(self) -> str:
        return f"AWQ (bits 4, group_size {self.group_size})"

    def stored(self, out_features: int, in_features: int) -> dict[str, Stored]:
        """Implement `Scheme.stored`."""
        check_sizes(self.group_size, in_features)
        if out_features % _PER_WORD:
            raise ValueError(f"AWQ packs {_PER_WORD} outputs to a word, which do not divide it: {LEAVE_OUT}")
        groups = num_groups(self.group_size, in_features)
        return {
            "qweight": Stored((in_features, out_features // _PER_WORD), _INT),
            "qzeros": Stored((groups, out_features // _PER_WORD), _INT),
            "scales": Stored((groups, out_features), FLOATS),
        }

    def read(self, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int) -> GroupedWeight:
        """Implement `Scheme.read`."""
        qweight, zeros = (_in_order(unpack(tensors[name], 4, dim=1)) for name in ("qweight", "qzeros"))
        is_symmetric = bool((zeros == 8).all())
        of_outputs = None if is_symmetric else zeros.t().to(torch.int32).contiguous()
        return GroupedWeight(qweight.t().contiguous(), tensors["scales"].t().contiguous(), of_outputs, 4)

    def quantize(self, weight: torch.Tensor) -> GroupedWeight:
        """Implement `Scheme.quantize`."""
        size = weight.shape[1] if self.group_size == -1 else self.group_size
        return rounding.grouped(weight, 4, size, self.is_symmetric)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Implement `Scheme.num_bytes`."""
        return grouped_bytes(4, self.group_size, self.is_symmetric, out_features, in_features)


def write(quantized: GroupedWeight) -> dict[str, torch.Tensor]:
    """Return the tensors of such a file; the inverse of `Awq.read`."""
    return {
        "qweight": pack(_shuffled(quantized.qweight.t()), 4, dim=1),
        "qzeros": pack(_shuffled(quantized.with_zeros().t()), 4, dim=1),
        "scales": quantized.scales.t().contiguous(),
    }


def parse(config: JsonObject, names: Container[str] | None) -> Callable[[str], Scheme | None]:
    """Parse a configuration, like `gptq.py`. AutoAWQ calls some settings otherwise in a file of its own."""
    key = "version" if config.has("version") else "format"
    layout = config.text(key, "gemm").lower()
    if layout != "gemm" or config.text("backend", "autoawq") == "llm-awq":
        raise ModelError(
            f"{config.where}: quant_method='awq': AWQ in the layout {layout!r} ({key}) is not supported, only 'gemm': "
            "take a checkpoint in this"
        )
    checked_bits(config, "every layer in AWQ", 4, key="bits" if config.has("bits") else "w_bit", supported=BITS)
    size_key = "group_size" if config.has("group_size") else "q_group_size"
    usual = Awq(config.integer(size_key, 128, least=-1), not config.flag("zero_point", True))
    ignored = config.texts("modules_to_not_convert") + ([] if config.flag("lm_head", False) else ["lm_head"])

    def scheme_of(name: str) -> Scheme | None:
        if names is None:
            return None if any(each in name for each in ignored) else usual
        return usual if f"{name}.qweight" in names else None

    return scheme_of


def _in_order(values: torch.Tensor) -> torch.Tensor:
    inverse = [_ORDER.index(column) for column in range(_PER_WORD)]
    return values.unflatten(1, (-1, _PER_WORD))[..., inverse].flatten(1)


def _shuffled(values: torch.Tensor) -> torch.Tensor:
    return values.unflatten(1, (-1, _PER_WORD))[..., list(_ORDER)].flatten(1)
