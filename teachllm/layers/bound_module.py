"""Define a layer that looks its kernels up once, and again whenever its tensors are replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import nn

from teachllm_kernels.selection import Operands, card_of


class BoundModule(nn.Module):
    """Hold the kernels that `teachllm_kernels/selection.py` chooses for a layer's operands.

    `bind` looks them up. A subclass calls it at the end of its `__init__`; after that it is called wherever the tensors
    may have become others: when the layer is moved, loaded, laid out or set `is_fixed`. A call of the layer then only
    compares its number of rows with a short list (`selection.at`).

    Attributes:
        operands: what the choice depends on.
    """

    operands: Operands

    def __init__(self) -> None:
        super().__init__()
        self._is_fixed = False
        self.register_load_state_dict_post_hook(_bind_loaded)  # type: ignore[no-untyped-call]

    def bind(self) -> None:
        """Look up the kernels for `operands`. A layer whose tensors `to` moves sets these anew before."""
        raise NotImplementedError

    @property
    def is_fixed(self) -> bool:
        """Return whether a row of the result is the same, bit for bit, however many others there are; on a GPU only.

        Setting it binds anew. A quantized weight has no such kernels, so `batch_invariant` is refused with one.
        """
        return self._is_fixed

    @is_fixed.setter
    def is_fixed(self, is_fixed: bool) -> None:
        self._is_fixed = is_fixed
        self.bind()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move, as `nn.Module.to` does, and bind anew."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.bind()
        return self


def matrix_operands(matrix: torch.Tensor, has_bias: bool = False) -> Operands:
    """Return the operands of an unquantized matrix, [out, in]."""
    num_out, num_in = matrix.shape
    return Operands(
        form="dense",
        card=card_of(matrix.device),
        dtype=matrix.dtype,
        num_in=num_in,
        num_out=num_out,
        has_bias=has_bias,
    )


def _bind_loaded(layer: BoundModule, incompatible_keys: object) -> None:
    """Bind after `load_state_dict`, as its hook: `assign=True` may have put tensors of another device in place."""
    layer.bind()
