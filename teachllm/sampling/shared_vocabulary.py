"""The most likely token, where each rank has the logits of some tokens.

Nobody needs all logits for that: each rank's best and how good it is are 16 bytes a row, where the logits of 150,000
tokens are 300 kB.
"""

from __future__ import annotations

import torch

from teachllm.distributed.group import Group


def argmax_of_all(logits: torch.Tensor, first_id: int, group: Group) -> torch.Tensor:
    """[R] int64 token ids, the same on every rank; of equal logits the first token's.

    Args:
        logits: [R, own vocabulary], float32 or less, of the tokens from `first_id` on.
    """
    best, index = logits.max(dim=-1)
    pairs = torch.stack([best.double(), (index + first_id).double()])  # [2, R]; both are exact
    values, ids = group.all_gather(pairs).unbind(1)  # [size, R]
    return ids.gather(0, values.argmax(dim=0, keepdim=True))[0].long()
