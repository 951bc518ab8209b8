"""Token embedding and output head: the two ends of the model, often one and the same matrix.

Going in, a token id picks a row. Going out, the dot product of a hidden state with every row is that token's logit.
Small models tie the two, since for them the vocabulary is most of the parameters.

In a group each rank has some tokens' rows: a token's row comes from the one that has it, the others add zeros; of the
logits each computes some columns.

Source: Press and Wolf, "Using the Output Embedding to Improve Language Models", 2017.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from teachllm.distributed.group import ALONE, Group
from teachllm.distributed.slices import ALL, Cut, Slice, cut
from teachllm_kernels.fixed_linear import fixed_linear_triton
from teachllm_kernels.gemv import gemv_triton
from teachllm_kernels.linear import can_pack, linear_reference, pack_weight, packed_linear


class Embedding(nn.Module):
    """One row of weights for every token of the vocabulary; `is_fixed` as in `Linear`.

    Args:
        vocab_size: rows, which are the part `rows` of the vocabulary.
        group: whose ranks have the others.
    """

    def __init__(self, vocab_size: int, hidden_size: int, rows: Slice = ALL, group: Group = ALONE) -> None:
        super().__init__()
        self._rows, self._group = rows, group
        self.vocab_size = vocab_size
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.packed: torch.Tensor | None = None
        self.is_fixed = False

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden_size]."""
        if self._group.size == 1:
            return F.embedding(token_ids, self.weight)
        own = token_ids - self.first_id
        is_own = (own >= 0) & (own < self.vocab_size)
        found = F.embedding(torch.where(is_own, own, 0), self.weight)
        return self._group.all_reduce(found.masked_fill_(~is_own[:, None], 0.0))

    @property
    def first_id(self) -> int:
        """The token of the first row."""
        return self._rows.index * self.vocab_size

    @property
    def destination(self) -> torch.Tensor | Cut:
        """Of the checkpoint's tensor."""
        return cut(self.weight.data, self._rows, ALL)

    def gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """[num_rows, vocab_size] of this rank's tokens -> those of all ranks' side by side."""
        if self._group.size == 1:
            return logits
        return self._group.all_gather(logits).transpose(0, 1).flatten(1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] float32 (float64 stays float64), of its own tokens."""
        if self.packed is not None:
            logits = packed_linear(hidden, self.packed)
        elif self.is_fixed:
            logits = fixed_linear_triton(hidden, self.weight)
        else:
            logits = linear_reference(hidden, self.weight)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def lm_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `logits`, on a GPU and in the model's dtype: what samples from them reads that as well."""
        if self.is_fixed:
            return fixed_linear_triton(hidden, self.weight)
        if hidden.shape[0] == 1:
            return gemv_triton(hidden, self.weight)
        return linear_reference(hidden, self.weight)

    def pack(self, is_tied: bool) -> None:
        """Lays the filled weight out for logits on a CPU, if that can be done; `weight` stays only for look-ups."""
        if can_pack(self.weight.dtype):
            self.packed = pack_weight(self.weight.data)
            if not is_tied:
                del self.weight
