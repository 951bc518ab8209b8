"""Matrix products with a weight. On a CPU the weight is packed once, in the order in which products read it.

A decode multiplies one row, or a few, by every weight of the model, so its time is the time to read them. In the
usual [out, in] layout each output walks its own row of the weight, and a library's small products split the work
poorly over threads. oneDNN, which comes with PyTorch, can store a weight in tiles that fit its inner loop instead:
every thread then reads one straight run of memory and reuses each tile for all rows of x.

Source: the roofline argument of Williams et al., "Roofline", 2009: one row is two FLOPs for each four bytes read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

SMALLEST = 1 << 16  # elements per weight; oneDNN takes 50 us to start a product, and a smaller one is done by then


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T + b: [num_rows, in] and [out, in] -> [num_rows, out]."""
    return F.linear(x, weight, bias)


def pays_to_pack(weight: torch.Tensor) -> bool:
    """Return whether a weight, [out, in], is large enough for `pack_weight` and this machine supports that."""
    dtype = weight.dtype
    if weight.numel() < SMALLEST or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight, [out, in], in oneDNN's layout, which only `packed_linear` can read."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `linear_reference` with the weight from `pack_weight`; equal up to rounding."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def cost(num_rows: int, num_in: int, num_out: int, dtype_bytes: int = 2, gated: bool = False) -> tuple[int, int]:
    """Return (bytes, FLOPs) that any implementation must spend: x in, the result out, the weight once.

    `gated`: the weight has [2 * num_out, num_in] elements, gate above up.
    """
    num_weights = num_in * num_out * (2 if gated else 1)
    return (num_weights + num_rows * (num_in + num_out)) * dtype_bytes, 2 * num_rows * num_weights
