"""Token embedding and output head: the two ends of the model, often one and the same matrix.

Going in, a token id picks a row. Going out, the dot product of a hidden state with every row is that token's logit.
Small models tie the two, since for them the vocabulary is most of the parameters.

In a group each rank has some tokens' rows: a token's row comes from the one that has it, the others add zeros; of the
logits each computes some columns. All have room for as many, and where the vocabulary cannot be shared equally the last
ranks have rows of no token, which cannot be sampled.

Source: Press and Wolf, "Using the Output Embedding to Improve Language Models", 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from teachllm.distributed.group import ALONE, Group
from teachllm.distributed.shards import ALL, Shard
from teachllm.layers.bound_module import BoundModule, matrix_operands
from teachllm.layers.checkpoint_tensors import TensorDestination, joined
from teachllm_kernels.linear.batch_invariant_gemm import batch_invariant_gemm_triton
from teachllm_kernels.linear.dense_gemm import linear_reference, pack_weight, packed_linear, pays_to_pack
from teachllm_kernels.linear.gemv import gemv_triton
from teachllm_kernels.selection import at, bound


class Embedding(BoundModule):
    """One row of weights for every token of the vocabulary.

    Args:
        vocab_size: of all tokens.
        rows: which part of them is here.
        group: whose ranks have the others.

    Attributes:
        own: the tokens that are here.
        num_rows: room for so many.
    """

    def __init__(self, vocab_size: int, hidden_size: int, rows: Shard = ALL, group: Group = ALONE) -> None:
        super().__init__()
        self._vocab_size, self._group, self._is_whole = vocab_size, group, rows.count == 1
        self.own, self.num_rows = rows.of_any(vocab_size), rows.width(vocab_size)
        self._num_own = self.own.stop - self.own.start
        self.weight = nn.Parameter(torch.empty(self.num_rows, hidden_size))
        self.weight.data[self._num_own :] = 0.0
        self.packed: torch.Tensor | None = None
        self.bind()

    def bind(self) -> None:
        """Look up the kernels that compute logits."""
        if self.packed is None:
            self.operands = matrix_operands(self.weight)
        self.operands = self.operands._replace(is_prepacked=self.packed is not None, is_fixed=self.is_fixed)
        self._logits = bound("logits", self.operands, _LOGITS)
        self._scored = bound("float32_logits", self.operands, _LOGITS)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Look up the rows of token ids: [num_tokens] int64 -> [num_tokens, hidden_size]."""
        if self._group.size == 1:
            return F.embedding(token_ids, self.weight)
        is_own = (token_ids >= self.own.start) & (token_ids < self.own.stop)
        found = F.embedding(torch.where(is_own, token_ids - self.own.start, 0), self.weight)
        return self._group.all_reduce(found.masked_fill_(~is_own[:, None], 0.0))

    @property
    def own_weight(self) -> torch.Tensor:
        """Return the rows that belong to a token, [own tokens, hidden_size]."""
        return self.weight.data[: self._num_own]

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, TensorDestination]]:
        """Yield the weight, of which this rank has the rows of its own tokens."""
        shape = (self._vocab_size, self.weight.shape[1])
        ranges = None if self._is_whole else (self.own, slice(0, shape[1]))
        yield joined(path, "weight"), TensorDestination(self.own_weight, shape, ranges)

    def gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of all ranks side by side: [R, num_rows] of this rank -> [R, vocab_size]."""
        if self._group.size == 1:
            return logits
        return self._group.all_gather(logits).transpose(0, 1).flatten(1)[:, : self._vocab_size]

    def logits(self, hidden: torch.Tensor, *, in_float32: bool = True) -> torch.Tensor:
        """Return the logits of this rank's tokens.

        Args:
            hidden: [R, hidden_size].
            in_float32: return float32 (float64 stays float64), and -inf in columns that no token has. False, on a GPU:
                return the model's dtype, and 0.0 in these columns, which the sampling kernel never reads.

        Returns:
            [R, num_rows].
        """
        return self._float32_logits(hidden) if in_float32 else self._raw_logits(hidden)

    def _float32_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = at(self._scored, hidden.shape[0])(self, hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self._num_own < self.num_rows:
            logits[:, self._num_own :] = -torch.inf
        return logits

    def _raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return at(self._logits, hidden.shape[0])(self, hidden)

    def pack(self, is_tied: bool) -> None:
        """Lay the filled weight out for logits on a CPU, if that pays; `weight` stays only for look-ups."""
        if pays_to_pack(self.weight):
            self.packed = pack_weight(self.weight.data)
            if not is_tied:
                del self.weight
        self.bind()


def _packed(head: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    assert head.packed is not None
    return packed_linear(hidden, head.packed)


# By the names of `selection.CASES`.
_LOGITS: Mapping[str, Callable[[Embedding, torch.Tensor], torch.Tensor]] = {
    "batch_invariant_gemm": lambda head, hidden: batch_invariant_gemm_triton(hidden, head.weight),
    "gemv": lambda head, hidden: gemv_triton(hidden, head.weight),
    "library": lambda head, hidden: linear_reference(hidden, head.weight),
    "onednn": _packed,
}
