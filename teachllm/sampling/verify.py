"""Verifying drafts: which of them hold, and which token comes where they end. Lossless, whatever the drafter says.

The model has computed logits after every draft as well, so every position can sample its own token. A draft holds if
it is the token that the position before it samples, and the first position of whose drafts none is gives the step's
last token (`DraftTree.walk`): a rejection costs nothing but the drafts behind it.

    greedy                     the position samples its most likely token
    a drafter that is certain  the position samples from p with its own noise, as without drafts: the same tokens
    a drafter that drew d ~ q  d with probability min(1, p(d) / q(d)), else a token drawn from max(p - q, 0):
                               distributed as p, and d holds as often as it can. The token is never d when d was
                               rejected, so here, too, a draft holds if it is the token. Where several were drawn,
                               the next is tried against what the one before has left

Sources: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True, frozen=True)
class Proposals:
    """Describe what was proposed for the tokens of some positions, by a drafter that drew at random.

    Attributes:
        siblings: [R, M] int64, for each logits row the ids that were drawn for its token, in order; -1 is padding.
        draft_logits: [Q, vocab_size], what they were drawn from.
        draft_rows: [R] int64, which row of it; -1 where nothing was proposed, or by a drafter that is certain.
    """

    siblings: torch.Tensor
    draft_logits: torch.Tensor
    draft_rows: torch.Tensor


def synthetic_tokens(sampled: torch.Tensor, drafts: torch.Tensor, coins: torch.Tensor, rate: float) -> torch.Tensor:
    """For benchmarks: tokens by which each draft holds at random, and which mean nothing.

    Args:
        sampled: [R] int64, what the positions would give.
        drafts: [R] int64, -1 where there is none.
        coins: [R] float32, uniform in (0, 1).
        rate: the share of drafts that hold.
    """
    other = torch.where(sampled == drafts, (sampled == 0).to(sampled.dtype), sampled)
    return torch.where(drafts < 0, sampled, torch.where(coins < rate, drafts, other))
