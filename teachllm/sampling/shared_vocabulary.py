"""The columns of the logits that a rank has, where each has those of some tokens.

The most likely token does not take all logits: each rank's best and how good it is are 16 bytes per row, where the
logits of 150,000 tokens are 600 kB. A random token is the most likely one with noise, and noise is a function of the
request and the token: each rank draws that of its own. Penalties, biases and bans are of one token each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from teachllm.distributed.group import ALONE, Group
from teachllm_kernels.sampling.random_sample import token_of_best


@dataclass(frozen=True, slots=True)
class Columns:
    """This rank's part of the vocabulary.

    Attributes:
        vocab_size: of all ranks together.
        group: the ranks that have the rest.
    """

    vocab_size: int
    group: Group = ALONE

    @property
    def are_all(self) -> bool:
        """Return whether no other rank has any."""
        return self.group.size == 1

    @property
    def width(self) -> int:
        """Return how many: as many as any other rank has. Those of no token, behind the last one's, are -inf, or
        on a GPU 0.0, where `num_own` is what is drawn from."""
        return -(-self.vocab_size // self.group.size)

    @property
    def first_id(self) -> int:
        """The token of the first."""
        return self.group.rank * self.width

    @property
    def num_own(self) -> int:
        """Return how many columns belong to a token."""
        return max(min(self.width, self.vocab_size - self.first_id), 0)

    @property
    def each_has_some(self) -> bool:
        """Return whether no rank is without any token."""
        return (self.group.size - 1) * self.width < self.vocab_size

    def has(self, token_id: int) -> bool:
        """Return whether a token's column is one of these."""
        return self.first_id <= token_id < self.first_id + self.width

    def argmax(self, scores: torch.Tensor) -> torch.Tensor:
        """[R, width] float32 or less -> [R] int64 token ids, the same on every rank; of equal scores the first."""
        if self.are_all or len(scores) == 0:
            return scores.argmax(dim=-1)
        best, index = scores.max(dim=-1)
        pairs = torch.stack([best.double(), (index + self.first_id).double()])  # [2, R]; both are exact
        values, ids = self.group.all_gather(pairs).unbind(1)  # [size, R]
        return ids.gather(0, values.argmax(dim=0, keepdim=True))[0].long()

    def best(self, of_own: torch.Tensor) -> torch.Tensor:
        """[R] int64, what `sample_triton` found among the tokens of each rank -> [R] int64, the token of all."""
        return token_of_best(self.group.all_gather(of_own))

    def gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """[R, width] -> [R, vocab_size], of all ranks."""
        if self.are_all:
            return logits
        return self.group.all_gather(logits).transpose(0, 1).flatten(1)[:, : self.vocab_size]

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """[R, vocab_size] -> [R, width]."""
        own = whole[:, self.first_id : self.first_id + self.width]
        return F.pad(own, (0, self.width - own.shape[1]), value=-torch.inf)
