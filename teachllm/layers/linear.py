"""Linear layers, merged where several projections read the same input (lesson 12).

Q, K and V read one input, and so do gate and up: as one matrix each they cost one product instead of three or two,
and larger products run nearer to the hardware's limit. A checkpoint stores the projections apart: an unquantized one
fills its rows of the merged matrix; quantized ones are collected, and merged when all are loaded.

In a group of ranks a layer holds some outputs of each projection, or some of the inputs: what the ranks then have are
parts of a sum, and they add them up. See `distributed/shards.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch
from torch import nn

from teachllm.distributed.group import ALONE, Group
from teachllm.distributed.shards import ALL, Shard
from teachllm.layers.checkpoint_tensors import Destination, destination, joined, parent
from teachllm.layers.norm import InputQuantization, RMSNorm
from teachllm.layers.weights.base import Rows, Weight
from teachllm.layers.weights.dense_weight import DenseWeight
from teachllm.layers.weights.execution_weights import weight_of
from teachllm.layers.weights.quantized_weight_loader import QuantizedWeightLoader
from teachllm.layers.weights.quantized_weights import merged
from teachllm.layers.weights.scheme import UNQUANTIZED, Schemes
from teachllm.layers.weights.several_weights import SeveralWeights
from teachllm_kernels.comm.one_shot_all_reduce import DeferredAllReduce

__all__ = ["Addend", "Destination", "Linear", "Rows"]

Addend: TypeAlias = torch.Tensor | DeferredAllReduce | None  # what `RMSNorm` adds to the residual


class Linear(nn.Module):
    """y = x W^T + b.

    Args:
        in_features: size of x's last dimension, of all ranks together.
        out_features: rows of W by the name that the checkpoint gives to them, in the order of y's columns, of all ranks
            together. `{"q_proj": 2048, "k_proj": 512, "v_proj": 512}` is a merged projection.
        schemes: how each of them is quantized.
        is_gated: they are gate and up, for `gated`.
        rows, columns: which of the outputs of each projection, and of the inputs of all, are here.
        group: whose ranks have the others.

    Attributes:
        in_features, out_features: the sizes of what is here.
        weight: W; of a quantized layer not before all of it was read.
    """

    weight: Weight

    def __init__(
        self,
        in_features: int,
        out_features: dict[str, int],
        bias: bool = False,
        schemes: Schemes = UNQUANTIZED,
        is_gated: bool = False,
        rows: Mapping[str, Shard] | None = None,
        columns: Shard = ALL,
        group: Group = ALONE,
    ) -> None:
        super().__init__()
        self._rows, self._columns, self._group = rows or {}, columns, group
        self._sums = columns.count > 1
        self.in_features, self.is_gated = columns.equal(in_features), is_gated
        self.out_features = {name: self._rows.get(name, ALL).equal(size) for name, size in out_features.items()}
        size = sum(self.out_features.values())
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if bias else None
        by_name = {name: schemes(name) for name in out_features}
        self._reading: dict[str, QuantizedWeightLoader | torch.Tensor] = {}
        here = torch.empty(0)  # of the model's dtype, on its device
        self._dtype = here.dtype
        if not any(by_name.values()):
            self.weight = DenseWeight(torch.empty(size, self.in_features), has_bias=bias)
            return
        for name, scheme in by_name.items():
            if scheme is None:
                self._reading[name] = torch.empty(self.out_features[name], self.in_features)
                continue
            self._reading[name] = QuantizedWeightLoader(
                scheme,
                schemes.full_name(name),
                out_features[name],
                in_features,
                here,
                self._merge_when_read,
                rows=self._rows.get(name, ALL).of(out_features[name]),
                columns=columns.of(in_features),
            )

    @property
    def input_quantization(self) -> InputQuantization | None:
        """Return how the norm before this layer may quantize its output; None: not at all."""
        return self.weight.input_quantization

    @property
    def fuses_one_row(self) -> bool:
        """Return whether one row is multiplied the fastest by `one_row`; otherwise like several."""
        return self.weight.fuses_one_row

    def forward(self, x: Rows) -> torch.Tensor:
        """Return x W^T + b: [num_tokens, in_features] -> [num_tokens, sum of out_features]."""
        y = self.weight.product(x, self._own_bias)
        return self._group.all_reduce(y) if self._sums else y

    def add_to_residual(self, residual: torch.Tensor, x: Rows) -> tuple[Addend, torch.Tensor]:
        """Return what `RMSNorm` adds up to residual + x W^T + b, in the form that is the fastest for so many tokens.

        Args:
            residual: [num_tokens, sum of out_features]; may be changed in place.

        Returns:
            (y, residual), [num_tokens, sum of out_features]. y may be in parts to be added up, [num_parts, num_tokens,
            sum of out_features] float32, or at several ranks; or None: added already.
        """
        if not self._sums:
            return self.weight.add_to_residual(residual, x, self.bias)
        return self._group.deferred_all_reduce(self.weight.product(x, self._own_bias)), residual

    def gated(self, x: Rows) -> torch.Tensor:
        """Return silu(gate) * up of a layer of gate and up: [num_tokens, in_features] -> [num_tokens, size]."""
        assert not self._sums
        return self.weight.gated(x, self.bias)

    def one_row(
        self, x: torch.Tensor, norm: RMSNorm | None = None, residual: torch.Tensor | None = None, gated: bool = False
    ) -> torch.Tensor:
        """Return residual + act(norm(x) W^T + b) on a GPU, in one launch; `gated`: act is silu(gate) * up.

        Args:
            x: [1, in_features].
        """
        if not self._sums:
            return self.weight.one_row(x, self.bias, norm, residual, gated)
        assert norm is None and not gated
        residual = residual if self._group.rank == 0 else None
        return self._group.all_reduce(self.weight.one_row(x, self._own_bias, None, residual))

    @property
    def _own_bias(self) -> torch.Tensor | None:
        """Return what this rank adds: of a sum one rank does."""
        return None if self._sums and self._group.rank > 0 else self.bias

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, Destination]]:
        """Yield the tensors of each projection, which lie side by side in the module that holds this layer.

        Raises:
            RuntimeError: the layer is finished, and has its weight in another form than the checkpoint.
        """
        first, within = 0, parent(path)
        for name, rows in self.out_features.items():
            reading, shards = self._reading.get(name), (self._rows.get(name, ALL), self._columns)
            own = slice(first, first + rows)
            if isinstance(reading, QuantizedWeightLoader):
                for tensor_name, slot in reading.slots.items():
                    yield joined(within, f"{name}.{tensor_name}"), slot
            elif reading is not None:
                yield joined(within, f"{name}.weight"), destination(reading, *shards)
            else:
                if not isinstance(self.weight, DenseWeight) or self.weight.packed is not None:
                    raise RuntimeError(f"{joined(within, name)} is finished: read its checkpoint's tensors before that")
                yield joined(within, f"{name}.weight"), destination(self.weight.weight.data[own], *shards)
            if self.bias is not None:
                yield joined(within, f"{name}.bias"), destination(self.bias.data[own], shards[0], constant=0.0)
            first += rows

    def finish(self) -> None:
        """Build the execution weights from the loaded tensors, and bind the kernels that multiply them."""
        if self._reading:
            self._merge()
        self.weight.finish()

    def fill_randomly(self, generator: torch.Generator | None) -> None:
        """Fill a layer that is quantized, wholly or in part, with random weights instead of a file's."""
        for part in list(self._reading.values()):
            if isinstance(part, torch.Tensor):
                part.normal_(0.0, part.shape[-1] ** -0.5, generator=generator)
            else:
                part.fill_randomly(generator)
        self._merge_when_read()

    def unread(self) -> Iterator[QuantizedWeightLoader]:
        """Yield its quantized projections, before `finish`."""
        yield from (each for each in self._reading.values() if isinstance(each, QuantizedWeightLoader))

    def num_bytes(self, dtype_bytes: int) -> int:
        """Return the bytes of weight and bias on a GPU, before `finish`; `dtype_bytes` per unquantized value."""
        size = sum(self.out_features.values())
        num_biases = 0 if self.bias is None else size
        if not self._reading:
            return (num_biases + size * self.in_features) * dtype_bytes
        unquantized = [each.numel() for each in self._reading.values() if isinstance(each, torch.Tensor)]
        return (num_biases + sum(unquantized)) * dtype_bytes + sum(each.num_bytes for each in self.unread())

    def _merge_when_read(self) -> None:
        """Merge at once if all are quantized: at most one layer lies unpacked in memory, at a byte per value."""
        if self._reading and all(
            isinstance(each, QuantizedWeightLoader) and each.is_read for each in self._reading.values()
        ):
            self._merge()

    def _merge(self) -> None:
        """Merge the projections to one weight, if that is possible."""
        read = [
            each.quantized_weight() if isinstance(each, QuantizedWeightLoader) else each
            for each in self._reading.values()
        ]
        self._reading.clear()
        whole, has_bias = merged(read), self.bias is not None
        if whole is not None:
            self.weight = weight_of(whole, self._dtype, self.is_gated, has_bias)
        else:
            self.weight = SeveralWeights([weight_of(each, self._dtype, has_bias=has_bias) for each in read])
