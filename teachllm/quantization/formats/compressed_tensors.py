"""Checkpoints of compressed-tensors: one format that says for groups of layers how they are quantized.

    pack-quantized        weight_packed int32 [out, in * bits / 32], weight_scale [out, groups], weight_shape [2];
                          weight_zero_point int32 [out * bits / 32, groups]; weight_g_idx [in]
    int-, float-, naive-  weight int8 or e4m3 [out, in], weight_scale [1] | [out, 1] | by blocks; input_scale [1]
    nvfp4-, mxfp4-        weight_packed uint8 [out, in / 2], weight_scale e4m3 or e8m0 [out, in / 16 or 32];
                          weight_global_scale [1], which divides

A layer belongs to the first group of which a target is its name, a pattern "re:..." of it, or its class ("Linear"),
unless `ignore` has it.

Source: vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

import torch

from teachllm.checkpoint.json_values import JsonObject
from teachllm.errors import ModelError
from teachllm.layers.weights.quantized_weight_loader import NOT_THIS_FILE
from teachllm.layers.weights.quantized_weights import BLOCK, Activations, GroupedWeight, ScaledWeight
from teachllm.layers.weights.scheme import FLOATS, Scheme, Stored
from teachllm.quantization.formats import rounding
from teachllm.quantization.formats.fp4 import Fp4
from teachllm.quantization.formats.gptq import BITS, check_sizes, grouped_bytes, num_groups, unless_sorted
from teachllm.quantization.formats.name_patterns import matches
from teachllm.quantization.formats.packing import INTS, WORD, pack, unpack
from teachllm.quantization.formats.scaled import Scaled

_SUPPORTED = (
    "pack-quantized int4 or int8 by group or channel, int-quantized or float-quantized by tensor, channel or block, "
    "with activations of the same type or none, nvfp4- or mxfp4-pack-quantized, or mxfp8-quantized"
)


@dataclass(frozen=True)
class Packed:
    """Integers of a projection in words; `group_size` -1: all inputs of an output share a scale."""

    bits: int
    group_size: int
    is_symmetric: bool = True

    def __str__(self) -> str:
        return f"pack-quantized (num_bits {self.bits}, group_size {self.group_size})"

    def stored(self, out_features: int, in_features: int) -> dict[str, Stored]:
        """Implement `Scheme.stored`."""
        check_sizes(self.group_size, in_features)
        per_word, groups = WORD // self.bits, num_groups(self.group_size, in_features)
        tensors = {
            "weight_packed": Stored((out_features, -(-in_features // per_word)), INTS),
            "weight_scale": Stored((out_features, groups), FLOATS),
            "weight_shape": Stored((2,), (torch.int64, torch.int32), is_optional=True),
            "weight_g_idx": Stored((in_features,), INTS, is_optional=True),
        }
        if not self.is_symmetric:
            tensors["weight_zero_point"] = Stored((-(-out_features // per_word), groups), INTS)
        return tensors

    def read(self, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int) -> GroupedWeight:
        """Implement `Scheme.read`."""
        shape = tensors.get("weight_shape")
        if shape is not None and shape.tolist() != [out_features, in_features]:
            shapes = f"{shape.tolist()}, config.json means {[out_features, in_features]}"
            raise ValueError(f"weight_shape is {shapes}: {NOT_THIS_FILE}")
        qweight = unpack(tensors["weight_packed"], self.bits, dim=1)[:, :in_features].contiguous()
        zeros = tensors.get("weight_zero_point")
        if zeros is not None:
            zeros = unpack(zeros, self.bits, dim=0)[:out_features].to(torch.int32)
        scales, order = tensors["weight_scale"], tensors.get("weight_g_idx")
        if order is not None:
            order = unless_sorted(order, scales.shape[1])
        return GroupedWeight(qweight, scales, zeros, self.bits, order)

    def quantize(self, weight: torch.Tensor) -> GroupedWeight:
        """Implement `Scheme.quantize`."""
        size = weight.shape[1] if self.group_size == -1 else self.group_size
        return rounding.grouped(weight, self.bits, size, self.is_symmetric, weight.dtype)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Implement `Scheme.num_bytes`."""
        return grouped_bytes(self.bits, self.group_size, self.is_symmetric, out_features, in_features)


def write(quantized: GroupedWeight) -> dict[str, torch.Tensor]:
    """Return the tensors of such a file; the inverse of `Packed.read`."""
    tensors = {
        "weight_packed": pack(quantized.qweight, quantized.bits, dim=1),
        "weight_scale": quantized.scales,
        "weight_shape": torch.tensor(quantized.qweight.shape),
    }
    if quantized.zeros is not None:
        tensors["weight_zero_point"] = pack(quantized.zeros, quantized.bits, dim=0)
    return tensors | ({} if quantized.group_index is None else {"weight_g_idx": quantized.group_index})


