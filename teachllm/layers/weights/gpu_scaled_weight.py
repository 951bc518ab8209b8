"""An 8-bit weight on a GPU (see `cpu_scaled_weight.py`) picks the fastest kernel for the number of rows of x.

    up to 256 rows    Hopper's own kernel
    one row           on other GPUs a matrix-vector product that quantizes the row itself, fused with norm and residual
    more rows         Hopper's own kernel, which gates gate and up before writing them; on other GPUs the library
    the rest          the portable kernel: few rows and blocks of 128 x 128 on other GPUs, sizes that the others lack

All of them quantize x alike, so a request's tokens do not depend on the requests that it is batched with. GPUs before
compute capability 8.9 lack e4m3: on them only the weight is quantized.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from teachllm.layers.norm import InputQuantization, RMSNorm
from teachllm.layers.weights.base import Weight
from teachllm.layers.weights.quantized_weights import BLOCK, Activations, ScaledWeight
from teachllm_kernels.dry_run import compute_capability
from teachllm_kernels.linear.hopper_linear import MAX_ROWS, has_hopper, hopper_scaled_linear
from teachllm_kernels.linear.scaled.hopper_scaled_mm import hopper_scaled_mm
from teachllm_kernels.linear.scaled.scaled_gemv import scaled_gemv_triton
from teachllm_kernels.linear.scaled.scaled_linear import scaled_linear_triton, weight_only_triton
from teachllm_kernels.linear.scaled.scaled_mm import fits_scaled_mm, scaled_mm
from teachllm_kernels.quantize_rows import QuantizedRows, quantize_rows

_HAS_E4M3 = (8, 9)  # compute capability


class GPUScaledWeight(Weight):
    """Multiply x by an 8-bit weight with GPU kernels."""

    def __init__(self, quantized: ScaledWeight, dtype: torch.dtype) -> None:
        num_out, num_in = quantized.qweight.shape
        super().__init__(num_out)
        assert quantized.block in (None, (BLOCK, BLOCK))
        self.qweight, self.scales, self.dtype = quantized.qweight, quantized.scales.contiguous(), dtype
        self.activations, self.input_scale = quantized.activations, quantized.input_scale
        has_e4m3 = compute_capability(self.qweight.device) >= _HAS_E4M3
        is_weight_only = self.activations is Activations.UNQUANTIZED
        self.lacks_fp8 = self.qweight.dtype is torch.float8_e4m3fn and not has_e4m3 and not is_weight_only
        if self.lacks_fp8:
            self.activations = Activations.UNQUANTIZED
        is_aligned = num_in % 16 == 0 and self.num_out % 16 == 0
        is_known = quantized.block is None or self.qweight.dtype is torch.float8_e4m3fn
        fits = is_known and is_aligned and dtype.itemsize == 2
        self._on_hopper = fits and self.activations is not Activations.UNQUANTIZED and has_hopper(self.qweight.device)
        self.fuses_one_row = num_in % 16 == 0 and not self._on_hopper
        if self.activations is not Activations.UNQUANTIZED:
            by_block = self.activations is Activations.BY_BLOCK
            self.input_quantization = InputQuantization(self.qweight.dtype, self.input_scale, by_block)

    def product(self, x: torch.Tensor | QuantizedRows, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + b: [num_tokens, in] -> [num_tokens, out]."""
        return self._product(x, bias, gated=False)

    def add_to_residual(
        self, residual: torch.Tensor, x: torch.Tensor | QuantizedRows, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Multiply, and add to the residual or leave that to the next norm; see `Linear.add_to_residual`."""
        if self._on_hopper:
            rows = self._rows(x)
            if rows.values.shape[0] <= MAX_ROWS:
                return hopper_scaled_linear(rows, self.qweight, self.scales, bias, parts=True), residual
            x = rows
        return self.product(x, bias), residual

    def gated(self, x: torch.Tensor | QuantizedRows, bias: torch.Tensor | None) -> torch.Tensor:
        """Return silu(gate) * up: [num_tokens, in] -> [num_tokens, out / 2]."""
        return self._product(x, bias, gated=True)

    def one_row(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """Multiply one row, fused with the norm before and the residual after; see `Linear.one_row`."""
        if self.input_quantization is None:
            return super().one_row(x, bias, norm, residual, gated)
        prologue = None if norm is None else (norm.weight, norm.eps)
        return scaled_gemv_triton(x, self.qweight, self.scales, bias, prologue, residual, gated, self.input_scale)

    def _product(self, x: torch.Tensor | QuantizedRows, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
        if self.activations is Activations.UNQUANTIZED:
            assert isinstance(x, torch.Tensor)
            return weight_only_triton(x, self.qweight, self.scales, bias, gated)
        rows = self._rows(x)
        product: Callable[..., torch.Tensor]
        is_few = rows.values.shape[0] <= MAX_ROWS
        if self._on_hopper:
            product = hopper_scaled_linear if is_few else hopper_scaled_mm
        elif not is_few and fits_scaled_mm(rows, self.qweight, self.scales):
            product = scaled_mm
        else:
            product = scaled_linear_triton
        return product(rows, self.qweight, self.scales, bias, gated=gated, dtype=self.dtype)

    def _rows(self, x: torch.Tensor | QuantizedRows) -> QuantizedRows:
        """Quantize x, unless the norm before has done so."""
        if isinstance(x, QuantizedRows):
            return x
        return quantize_rows(x, self.qweight.dtype, self.input_scale, self.activations is Activations.BY_BLOCK)
