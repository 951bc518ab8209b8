"""Log-probabilities of sampled and prompt tokens, from the model's own logits.

They are taken before constraints, penalties and temperature: what the model believes, not what it was made to
say. A token's rank is its place among all, the most likely first and of equals the lowest id.

Where ranks have some tokens each, they tell each other sums of exponentials, their most likely tokens, and how many
come before the one that counts. Its log-probability is then that of one process up to the rounding of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from teachllm.core.scheduler_output import TokenLogprobs
from teachllm.sampling.shared_vocabulary import Columns
from teachllm.sampling.transfers import to_host


class PendingLogprobs:
    """Log-probability and rank of one token per row, and the most likely tokens beside it, on their way to the host.

    Args:
        logits: [L, vocab_size] float32, untouched; [L, width] of `columns`.
        token_ids: [L] int64, the sampled or given token of each row.
        num_top: how many of the most likely tokens each row asks for; 0 is none.
        columns: of the logits; None: they are all.
    """

    def __init__(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int], columns: Columns | None = None
    ) -> None:
        most = max(num_top, default=0)
        if columns is None or columns.are_all:
            found = _rank(logits, token_ids, most)
        else:
            found = _rank_among_all(logits, token_ids, most, columns)
        chosen, ranks, top_ids, top_values = found
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


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int], columns: Columns | None = None
) -> list[TokenLogprobs]:
    """The result of `PendingLogprobs`; waits for the device."""
    return PendingLogprobs(logits, token_ids, num_top, columns).result()


def _rank(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    """(log-probability [L], rank [L], ids and log-probabilities of the most likely tokens [L, num_top] each)."""
    # CUDA sums from where memory is aligned: with rows of an odd width the order would depend on a row's number.
    missing = -logits.shape[1] % 4
    even = F.pad(logits, (0, missing), value=-torch.inf) if missing else logits
    logprobs = even.log_softmax(dim=-1)[:, : logits.shape[1]]
    ids = torch.arange(logits.shape[1], device=logits.device)
    chosen = logprobs.gather(1, token_ids[:, None])  # [L, 1]
    top_ids = _most_likely(logprobs, ids, min(num_top, logits.shape[1]))
    return chosen[:, 0], _num_before(logprobs, ids, chosen, token_ids) + 1, top_ids, logprobs.gather(1, top_ids)


def _rank_among_all(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, columns: Columns
) -> tuple[torch.Tensor, ...]:
    """Do the same as `_rank`, of [L, width] logits."""
    group, ids = columns.group, columns.first_id + torch.arange(columns.width)
    best = logits.amax(dim=-1).double()
    sums = (logits.double() - best[:, None]).exp().sum(dim=-1)
    bests, sums = group.all_gather(torch.stack([best, sums])).unbind(1)  # [size, L]
    best = bests.amax(dim=0)
    normalizer = best + (sums * (bests - best).exp()).sum(dim=0).log()
    logprobs = (logits.double() - normalizer[:, None]).float()

    at = token_ids - columns.first_id
    is_own = (at >= 0) & (at < columns.width)
    chosen = logprobs.gather(1, torch.where(is_own, at, 0)[:, None]).masked_fill(~is_own[:, None], 0.0)
    top_ids = _most_likely(logprobs, ids, min(num_top, columns.width))
    own = [chosen.double(), logprobs.gather(1, top_ids - columns.first_id).double(), top_ids.double()]  # all are exact
    told = group.all_gather(torch.cat(own, dim=1)).transpose(0, 1)  # [L, size, 1 + 2 num_top]
    chosen = told[..., :1].sum(dim=1).float()  # of one, zeros of the others
    values, found = told[..., 1:].chunk(2, dim=-1)
    values, found = values.flatten(1).float(), found.flatten(1).long()
    num_top = min(num_top, columns.vocab_size)
    top_ids, top_values = _most_likely(values, found, num_top), values.topk(num_top, dim=-1).values
    ranks = group.all_reduce(_num_before(logprobs, ids, chosen, token_ids)) + 1
    return chosen[:, 0], ranks, top_ids, top_values


def _num_before(
    logprobs: torch.Tensor, ids: torch.Tensor, chosen: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """[L] int64: of the tokens `ids`, how many come before each row's, whose log-probability is `chosen` [L, 1]."""
    return ((logprobs > chosen) | ((logprobs == chosen) & (ids < token_ids[:, None]))).sum(dim=-1)


def _most_likely(logprobs: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    """[L, count] int64. Of equals `topk` takes which it likes, and others for another count: so none are equal."""
    if count == 0:
        return ids.new_empty((len(logprobs), 0))
    bits = (logprobs + 0.0).view(torch.int32)  # no -0, whose bits are another number's
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # as integers, in the order of the floats
    keys = (ordered.long() << 32) | (0x7FFFFFFF - ids)
    return 0x7FFFFFFF - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)
