"""Projections of 4-bit floats (e2m1): MXFP4 and NVFP4.

Sixteen values that lie denser near zero, and a scale for each short run of inputs, so that outliers spoil little:

    mxfp4   32 inputs share a power of two (e8m0)
    nvfp4   16 share a scale of 8 bits (e4m3), and the whole weight one more

Tensor cores from Blackwell on multiply them; elsewhere they are dequantized first.

Source: Rouhani et al., "Microscaling Data Formats for Deep Learning", 2023; NVIDIA, "Introducing NVFP4", 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from teachllm.layers.weights.quantized_weights import GroupedWeight
from teachllm.layers.weights.scheme import FLOATS, Stored
from teachllm.quantization.formats.gptq import LEAVE_OUT
from teachllm.quantization.formats.rounding import E4M3_MAX
from teachllm.quantization.formats.scaled import power_of_two
from teachllm_kernels.linear.packed.packed_weight import E2M1

_BYTES = (torch.uint8,)
_GROUPS = {"mxfp4": 32, "nvfp4": 16}


@dataclass(frozen=True)
class Fp4:
    """A projection.

    Attributes:
        kind: "mxfp4" or "nvfp4".
        weight_name, scale_name, global_name: of tensors.
        global_divides: the scale of the whole weight divides, in place of multiplying.
    """

    kind: str
    weight_name: str = "weight_packed"
    scale_name: str = "weight_scale"
    global_name: str = "weight_global_scale"
    global_divides: bool = True

    def __str__(self) -> str:
        return self.kind

    def stored(self, out_features: int, in_features: int) -> dict[str, Stored]:
        """Implement `Scheme.stored`."""
        size = _GROUPS[self.kind]
        if in_features % size:
            raise ValueError(f"{self.kind} has groups of {size}, which do not divide its inputs: {LEAVE_OUT}")
        tensors = {self.weight_name: Stored((out_features, in_features // 2), _BYTES)}
        shape = (out_features, in_features // size)
        if self.kind == "mxfp4":
            return tensors | {self.scale_name: Stored(shape, (torch.uint8, torch.float8_e8m0fnu))}
        tensors[self.scale_name] = Stored(shape, (torch.float8_e4m3fn,))
        tensors[self.global_name] = Stored((1,), FLOATS, others=((),))
        for name in ("input_global_scale", "input_scale"):  # of activations, which stay as they are here
            tensors[name] = Stored((1,), FLOATS, is_optional=True, others=((),))
        return tensors

    def read(self, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int) -> GroupedWeight:
        """Implement `Scheme.read`."""
        pairs = tensors[self.weight_name]
        qweight = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)
        scales = tensors[self.scale_name]
        if self.kind == "mxfp4":
            scales = power_of_two(scales)
        else:
            whole = tensors[self.global_name].float()
            scales = scales.float() / whole if self.global_divides else scales.float() * whole
        return GroupedWeight(qweight, scales.float(), None, 4, is_e2m1=True)

    def quantize(self, weight: torch.Tensor) -> GroupedWeight:
        """Implement `Scheme.quantize`."""
        size = _GROUPS[self.kind]
        groups = weight.float().unflatten(1, (-1, size))
        needed = groups.abs().amax(dim=2).clamp_min(torch.finfo(torch.float32).tiny) / E2M1[-1]
        if self.kind == "mxfp4":
            scales = torch.exp2(needed.log2().ceil())
        else:
            whole = needed.amax() / E4M3_MAX
            scales = (needed / whole).clamp_min(2.0**-9).to(torch.float8_e4m3fn).float() * whole
        steps = (groups / scales.unsqueeze(2)).flatten(1)
        table = torch.tensor(E2M1, device=weight.device)
        middles = (table[1:] + table[:-1]) / 2
        qweight = torch.bucketize(steps.abs(), middles) + 8 * (steps < 0)
        return GroupedWeight(qweight.to(torch.uint8), scales, None, 4, is_e2m1=True)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Implement `Scheme.num_bytes`."""
        return out_features * in_features // 2 + 4 * out_features * (in_features // _GROUPS[self.kind])
