"""Log-probabilities of sampled and prompt tokens, from the model's own logits.

They are taken before constraints, penalties and temperature: what the model believes, not what it was made to
say. A token's rank is its place among all, the most likely first and of equals the lowest id.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from teachllm.core.scheduler_output import TokenLogprobs
from teachllm.sampling.transfers import to_host


class PendingLogprobs:
    """Log-probability and rank of one token per row, and the most likely tokens beside it, on their way to the host.

    Args:
        logits: [L, vocab_size] float32, untouched.
        token_ids: [L] int64, the sampled or given token of each row.
        num_top: how many of the most likely tokens each row asks for; 0 is none.
    """

    def __init__(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> None:
        chosen, ranks, top_ids, top_values = _rank(logits, token_ids, max(num_top, default=0))
        self._num_top = num_top
        self._columns = [to_host(column) for column in (token_ids, chosen, ranks, top_ids, top_values)]
        self._arrived: torch.cuda.Event | None = None
        if logits.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(logits.device))

    def result(self) -> list[TokenLogprobs]:
        """One entry per row; waits for them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        rows = zip(*(column.tolist() for column in self._columns), self._num_top, strict=True)
        return [TokenLogprobs(id_, value, rank, ids[:n], values[:n]) for id_, value, rank, ids, values, n in rows]


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """The result of `PendingLogprobs`; waits for the device."""
    return PendingLogprobs(logits, token_ids, num_top).result()


def _rank(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    """(log-probability [L], rank [L], ids and log-probabilities of the most likely tokens [L, num_top] each)."""
    # CUDA sums from where memory is aligned: with rows of an odd width the order would depend on a row's number.
    missing = -logits.shape[1] % 4
    even = F.pad(logits, (0, missing), value=-torch.inf) if missing else logits
    logprobs = even.log_softmax(dim=-1)[:, : logits.shape[1]]
    ids = torch.arange(logits.shape[1], device=logits.device)
    chosen = logprobs.gather(1, token_ids[:, None])  # [L, 1]
    is_before = (logprobs > chosen) | ((logprobs == chosen) & (ids < token_ids[:, None]))
    top_ids = _most_likely(logprobs, ids, min(num_top, logits.shape[1]))
    return chosen[:, 0], is_before.sum(dim=-1) + 1, top_ids, logprobs.gather(1, top_ids)


def _most_likely(logprobs: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    """[L, count] int64. Of equals `topk` takes which it likes, and others for another count: so none are equal."""
    if count == 0:
        return ids.new_empty((len(logprobs), 0))
    bits = (logprobs + 0.0).view(torch.int32)  # no -0, whose bits are another number's
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # as integers, in the order of the floats
    keys = (ordered.long() << 32) | (0x7FFFFFFF - ids)
    return 0x7FFFFFFF - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)
