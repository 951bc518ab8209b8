"""Folding: scaling the inputs of linear layers, at no cost when the model runs.

    norm -> q, k, v       the norm's weights are divided by s, columns of Q, K and V multiplied with it
    v -> attention -> o   rows of V are divided. Several heads of attention share one of V, and so its scales
    norm -> gate, up      as Q, K and V
    up -> gate * up -> down   rows of up

Who shares an input, and which norm it comes from, is found by running the block. Which other linear layer an input
comes from is tried out, and so is whether the block still computes the same: there are norms that add 1 to their
weights, and blocks that put norms elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from teachllm.quantization.algorithms.blocks import DecoderBlock

_TOLERANCE = 1e-3


@dataclass(frozen=True)
class LayerGroup:
    """Linear layers of a block that are given the same input.

    Attributes:
        names: below the block's, in the order in which they run.
        source: the norm or linear layer that can divide that input; None: there is none.
        head_size: several heads of this size of the input come from one of the source; None: one from one.
    """

    names: tuple[str, ...]
    source: str | None = None
    head_size: int | None = None

    def tied(self, of_inputs: torch.Tensor, source_size: int) -> torch.Tensor:
        """Map [in] to [source_size]: the mean of inputs that come from one output of the source."""
        if self.head_size is None:
            return of_inputs
        return of_inputs.view(source_size // self.head_size, -1, self.head_size).mean(dim=1).flatten()

    def spread(self, of_source: torch.Tensor, num_in: int) -> torch.Tensor:
        """Map [source_size] to [in]."""
        if self.head_size is None:
            return of_source
        heads = of_source.view(-1, self.head_size)
        return heads.repeat_interleave(num_in // of_source.numel(), dim=0).flatten()


def groups_of(block: DecoderBlock, hidden: torch.Tensor) -> list[LayerGroup]:
    """Return a block's linear layers, and the source that can divide their inputs: each is tried out.

    Args:
        hidden: [1, seq_len, hidden_size], any.
    """
    found: list[LayerGroup] = []
    for group in sharing(block, hidden):
        before = [name for each in found for name in each.names]
        for candidate in _candidates(block, group, before):
            if _keeps_output(block, candidate, hidden):
                found.append(candidate)
                break
        else:
            found.append(LayerGroup(group.names))
    return found


@torch.no_grad()
def fold(block: DecoderBlock, group: LayerGroup, scales: torch.Tensor, stored_dtype: torch.dtype) -> torch.Tensor:
    """Divide the inputs of a group at their source, and multiply the weights by the same scales.

    Args:
        scales: [outputs of the source], positive.
        stored_dtype: of a norm's weights in the file: inputs are divided by what is left after they are rounded to it.

    Returns:
        [in] by what inputs were divided.
    """
    assert group.source is not None
    source: Any = block.module.get_submodule(group.source)
    layers = [block.linears()[name] for name in group.names]
    if isinstance(source, nn.Linear):
        source.weight /= scales[:, None]
    else:
        before = source.weight.clone()
        source.weight.copy_((before / scales).to(stored_dtype).float())
        is_kept = (before != 0) & (source.weight != 0)
        scales = torch.where(is_kept, before / source.weight, torch.ones_like(before))
    if getattr(source, "bias", None) is not None:
        source.bias /= scales
    of_inputs = group.spread(scales, layers[0].in_features)
    for layer in layers:
        layer.weight *= of_inputs
    return of_inputs


def source_size(block: DecoderBlock, group: LayerGroup) -> int:
    """Count the outputs of a group's source, each of which may have a scale."""
    assert group.source is not None
    weight = block.module.get_submodule(group.source).weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


@torch.no_grad()
def sharing(block: DecoderBlock, hidden: torch.Tensor) -> list[LayerGroup]:
    """Group a block's linear layers by the tensor that they were given, in the order in which they run.

    The source is the norm that made the tensor; whether it can be folded into is not known.

    Args:
        hidden: [1, seq_len, hidden_size], any.
    """
    norms: list[tuple[torch.Tensor, str]] = []
    inputs: list[tuple[torch.Tensor, list[str]]] = []

    def made(name: str) -> Callable[..., None]:
        return lambda module, arguments, output: norms.append((output, name))

    def taken(name: str) -> Callable[..., None]:
        def note(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            for tensor, names in inputs:
                if tensor is arguments[0]:
                    return names.append(name)
            inputs.append((arguments[0], [name]))

        return note

    handles = []
    for name, module in block.module.named_modules():
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_pre_hook(taken(name)))
        elif getattr(module, "weight", None) is not None and module.weight.dim() == 1:
            handles.append(module.register_forward_hook(made(name)))
    try:
        block(hidden)
    finally:
        for handle in handles:
            handle.remove()
    return [
        LayerGroup(tuple(names), next((norm for output, norm in norms if output is tensor), None))
        for tensor, names in inputs
    ]


def _candidates(block: DecoderBlock, group: LayerGroup, before: Sequence[str]) -> list[LayerGroup]:
    """Return ways in which a group might be folded: into its norm, or into a layer of the same module before it.

    Args:
        before: the linear layers that have run, of which the last ones are the likeliest sources.
    """
    if group.source is not None:
        return [group]
    if len(group.names) > 1:
        return []
    parent, layers = group.names[0].rpartition(".")[0], block.linears()
    num_in, head_size = (
        layers[group.names[0]].in_features,
        getattr(block.module.get_submodule(parent), "head_dim", None),
    )
    found = []
    for source in reversed(before):
        size = layers[source].out_features
        if source.rpartition(".")[0] != parent or num_in % size:
            continue
        if size == num_in:
            found.append(LayerGroup(group.names, source))
        elif head_size:
            found.append(LayerGroup(group.names, source, head_size))
    return found


def _keeps_output(block: DecoderBlock, group: LayerGroup, hidden: torch.Tensor) -> bool:
    """Return whether a copy of the block, folded by random scales, computes the same."""
    folded = DecoderBlock(block.name, copy.deepcopy(block.module), block.others)
    generator = torch.Generator().manual_seed(0)
    scales = (torch.rand(source_size(block, group), generator=generator) + 0.5).to(hidden.device)
    fold(folded, group, scales, torch.float32)
    before, after = block.run(hidden), folded.run(hidden)
    return bool((before - after).abs().max() <= _TOLERANCE * (before - hidden).abs().max())
