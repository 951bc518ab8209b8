"""From codes to what a layer multiplies with, on the device that they are on."""

from __future__ import annotations

import torch

from teachllm.layers.dense_weight import DenseWeight
from teachllm.layers.weight import Weight
from teachllm.quantization.gpu_grouped_weight import GPUGroupedWeight
from teachllm.quantization.gpu_scaled_weight import GPUScaledWeight
from teachllm.quantization.quantized_weights import BLOCK, Activations, GroupedCodes, Quantized, fits_kernels
from teachllm.quantization.scaled_weight import CPUScaledWeight


def weight_of(numbers: Quantized | torch.Tensor, dtype: torch.dtype, is_gated: bool = False) -> Weight:
    """A layer's weight.

    Args:
        numbers: codes, or plain numbers.
        dtype: the model's.
        is_gated: its upper half is gate, its lower one up, and they are multiplied with each other.
    """
    if isinstance(numbers, torch.Tensor):
        return DenseWeight(numbers)
    numbers = as_groups(numbers)
    if isinstance(numbers, GroupedCodes):
        return GPUGroupedWeight(numbers, is_gated) if _fits(numbers) else DenseWeight(numbers.dequantize(dtype))
    if numbers.codes.device.type == "cpu":
        is_plain = numbers.activations is Activations.PLAIN
        return DenseWeight(numbers.dequantize(dtype)) if is_plain else CPUScaledWeight(numbers, dtype)
    if numbers.block not in (None, (BLOCK, BLOCK)):  # nobody multiplies such blocks as they are
        return DenseWeight(numbers.dequantize(dtype))
    return GPUScaledWeight(numbers, dtype)


def as_groups(numbers: Quantized) -> Quantized:
    """Integers that are multiplied with plain numbers are codes of one group a row; others are as they are."""
    if isinstance(numbers, GroupedCodes) or numbers.block is not None or numbers.codes.dtype is not torch.int8:
        return numbers
    if numbers.activations is not Activations.PLAIN:
        return numbers
    codes = (numbers.codes.to(torch.int16) + 128).to(torch.uint8)
    return GroupedCodes(codes, numbers.scales.expand(len(codes), 1).contiguous(), None, 8)


def _fits(numbers: GroupedCodes) -> bool:
    """Whether kernels multiply such codes. oneDNN multiplies numbers: on a CPU codes save the disk, not the memory."""
    num_groups, num_in = numbers.scales.shape[1], numbers.codes.shape[1]
    are_equal = num_groups * numbers.group_size == num_in
    if not (numbers.codes.is_cuda and are_equal and fits_kernels(num_groups, numbers.group_size)):
        return False
    return numbers.zeros is None or int(numbers.zeros.max()) < 256  # kernels keep a zero in a byte