def write_scaled(quantized: ScaledWeight) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of an 8-bit weight."""
    scales = quantized.scales.reshape(1) if quantized.scales.numel() == 1 else quantized.scales
    tensors = {"weight": quantized.qweight, "weight_scale": scales}
    return tensors | ({} if quantized.input_scale is None else {"input_scale": quantized.input_scale})


def parse(config: JsonObject, names: Container[str] | None) -> Callable[[str], Scheme | None]:
    """Parse a configuration, like `gptq.py`."""
    for key in ("sparsity_config", "transform_config"):
        if config.object(key) and config.object(key).text("format", "") != "dense":
            raise ModelError(
                f"{config.where}: compressed-tensors with a {key} is not supported: take a checkpoint without one"
            )
    all_groups, layout = config.object("config_groups"), config.text("format", "")
    groups = [
        (_targets_of(all_groups, name), scheme)
        for name in all_groups
        if (scheme := _scheme_of_group(all_groups, name, layout)) is not None
    ]
    ignored = config.texts("ignore")

    def scheme_of(name: str) -> Scheme | None:
        def is_named(targets: Sequence[str]) -> bool:
            return any(_is_named(name, target, config) for target in targets)

        if is_named(ignored):
            return None
        if names is None and name == "lm_head" and not any(is_named(targets) for targets, _ in groups):
            return None
        if names is not None and f"{name}.weight_scale" not in names:
            return None
        # Whose name is meant goes before whose class is.
        for targets, scheme in sorted(groups, key=lambda group: not is_named(group[0])):
            if is_named(targets) or "Linear" in targets:
                return scheme
        return None

    return scheme_of


def _is_named(name: str, target: str, config: JsonObject) -> bool:
    if target.startswith("re:"):
        return matches(target[3:], name, config, "config_groups")
    return target == name


def _targets_of(groups: JsonObject, name: str) -> list[str]:
    """Return which projections a group means; a preset has nothing but these."""
    return groups.object(name).texts("targets") if groups.is_object(name) else groups.texts(name)


def _scheme_of_group(groups: JsonObject, name: str, layout: str) -> Scheme | None:
    """Return how the layers of a group are quantized; None: their weights are not.

    Args:
        layout: of groups that do not name their own.

    Raises:
        ModelError: they are not supported, or not settings.
    """
    where = f"{groups.where}: compressed-tensors, {name} of {_targets_of(groups, name)}"
    written_out = "in place of settings is not supported: write them out"
    if not groups.is_object(name):
        raise ModelError(f"{where}: a name ({name!r}) {written_out}")
    group = groups.object(name)
    for key in ("weights", "input_activations"):
        if group.has(key) and not group.is_object(key):
            raise ModelError(f"{where}: a name ({group.as_dict()[key]!r}) {written_out}")
    if not group.has("weights"):
        return None
    try:
        return _scheme(group.object("weights"), group.object("input_activations"), group.text("format", layout))
    except ValueError as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{where}: {error} is not supported: take a checkpoint with {_SUPPORTED}") from None


def _scheme(weights: JsonObject, inputs: JsonObject, layout: str) -> Scheme:
    """Return how weights are quantized, and what they are multiplied with, if `inputs` says anything.

    Raises:
        ValueError: names what is not supported.
    """
    bits, kind = weights.integer("num_bits"), weights.text("type")
    if layout in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        return Fp4(layout[:5])  # of activations nothing is quantized: only cards with 4-bit tensor cores gain by it
    size = weights.integer("group_size", -1, least=-1)
    usual = "tensor" if not weights.has("group_size") else "channel" if size == -1 else "group"
    strategy, is_symmetric = weights.text("strategy", usual), weights.flag("symmetric", True)
    if layout == "pack-quantized" and kind == "int" and bits in BITS and strategy in ("channel", "group"):
        if strategy == "group":
            weights.integer("group_size")
        return Packed(bits, -1 if strategy == "channel" else size, is_symmetric)
    if (
        layout in ("int-quantized", "float-quantized", "naive-quantized")
        and bits == 8
        and strategy in ("tensor", "channel", "block")
    ):
        if not is_symmetric:
            raise ValueError(f"{layout} with weights that are not symmetric")
        return _scaled(weights, inputs, kind, strategy)
    if layout == "mxfp8-quantized" and strategy == "group":  # activations stay, likewise
        return Scaled(torch.float8_e4m3fn, "block", Activations.UNQUANTIZED, block=(1, weights.integer("group_size")))
    raise ValueError(f"the format {layout!r} with {bits}-bit {kind} weights by {strategy}")


def _scaled(weights: JsonObject, inputs: JsonObject, kind: str, strategy: str) -> Scaled:
    """Return how 8-bit weights are read and multiplied. Errors are as in `_scheme`."""
    activations, block = _activations(inputs, kind), None
    if strategy == "block":
        block = weights.integers("block_structure") or (BLOCK, BLOCK)
        if len(block) != 2 or min(block) < 1:
            raise weights.refusal("block_structure", "two whole numbers from 1")
    is_by_block = activations is Activations.BY_BLOCK
    if (block is not None or is_by_block) and (block != (BLOCK, BLOCK) or not is_by_block):
        activations = Activations.UNQUANTIZED  # no kernel multiplies these with each other
    return Scaled(
        dtype=torch.int8 if kind == "int" else torch.float8_e4m3fn,
        per=strategy,
        activations=activations,
        block=(BLOCK, BLOCK) if block is None else (block[0], block[1]),
        of_batch=activations is Activations.BY_TOKEN and inputs.text("strategy", "tensor") != "token",
    )


def _activations(inputs: JsonObject, weight_kind: str) -> Activations:
    if not inputs:
        return Activations.UNQUANTIZED
    strategy = inputs.text("strategy", "tensor")
    bits, kind = inputs.integer("num_bits", 8), inputs.text("type", weight_kind)
    if bits != 8 or kind != weight_kind:
        raise ValueError(f"a product of {weight_kind} weights and {bits}-bit {kind} activations")
    if not inputs.flag("symmetric", True):
        raise ValueError(f"a product of {kind} weights and activations that are not symmetric")
    if strategy == "token":
        return Activations.BY_TOKEN
    if strategy == "group" and inputs.integer("group_size") == BLOCK:
        return Activations.BY_BLOCK
    if strategy == "tensor":
        return Activations.BY_TOKEN if inputs.flag("dynamic", False) else Activations.STATIC
    raise ValueError(f"a product of {kind} weights and activations by {strategy}")
