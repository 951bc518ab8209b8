"""The table of sampling parameters on the device: one row per open request, and which column is which.

A request's numbers are written once, when its row opens, and kernels look them up by row. Kernels read the columns that
are named here; they come first, and columns that only torch reads may follow. The host places values by
these names, so a column's number is written down nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from teachllm_kernels._triton import tl

FLOAT_COLUMNS = ("temperature", "top_p", "min_p")
INT_COLUMNS = ("top_k", "seed", "child_index", "is_filtered")

TEMPERATURE = tl.constexpr(FLOAT_COLUMNS.index("temperature"))  # 0 is greedy: of equal logits the lowest id
TOP_P = tl.constexpr(FLOAT_COLUMNS.index("top_p"))  # 1 cuts nothing
MIN_P = tl.constexpr(FLOAT_COLUMNS.index("min_p"))  # 0 cuts nothing
TOP_K = tl.constexpr(INT_COLUMNS.index("top_k"))  # the vocabulary's size cuts nothing
SEED = tl.constexpr(INT_COLUMNS.index("seed"))
CHILD_INDEX = tl.constexpr(INT_COLUMNS.index("child_index"))
IS_FILTERED = tl.constexpr(INT_COLUMNS.index("is_filtered"))  # 1 where a filter may cut tokens of a random row


@dataclass(frozen=True, slots=True)
class ParameterTable:
    """Hold the parameters of all open requests.

    Attributes:
        floats: [max_rows, num_floats] float32, `FLOAT_COLUMNS` first.
        ints: [max_rows, num_ints] int64, `INT_COLUMNS` first.

    Raises:
        ValueError: columns are missing, or are not next to each other.
    """

    floats: torch.Tensor
    ints: torch.Tensor

    def __post_init__(self) -> None:
        for half, columns in ((self.floats, FLOAT_COLUMNS), (self.ints, INT_COLUMNS)):
            if half.shape[1] < len(columns) or half.stride(1) != 1:
                raise ValueError(f"a table of sampling parameters needs the columns {', '.join(columns)}, side by side")
