"""Say what the tensors of a checkpoint fill: a module names each, and where it goes.

A model is loaded, counted and checked by this list alone: nothing guesses from a name or a number of dimensions. A
module without a `checkpoint_tensors` of its own has the tensors of its parameters and submodules, by the names of their
attributes, as in `state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import nn

from teachllm.distributed.shards import Shard
from teachllm.layers.weights.quantized_weight_loader import Slot


@dataclass(frozen=True, slots=True)
class TensorDestination:
    """Describe what one tensor of a checkpoint, or this rank's part of it, is copied to.

    Attributes:
        target: the tensor that is filled. It may have dimensions in front that the checkpoint's tensor lacks; then each
            of their entries gets a copy, as of a norm that all heads share.
        shape: the shape of the whole tensor in the checkpoint.
        ranges: this rank's part of it, as a range of each dimension; None: all of it.
        constant: its value in a model without a checkpoint (`load_format="dummy"`), 1 for a norm's weight and 0 for a
            bias; None: random values.
        share_met: the share of all tokens that meet it; less than 1 for a weight of an expert.
    """

    target: torch.Tensor
    shape: tuple[int, ...]
    ranges: tuple[slice, ...] | None = None
    constant: float | None = None
    share_met: Fraction = Fraction(1)

    @property
    def num_elements(self) -> int:
        """Return the number of the checkpoint's values that are copied; copies of one value count once."""
        if self.ranges is None:
            return torch.Size(self.shape).numel()
        return torch.Size(each.stop - each.start for each in self.ranges).numel()


Destination: TypeAlias = TensorDestination | Slot
_OF_VECTORS = {"weight": 1.0, "bias": 0.0}  # of PyTorch's own norms and layers, as they initialize them


def destination(
    target: torch.Tensor, *shards: Shard, constant: float | None = None, share_met: Fraction = Fraction(1)
) -> TensorDestination:
    """Return what a tensor of a checkpoint fills: all of `target`, or, given the shard of each dimension, a part of it.

    Args:
        target: this rank's shard.
        constant, share_met: as of `TensorDestination`.
    """
    if all(each.count == 1 for each in shards):
        return TensorDestination(target, tuple(target.shape), constant=constant, share_met=share_met)
    shape = tuple(size * each.count for size, each in zip(target.shape, shards, strict=True))
    ranges = tuple(each.of(size) for size, each in zip(shape, shards, strict=True))
    return TensorDestination(target, shape, ranges, constant, share_met)


@runtime_checkable
class HasCheckpointTensors(Protocol):
    """A module that names its tensors itself."""

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, Destination]]:
        """Yield (name, destination) of every tensor that a checkpoint holds for this module, at `path` in the model."""
        ...


def checkpoint_tensors(module: nn.Module, path: str = "") -> Iterator[tuple[str, Destination]]:
    """Yield (name, destination) of every tensor that a checkpoint holds for a module.

    Args:
        path: the module's name in the checkpoint, for example "model.layers.0.self_attn"; "" for the whole.
    """
    if isinstance(module, HasCheckpointTensors):
        yield from module.checkpoint_tensors(path)
        return
    for name, parameter in module.named_parameters(recurse=False):
        constant = _OF_VECTORS.get(name) if parameter.dim() == 1 else None
        yield joined(path, name), destination(parameter.data, constant=constant)
    for name, child in module.named_children():
        yield from checkpoint_tensors(child, joined(path, name))


def joined(path: str, name: str) -> str:
    """Return the name of what `name` is called within the module at `path`."""
    return f"{path}.{name}" if path else name


def parent(path: str) -> str:
    """Return the path of the module that holds the one at `path`."""
    return path.rpartition(".")[0]
