"""Random quantized weights and rows with scales of every kind, and checks of Hopper's products."""

from __future__ import annotations

import torch

from teachllm_kernels.dry_run import compute_capability
from teachllm_kernels.linear.hopper_linear import hopper_scaled_linear
from teachllm_kernels.linear.scaled.hopper_scaled_mm import hopper_scaled_mm
from teachllm_kernels.linear.scaled.scaled_mm import library_multiplies
from teachllm_kernels.linear.scaled.scaled_reference import scale_kind, scaled_linear_reference
from teachllm_kernels.quantize_rows import GROUP, QuantizedRows, quantize_rows_reference
from tests.kernels.cases import DEVICE, ON_GPU

QUANTIZED_DTYPES = [torch.float8_e4m3fn, torch.int8]
KINDS = ["tensor", "output", "block"]
ROUNDED = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
IN_TENSOR_CORES = 3e-3  # sums of e4m3 there, in about 14 bits
OF_HOPPER = [
    (quantized_dtype, kind)
    for quantized_dtype in QUANTIZED_DTYPES
    for kind in KINDS
    if (quantized_dtype, kind) != (torch.int8, "block")
]


def tolerance(quantized_dtype: torch.dtype, dtype: torch.dtype, gated: bool = False) -> float:
    """Return the relative error allowed: of a gated result, a product of two sums, twice what tensor cores lose."""
    in_tensor_cores = ON_GPU and quantized_dtype == torch.float8_e4m3fn
    return ROUNDED[dtype] + (IN_TENSOR_CORES * (2 if gated else 1) if in_tensor_cores else 0)


def weight_of(num_rows: int, num_in: int, quantized_dtype: torch.dtype, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return quantized values [num_rows, num_in] and their scales, which leave rows about as large as they were."""
    unquantized = torch.randn(num_rows, num_in, device=DEVICE)
    shape = {"tensor": (1, 1), "output": (num_rows, 1), "block": (-(-num_rows // GROUP), -(-num_in // GROUP))}[kind]
    quantized = quantize_rows_reference(unquantized, quantized_dtype)
    scales = torch.exp2(torch.rand(shape, device=DEVICE)) * quantized.scales.mean() * num_in**-0.5
    return quantized.values, scales


def rows_of(num_rows: int, num_in: int, quantized_dtype: torch.dtype, kind: str) -> QuantizedRows:
    """Return rows of different sizes, with scales as a weight of this kind wants them."""
    sizes = torch.exp2(torch.randint(-4, 3, (num_rows, 1), device=DEVICE))
    return quantize_rows_reference(
        torch.randn(num_rows, num_in, device=DEVICE) * sizes, quantized_dtype, grouped=kind == "block"
    )


def bias_of(num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_rows, device=DEVICE).to(dtype)


def outputs_of(kind: str, gated: bool, num_out: int) -> int:
    """Return the outputs that such a weight may have: blocks do not reach from gate to up."""
    return -(-num_out // GROUP) * GROUP if gated and kind == "block" else num_out


def assert_near(result: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Check each row, by the length of the error."""
    assert result.isfinite().all()
    error = (result.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    assert error.max() < tolerance, f"{float(error.max()):.1e}"


def check_few_rows_on_hopper(
    num_rows: int, shape: tuple[int, int], quantized_dtype: torch.dtype, kind: str, has_bias: bool, form: str
) -> None:
    """Compare `hopper_scaled_linear` with the definition.

    Args:
        form: plain, gated, or parts.
    """
    gated, parts = form == "gated", form == "parts"
    num_in, num_out = shape[0], outputs_of(kind, gated, shape[1])
    weight, scales = weight_of(num_out * (2 if gated else 1), num_in, quantized_dtype, kind)
    x = rows_of(num_rows, num_in, quantized_dtype, kind)
    bias = bias_of(len(weight), torch.bfloat16) if has_bias else None
    y = hopper_scaled_linear(x, weight, scales, bias, gated, parts)
    y = y.sum(0) if parts else y
    dtype = torch.float32 if parts else torch.bfloat16
    assert y.dtype == dtype and y.shape == (num_rows, num_out)
    assert_near(y, scaled_linear_reference(x, weight, scales, bias, gated), tolerance(quantized_dtype, dtype, gated))


def check_many_rows_on_hopper(
    num_rows: int,
    shape: tuple[int, int],
    quantized_dtype: torch.dtype,
    kind: str,
    has_bias: bool,
    gated: bool,
    level: int = 0,
) -> None:
    """Compare `hopper_scaled_mm` with the definition."""
    num_in, num_out = shape[0], outputs_of(kind, gated, shape[1])
    weight, scales = weight_of(num_out * (2 if gated else 1), num_in, quantized_dtype, kind)
    x = rows_of(num_rows, num_in, quantized_dtype, kind)
    bias = bias_of(len(weight), torch.bfloat16) if has_bias else None
    y = hopper_scaled_mm(x, weight, scales, bias, gated, level=level)
    assert_near(
        y, scaled_linear_reference(x, weight, scales, bias, gated), tolerance(quantized_dtype, torch.bfloat16, gated)
    )
    assert torch.equal(y, hopper_scaled_mm(x, weight, scales, bias, gated, level=level))


def library_takes(x: QuantizedRows, weight: torch.Tensor, scales: torch.Tensor) -> bool:
    """Return whether the library has such a product on this card; for fewer rows than here it lacks some shapes."""
    (num_rows, num_in), is_e4m3 = x.values.shape, weight.dtype != torch.int8
    has_blocks = scale_kind(weight, scales) == "block"
    if weight.is_cpu:
        return not is_e4m3 and not has_blocks
    card = compute_capability(weight.device)
    return num_rows >= (256 if is_e4m3 else 17) and library_multiplies(
        card, num_in, weight.shape[0], is_e4m3, has_blocks
    )
