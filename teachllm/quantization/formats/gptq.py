"""GPTQ checkpoints (lesson 11): 4 or 8 bits by group, each column against the error so far (`algorithms/gptq.py`).

    qweight  int32 [in * bits / 32, out]   quantized values along the inputs
    qzeros   int32 [groups, out * bits / 32]   along the outputs; version 1 holds them less one
    scales   float16 [groups, out]
    g_idx    int32 [in]   the group of each input, where they were quantized in another order (`desc_act`)

In version 1 one is taken from each zero of a word by subtracting 0x11111111 from the whole: where a zero is 0 that
borrows from its neighbour, and only adding to the whole word gives it back.

Sources: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", ICLR 2023;
`pack` and `convert_gptq_v1_to_v2_format` of ModelCloud/GPTQModel.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace

import torch

from teachllm.checkpoint.json_values import JsonObject
from teachllm.errors import ModelError
from teachllm.layers.weights.quantized_weights import GroupedWeight, fits_kernels
from teachllm.layers.weights.scheme import FLOATS, Scheme, Stored
from teachllm.quantization.formats import rounding
from teachllm.quantization.formats.name_patterns import matches
from teachllm.quantization.formats.packing import INTS, WORD, pack, unpack

BITS = (4, 8)
LAYOUTS = {"gptq": 1, "gptq_v2": 0}  # what is taken from a zero before it is stored
LEAVE_OUT = "quantization_config in config.json must leave this layer out"


@dataclass(frozen=True)
class Gptq:
    """A projection of such a checkpoint.

    Attributes:
        group_size: inputs that share a scale; -1: all.
        stored_offset: what is taken from a zero before it is stored: 1 in version 1.
        adds_to_words: how it is given back: to a word of several, or to each by itself.
        has_order: a file holds `g_idx`, if the groups are not in order.
        contrary: what quantization_config would say if zeros were stored the other way.
    """

    bits: int
    group_size: int
    is_symmetric: bool = True
    stored_offset: int = 1
    adds_to_words: bool = True
    has_order: bool = True
    contrary: str = "checkpoint_format='gptq_v2'"

    def __str__(self) -> str:
        return f"GPTQ (bits {self.bits}, group_size {self.group_size})"

    def stored(self, out_features: int, in_features: int) -> dict[str, Stored]:
        """Implement `Scheme.stored`."""
        check_sizes(self.group_size, in_features)
        per_word = WORD // self.bits
        if in_features % per_word or out_features % per_word:
            raise ValueError(f"GPTQ packs {per_word} values to a word, which do not divide it: {LEAVE_OUT}")
        groups = num_groups(self.group_size, in_features)
        tensors = {
            "qweight": Stored((in_features // per_word, out_features), INTS),
            "qzeros": Stored((groups, out_features // per_word), INTS),
            "scales": Stored((groups, out_features), FLOATS),
        }
        return tensors | ({"g_idx": Stored((in_features,), INTS, is_optional=True)} if self.has_order else {})

    def read(self, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int) -> GroupedWeight:
        """Implement `Scheme.read`."""
        words = tensors["qzeros"]
        if self.adds_to_words and self.stored_offset:
            words = words + _in_each_field(self.bits)  # modulo 2^32
        zeros = unpack(words, self.bits, dim=1).to(torch.int32)
        if not self.adds_to_words:
            zeros = zeros + self.stored_offset
        qweight = unpack(tensors["qweight"], self.bits, dim=0)
        order = tensors.get("g_idx")
        if order is not None:
            order = unless_sorted(order, zeros.shape[0])
        middle = 1 << (self.bits - 1)
        is_symmetric = bool((zeros == middle).all())
        if self.is_symmetric and bool((zeros == zeros[0, 0]).all()) and int(zeros[0, 0]) in (middle - 1, middle + 1):
            raise ValueError(
                f"sym=true means zeros of {middle}, and all are {int(zeros[0, 0])}: write {self.contrary} into "
                "quantization_config in config.json"
            )
        of_outputs = None if is_symmetric else zeros.t().contiguous()
        return GroupedWeight(qweight.t().contiguous(), tensors["scales"].t().contiguous(), of_outputs, self.bits, order)

    def quantize(self, weight: torch.Tensor) -> GroupedWeight:
        """Implement `Scheme.quantize`."""
        size = weight.shape[1] if self.group_size == -1 else self.group_size
        return rounding.grouped(weight, self.bits, size, self.is_symmetric)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Implement `Scheme.num_bytes`."""
        return grouped_bytes(self.bits, self.group_size, self.is_symmetric, out_features, in_features)


