"""The judge of greedy tokens of a quantized model: transformers in float64, with quantized projections.

Written apart from the engine: a projection's weight is dequantized, and of a W8A8 one x is divided by its scale,
rounded, and multiplied back. Where x lies between two quantized values, float32 and float64 may take different ones,
and in models as small as these one step is seen in the logits: so the gap that is permitted is wider than that of an
unquantized model. One wrong token in a prompt changes the log-probabilities after it by 0.2 to 1. What runs beside a
request may change less: that `tests/engine/quantized_reference.py` judges.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from teachllm.quantization.quantized_weights import BLOCK, Activations
from tests.engine.reference import Reference, reference
from tests.quantization.formats import FORMATS, write_checkpoint


def rounded(x: torch.Tensor, dtype: torch.dtype, static: torch.Tensor | None, width: int | None = None) -> torch.Tensor:
    """Quantize x and dequantize it: by token, or each `width` numbers of one, if there is no static scale."""
    groups = x.float().split(width or x.shape[-1], dim=-1)
    return torch.cat([_rounded_alike(group, dtype, static) for group in groups], dim=-1)


def _rounded_alike(x: torch.Tensor, dtype: torch.dtype, static: torch.Tensor | None) -> torch.Tensor:
    amax = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-10)
    scale = static if static is not None else amax / (127.5 if dtype is torch.int8 else 448.0)
    if dtype is torch.int8:
        return (x / scale).round().clamp(-128, 127).double() * scale.double()
    return (x * (1 / scale)).clamp(-448, 448).to(dtype).double() * scale.double()


class TransformersReference(Reference):
    """The unquantized checkpoint `family`, in a format."""

    def __init__(self, family: str, name: str, folder: Path) -> None:
        super().__init__(reference(family).path)
        quantized = write_checkpoint(name, Path(self.path), folder)
        self.path = str(folder)
        quantizes = FORMATS[name].activations is not Activations.UNQUANTIZED
        if quantizes:
            self.max_gap, self.max_logprob_error = 0.1, 0.15
        for key, each in quantized.items():
            layer: Any = self.model.get_submodule(key)
            layer.weight.data = each.dequantize(torch.float64)
            if quantizes:
                how = (each.qweight.dtype, each.input_scale, None if each.block is None else BLOCK)
                layer.forward = lambda x, layer=layer, how=how: F.linear(rounded(x, *how), layer.weight, layer.bias)


@cache
def _folder() -> Path:
    import tempfile

    return Path(tempfile.mkdtemp(prefix="teachllm-quantized-"))


def folder_of(family: str, name: str) -> Path:
    """Where a checkpoint may be written, of this test run alone."""
    return _folder() / f"{family} {name}"


@cache
def transformers_reference(family: str, name: str) -> TransformersReference:
    """Made once a test run."""
    return TransformersReference(family, name, folder_of(family, name))
