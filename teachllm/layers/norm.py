"""RMS norm as a layer: the weight, and the operation of `teachllm_kernels.rms_norm`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from teachllm.layers.checkpoint_tensors import TensorDestination, joined, parent
from teachllm_kernels.comm.one_shot_all_reduce import DeferredAllReduce
from teachllm_kernels.quantize_rows import QuantizedRows
from teachllm_kernels.rms_norm import (
    prepare_rms_norm,
    rms_norm_cpu,
    rms_norm_quantized_triton,
    rms_norm_reference,
    rms_norm_triton,
)


class InputQuantization(NamedTuple):
    """Tells a norm how the linear layer after it quantizes its input.

    Attributes:
        dtype: the dtype of the quantized values, int8 or float8_e4m3fn.
        scale: [1] float32, the scale of all values; None: each row has its own.
        grouped: each 128 values of a row have a scale instead.
    """

    dtype: torch.dtype
    scale: torch.Tensor | None
    grouped: bool


class RMSNorm(nn.Module):
    """Scales vectors to unit root mean square, then by a learned weight.

    Args:
        shape: of the weight. (hidden_size,) for whole rows; (num_heads, head_size) where every head has its own.
        eps: added to the mean square.
    """

    def __init__(self, *shape: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))
        self.eps = eps
        self.prepared: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def is_known_to_kernels(self) -> bool:
        """Return whether a kernel that takes the weight computes this norm; a subclass may be another norm."""
        return type(self) in (RMSNorm, QKNorm)

    def forward(
        self, y: torch.Tensor | DeferredAllReduce | None, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(residual + y), residual + y), both [..., size]; of one alone, where the other is None.

        On a GPU y may be in parts that are added up first, of this rank or of several, see `Linear.add_to_residual`.
        """
        if y is None:
            assert residual is not None
            y, residual = residual, None
        if isinstance(y, DeferredAllReduce) or not y.is_cpu:
            return rms_norm_triton(y, residual, self.weight, self.eps)
        if self.prepared is not None:
            return rms_norm_cpu(y, residual, self.prepared)
        return rms_norm_reference(y, residual, self.weight, self.eps)

    def quantized(
        self,
        y: torch.Tensor | DeferredAllReduce | None,
        residual: torch.Tensor | None,
        input_quantization: InputQuantization | None,
    ) -> tuple[torch.Tensor | QuantizedRows, torch.Tensor]:
        """Return what `forward` returns, but with the first tensor quantized; on a GPU only.

        Without `input_quantization` nothing is quantized, nor if a kernel does not compute this norm; then the linear
        layer after it quantizes its input itself.
        """
        if input_quantization is None or not self.is_known_to_kernels:
            return self(y, residual)
        if y is None:
            assert residual is not None
            y, residual = residual, None
        return rms_norm_quantized_triton(
            y,
            residual,
            self.weight,
            self.eps,
            dtype=input_quantization.dtype,
            scale=input_quantization.scale,
            grouped=input_quantization.grouped,
        )

    def prepare(self) -> None:
        """Prepare the filled weight for a CPU."""
        self.prepared = prepare_rms_norm(self.weight.data, self.eps)

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, TensorDestination]]:
        """Yield the weight."""
        yield joined(path, "weight"), TensorDestination(self.weight.data, tuple(self.weight.shape), constant=1.0)


class QKNorm(RMSNorm):
    """Scales every head of Q and K to unit root mean square, in one call.

    A checkpoint has one weight for all heads of Q and one for those of K; here each head has a copy.

    Args:
        names: what the checkpoint calls the two norms.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_size: int, *, eps: float, names: tuple[str, str]
    ) -> None:
        super().__init__(num_heads + num_kv_heads, head_size, eps=eps)
        self._num_each, self._names = [num_heads, num_kv_heads], names

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, TensorDestination]]:
        """Yield both weights, which lie side by side in the module that holds this one."""
        for name, heads in zip(self._names, self.weight.data.split(self._num_each), strict=True):
            yield joined(parent(path), f"{name}.weight"), TensorDestination(heads, tuple(heads.shape[1:]), constant=1.0)
