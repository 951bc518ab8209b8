"""Exchange rows between replicas on meta tensors, where no router says which rows go to which rank.

`layers/expert_parallel.py` reads from the device how many rows it sends and receives, which meta tensors cannot answer.
Inside of `BalancedRouting` they answer for a balanced batch: each token goes to as many ranks as can have one of its
experts, and from each rank come as many rows as go there. So the exchange that a GPU runs is counted, not a formula. If
other replicas send more rows than this rank does, a step needs more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class BalancedRouting(TorchFunctionMode):
    """Answer what depends on a router's values, inside of the block.

    Args:
        top_k: experts per token.
    """

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self._top_k = top_k
        self._num_rows = 0

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Call the function, or answer in its place if its result depends on values of a meta tensor."""
        if function is torch.Tensor.nonzero and args[0].is_meta:
            (goes,) = args  # [num_ranks, num_tokens], which tokens go to each rank
            num_ranks, num_tokens = goes.shape
            self._num_rows = num_tokens * min(self._top_k, num_ranks)
            return goes.new_empty((self._num_rows, 2), dtype=torch.int64)
        if function is torch.Tensor.tolist and args[0].is_meta:
            (counts,) = args  # [num_ranks], rows for or from each rank
            num_each, num_left = divmod(self._num_rows, len(counts))
            return [num_each + (rank < num_left) for rank in range(len(counts))]
        return function(*args, **(kwargs or {}))
