"""Log-probabilities of sampled and prompt tokens, from the model's own logits.

They are taken before constraints, penalties and temperature: what the model believes, not what it was made to
say. A token's rank counts the tokens strictly more likely than it, so equals share a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from teachllm.core.scheduler_output import TokenLogprobs


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probability and rank of one token per row, and the most likely tokens beside it.

    Waits for the device: the result is host data.

    Args:
        logits: [L, vocab_size] float32, untouched.
        token_ids: [L] int64, the sampled or given token of each row.
        num_top: how many of the most likely tokens each row asks for; 0 is none.

    Returns:
        One entry per row.
    """
    # CUDA sums from where memory is aligned: with rows of an odd width the order would depend on a row's number.
    missing = -logits.shape[1] % 4
    even = F.pad(logits, (0, missing), value=-torch.inf) if missing else logits
    logprobs = even.log_softmax(dim=-1)[:, : logits.shape[1]]
    chosen = logprobs.gather(1, token_ids[:, None])  # [L, 1]
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    top = logprobs.topk(min(max(num_top, default=0), logits.shape[1]), dim=-1)
    entries = zip(
        token_ids.tolist(),
        chosen[:, 0].tolist(),
        ranks.tolist(),
        top.indices.tolist(),
        top.values.tolist(),
        num_top,
        strict=True,
    )
    return [TokenLogprobs(id_, value, rank, ids[:n], values[:n]) for id_, value, rank, ids, values, n in entries]
