"""Turn a loaded weight, quantized or not, into the weight that a layer executes with on its device."""

from __future__ import annotations

import torch

from teachllm.layers.weights.base import Weight
from teachllm.layers.weights.cpu_scaled_weight import CPUScaledWeight
from teachllm.layers.weights.dense_weight import DenseWeight
from teachllm.layers.weights.gpu_grouped_weight import GPUGroupedWeight
from teachllm.layers.weights.gpu_scaled_weight import GPUScaledWeight
from teachllm.layers.weights.quantized_weights import BLOCK, Activations, GroupedWeight, Quantized, fits_kernels


def weight_of(
    quantized: Quantized | torch.Tensor, dtype: torch.dtype, is_gated: bool = False, has_bias: bool = False
) -> Weight:
    """Build a layer's execution weight from a loaded one.

    Args:
        quantized: the loaded weight; a tensor is an unquantized weight.
        dtype: the dtype of the model.
        is_gated: the upper half of the weight is gate and the lower half is up, so silu(gate) is multiplied by up.
        has_bias: the layer adds a bias.
    """
    if isinstance(quantized, torch.Tensor):
        return DenseWeight(quantized, has_bias)
    quantized = as_groups(quantized)
    if isinstance(quantized, GroupedWeight):
        if not _fits(quantized):
            return DenseWeight(quantized.dequantize(dtype), has_bias)
        return GPUGroupedWeight(quantized, dtype, is_gated, has_bias)
    if quantized.qweight.device.type == "cpu":
        is_weight_only = quantized.activations is Activations.UNQUANTIZED
        if is_weight_only:
            return DenseWeight(quantized.dequantize(dtype), has_bias)
        return CPUScaledWeight(quantized, dtype)
    if quantized.block not in (None, (BLOCK, BLOCK)):  # no kernel multiplies such blocks
        return DenseWeight(quantized.dequantize(dtype), has_bias)
    return GPUScaledWeight(quantized, dtype)


def as_groups(quantized: Quantized) -> Quantized:
    """Return weight-only int8 as one group per row; return any other weight as it is."""
    if isinstance(quantized, GroupedWeight) or quantized.block is not None or quantized.qweight.dtype is not torch.int8:
        return quantized
    if quantized.activations is not Activations.UNQUANTIZED:
        return quantized
    qweight = (quantized.qweight.to(torch.int16) + 128).to(torch.uint8)
    return GroupedWeight(qweight, quantized.scales.expand(len(qweight), 1).contiguous(), None, 8)


def _fits(quantized: GroupedWeight) -> bool:
    """Return whether a kernel multiplies this weight. No CPU kernel does: there it saves disk space, not memory."""
    num_groups, num_in = quantized.scales.shape[1], quantized.qweight.shape[1]
    are_equal = num_groups * quantized.group_size == num_in
    if not (not quantized.qweight.is_cpu and are_equal and fits_kernels(num_groups, quantized.group_size)):
        return False
    if quantized.zeros is None or quantized.zeros.is_meta:
        return True
    return int(quantized.zeros.max()) < 256  # kernels keep a zero in a byte
