"""Whatever the quantized values are, they are read as they were packed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm.layers.weights.quantized_weight_loader import QuantizedWeightLoader
from teachllm.layers.weights.quantized_weights import GroupedWeight, ScaledWeight
from tests.quantization.format_checkpoints import E4M3, FORMATS, quantization
from tests.thorough import times

NAME = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=times(4, 30))
@given(
    num_out=st.integers(1, 34).map(lambda number: 8 * number),
    num_in=st.integers(1, 9).map(lambda number: 32 * number),
    seed=st.integers(0, 2**32),
    extreme=st.sampled_from([None, None, 0, -1]),
)
def test_any_quantized_values_are_read_as_they_were_packed(
    name: str, num_out: int, num_in: int, seed: int, extreme: int | None
) -> None:
    how, generator = FORMATS[name], torch.Generator().manual_seed(seed)
    quantized = drawn(how.quantize(torch.randn(num_out, num_in, generator=generator)), generator, extreme)
    tensors = how.write(quantized)
    scheme = quantization(how.config, frozenset(f"{NAME}.{each}" for each in tensors)).schemes(NAME)
    assert scheme is not None
    part = QuantizedWeightLoader(scheme, NAME, num_out, num_in, torch.empty(0))
    for tensor_name, tensor in tensors.items():
        part.slots[tensor_name].put(tensor)
    read: Any = part.quantized_weight()
    assert torch.equal(read.qweight.view(torch.uint8), quantized.qweight.view(torch.uint8))
    assert torch.equal(read.scales, quantized.scales)
    if isinstance(quantized, GroupedWeight):
        assert torch.equal(read.with_zeros(), quantized.with_zeros())
        assert read.group_size == quantized.group_size
    assert torch.equal(read.dequantize(torch.float32), quantized.dequantize(torch.float32))


def drawn(quantized: Any, generator: torch.Generator, extreme: int | None) -> Any:
    """Return any quantized values in place of these, and zeros if they have some.

    Args:
        extreme: one for all, 0 or the last.
    """

    def random_values(shape: torch.Size, count: int) -> torch.Tensor:
        return (
            torch.randint(count, shape, generator=generator) if extreme is None else torch.full(shape, extreme % count)
        )

    if isinstance(quantized, ScaledWeight):
        found = random_values(quantized.qweight.shape, 256).to(torch.uint8)
        if quantized.qweight.dtype is E4M3:
            found[found & 127 == 127] = 126  # NaN is none
        return replace(quantized, qweight=found.view(quantized.qweight.dtype))
    count = 1 << quantized.bits
    zeros = None if quantized.zeros is None else random_values(quantized.zeros.shape, count).to(torch.int32)
    return replace(quantized, qweight=random_values(quantized.qweight.shape, count).to(torch.uint8), zeros=zeros)
