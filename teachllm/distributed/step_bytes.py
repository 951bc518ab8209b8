"""Compute what a step must exchange, by the shape of the model: the other side of what `Traffic` counts.

    tensor     every layer has two sums of all tokens' hidden states, behind attention and behind the MLP; the embedding
               has one. Sampling takes each rank's best logit and its token, whether with noise or without; rows with
               filters besides the best and the k best logits of each, a number or two and 4 kB at most
    pipeline   hidden states of all tokens go from stage to stage
    experts    spread over replicas: counts, then a token's row, ids and weights once to each rank that has any of its
               experts, and as many rows back. Ranks with the same tokens dispatch a part each, and gather what came of
               all. How many rows that are is the router's to say

So tensor parallelism exchanges 2 (n - 1) / n * (2 layers + 1) times as much as one boundary between stages does, and
has to wait for it 2 layers + 1 times.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

from teachllm.distributed.group import Counts
from teachllm.distributed.layout import RankCoords

Rows = tuple[int, int]  # that a rank sends to others for their experts, and gets from others for its own
_BYTES_OF_BEST = 16  # a logit and a token id, float64
_BYTES_OF_LOGIT = 4
_BYTES_OF_COUNT = 8
_BYTES_OF_ROUTE = 8  # an expert's id and weight, float32


def step_bytes(
    coords: RankCoords,
    num_layers: int,
    hidden_size: int,
    dtype_bytes: int,
    num_tokens: int,
    num_sampled: int,
    num_filtered: int = 0,
    num_told: int = 0,
    top_k: int = 0,
    rows: Sequence[Rows] = (),
) -> Counts:
    """Return what a rank sends in a step on a CPU, without a trace, whose requests ask for nothing but tokens, however
    they are sampled.

    Not counted are the rows whose filters leave more than `shared_filters.MOST_CANDIDATES`: they are gathered whole.

    Args:
        num_layers: of its stage.
        dtype_bytes: of a hidden state's number.
        num_tokens: of its replica; 0: it has nothing to compute, but others that share its experts have.
        num_sampled: rows that are sampled from.
        num_filtered: how many of them are random and have a filter.
        num_told: how many of a row's logits each rank tells then, as `shared_filters.num_told`.
        top_k: experts of a token.
        rows: for each of its layers whose experts are spread over replicas.
    """
    counts: Counts = {}
    size, row = coords.layout.tensor, hidden_size * dtype_bytes
    hidden = num_tokens * row
    if rows:
        sent, got = map(sum, zip(*rows, strict=True))
        ahead = len(rows) * (coords.layout.num_expert_ranks - 1) * _BYTES_OF_COUNT
        counts["all_to_all"] = 4 * len(rows), ahead + sent * (row + top_k * _BYTES_OF_ROUTE) + got * row
    if not num_tokens:
        return counts
    if size > 1:
        num_sums = 2 * num_layers + coords.is_first_stage - len(rows)
        counts["all_reduce"] = num_sums, num_sums * (2 * (size - 1) * hidden // size)
        is_sampling = coords.is_last_stage and num_sampled > 0
        if rows or is_sampling:
            told = len(rows) * -(-num_tokens // size) * row  # what came of its part of the tokens
            if is_sampling:
                row_bytes = (1 + num_told + 1) * _BYTES_OF_LOGIT  # the best; the best ones, and a sum
                told += num_sampled * _BYTES_OF_BEST + num_filtered * row_bytes
            calls = len(rows) + is_sampling * (1 + 2 * (num_filtered > 0))
            counts["all_gather"] = calls, (size - 1) * told
    if not coords.is_last_stage:
        counts["send"] = 1, hidden
    if not coords.is_first_stage:
        counts["recv"] = 1, 0
    return counts


def expected_rows(num_tokens: int, num_experts: int, top_k: int, num_ranks: int) -> float:
    """Return the rows that go to other ranks if any `top_k` experts are equally likely; ranks have equally many.

    A rank is spared a token's row if none of the token's experts is there.
    """
    elsewhere = num_experts - num_experts // num_ranks
    return num_tokens * (num_ranks - 1) * (1 - comb(elsewhere, top_k) / comb(num_experts, top_k))
