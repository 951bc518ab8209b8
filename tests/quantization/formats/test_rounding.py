"""Round to nearest loses what the width of a step says, and nothing besides."""

from __future__ import annotations

import pytest
import torch

from teachllm.quantization.formats import rounding
from teachllm_lessons.helpers.lesson_11 import QUANTIZE


@pytest.mark.parametrize("bits", [4, 8])
def test_small_weights_lose_no_larger_a_part_than_others(bits: int) -> None:
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))

    def error(size: float) -> float:
        quantized = rounding.grouped(size * weight, bits, 128, scale_dtype=torch.float16)
        return float((quantized.dequantize(torch.float32) - size * weight).norm() / (size * weight).norm())

    assert error(3e-4) < 1.5 * error(1.0)


def test_values_scales_and_zeros_keep_the_lessons_contract() -> None:
    assert QUANTIZE.contract(QUANTIZE.reference) > 10