def write(quantized: GroupedWeight, is_version_2: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of a projection; the inverse of `Gptq.read`.

    Raises:
        ValueError: a zero cannot be stored.
    """
    zeros, num_in = quantized.with_zeros(), quantized.qweight.shape[1]
    if int(zeros.min()) < 0 or int(zeros.max()) >= 1 << quantized.bits:
        raise ValueError(f"zeros of {quantized.bits} bits are 0 to {(1 << quantized.bits) - 1}")
    order = quantized.group_index
    if order is None:
        order = torch.arange(num_in, dtype=torch.int32) // quantized.group_size
    words = pack(zeros.t(), quantized.bits, dim=1)
    return {
        "qweight": pack(quantized.qweight.t(), quantized.bits, dim=0),
        "qzeros": words if is_version_2 else words - _in_each_field(quantized.bits),
        "scales": quantized.scales.t().contiguous(),
        "g_idx": order.to(torch.int32),
    }


def parse(config: JsonObject, names: Container[str] | None) -> Callable[[str], Scheme | None]:
    """Return a function from the name of a projection to its scheme.

    Args:
        config: the `quantization_config` of a checkpoint.
        names: of its tensors; None: they are not known, and every layer is taken for quantized.

    Raises:
        ModelError: it says what is not supported, here or when a layer's scheme is asked for.
    """
    layout_key = "checkpoint_format" if config.has("checkpoint_format") else "format"
    layout = config.text(layout_key, "gptq")
    if layout not in LAYOUTS:
        raise ModelError(
            f"{config.where}: quant_method='gptq': GPTQ in the layout {layout!r} ({layout_key}) is not supported, only "
            "'gptq' and 'gptq_v2': take a checkpoint in these"
        )
    usual = Gptq(
        bits=checked_bits(config, "every layer"),
        group_size=config.integer("group_size", least=-1),
        is_symmetric=config.flag("sym", True),
        stored_offset=LAYOUTS[layout],
        contrary=f"checkpoint_format={'gptq_v2' if LAYOUTS[layout] else 'gptq'!r}",
    )
    quantizes_head, rules = config.flag("lm_head", False), config.object("dynamic")

    def scheme_of(name: str) -> Scheme | None:
        if names is None:
            if name == "lm_head" and not quantizes_head:
                return None
        elif f"{name}.qweight" not in names:
            return None
        for rule in rules:
            if not matches(rule.removeprefix("+:").removeprefix("-:"), name, rules, rule):
                continue
            if rule.startswith("-:"):
                return None
            changes = rules.object(rule)
            return replace(
                usual,
                bits=checked_bits(changes, name, usual.bits),
                group_size=changes.integer("group_size", usual.group_size, least=-1),
                is_symmetric=changes.flag("sym", usual.is_symmetric),
            )
        return usual

    return scheme_of


def check_sizes(group_size: int, in_features: int) -> None:
    """Refuse groups that no such format has.

    Raises:
        ValueError: as in `Scheme.stored`.
    """
    if group_size != -1 and (group_size < 1 or in_features % group_size):
        what = f"groups of {group_size} do not divide its {in_features} inputs"
        raise ValueError(f"{what}: correct group_size, or {LEAVE_OUT}")


def num_groups(group_size: int, in_features: int) -> int:
    """Return the number of groups per output."""
    return 1 if group_size == -1 else in_features // group_size


def grouped_bytes(bits: int, group_size: int, is_symmetric: bool, out_features: int, in_features: int) -> int:
    """Return the bytes on a GPU, with scales of two bytes and zeros of one; or dequantized, see `fits_kernels`."""
    groups = num_groups(group_size, in_features)
    if not fits_kernels(groups, group_size):
        return 2 * out_features * in_features
    return out_features * in_features * bits // 8 + out_features * groups * (2 if is_symmetric else 3)


def checked_bits(
    values: JsonObject, name: str, *default: int, key: str = "bits", supported: tuple[int, ...] = BITS
) -> int:
    """Return the bits of a layer's quantized values.

    Args:
        name: of the layer, for errors.

    Raises:
        ModelError: it is not supported.
    """
    bits = values.integer(key, *default)
    if bits not in supported:
        only = " and ".join(map(str, supported))
        raise ModelError(
            f"{values.where}: {key}={bits}: {name}: {bits} bits are not supported, only {only}: take a checkpoint with "
            "these"
        )
    return bits


def _in_each_field(bits: int) -> int:
    return 0x11111111 if bits == 4 else 0x01010101


def unless_sorted(order: torch.Tensor, groups: int) -> torch.Tensor | None:
    """Return the group of each input; None if each group's inputs are beside each other, in order.

    Raises:
        ValueError: there are no such groups, or some are larger than others.
    """
    if int(order.min()) < 0 or int(order.max()) >= groups:
        raise ValueError(f"g_idx names group {int(order.max())} of {groups}: the file is broken, download it again")
    sizes = torch.bincount(order.long(), minlength=groups)
    if not bool((sizes == sizes[0]).all()):
        smallest, largest = int(sizes.min()), int(sizes.max())
        raise ValueError(f"g_idx has groups of {smallest} to {largest} inputs: the file is broken, download it again")
    in_order = torch.arange(len(order), dtype=order.dtype, device=order.device) // -(-len(order) // groups)
    return None if torch.equal(order, in_order) else order
