"""What a step must exchange, by the shape of the model: the other side of what `Traffic` counts.

    tensor     every layer has two sums of all tokens' hidden states, behind attention and behind the MLP; the embedding
               has one. Sampling takes each rank's best logit and its token, whether with noise or without; rows with
               filters besides the best and the k best logits of each, a number or two and 4 kB at most
    pipeline   hidden states of all tokens go from stage to stage

So tensor parallelism exchanges 2 (n - 1) / n * (2 layers + 1) times as much as one boundary between stages does, and
has to wait for it 2 layers + 1 times.
"""

from __future__ import annotations

from teachllm.distributed.layout import Place

Counts = dict[str, tuple[int, int]]  # (calls, bytes sent) by operation
_BYTES_OF_BEST = 16  # a logit and a token id, float64
_BYTES_OF_LOGIT = 4


def step_bytes(
    place: Place,
    num_layers: int,
    hidden_size: int,
    dtype_bytes: int,
    num_tokens: int,
    num_sampled: int,
    num_filtered: int = 0,
    num_told: int = 0,
) -> Counts:
    """What one rank sends in a step on a CPU whose requests ask for nothing but tokens, however they are sampled.

    Not counted are the rows whose filters leave more than `shared_filters.MOST_CANDIDATES`: they are gathered whole.

    Args:
        num_layers: of its stage.
        dtype_bytes: of a hidden state's number.
        num_sampled: rows that are sampled from.
        num_filtered: those of them that are random and have a filter.
        num_told: how many of a row's logits each rank tells then, as `shared_filters.num_told`.
    """
    counts: Counts = {}
    size, hidden = place.layout.tensor, num_tokens * hidden_size * dtype_bytes
    if size > 1:
        num_sums = 2 * num_layers + place.is_first_stage
        counts["all_reduce"] = num_sums, num_sums * (2 * (size - 1) * hidden // size)
        if place.is_last_stage and num_sampled:
            row_bytes = (1 + num_told + 1) * _BYTES_OF_LOGIT  # the best; the best ones, and a sum
            sampling = num_sampled * _BYTES_OF_BEST + num_filtered * row_bytes
            counts["all_gather"] = 1 + 2 * (num_filtered > 0), (size - 1) * sampling
    if not place.is_last_stage:
        counts["send"] = 1, hidden
    if not place.is_first_stage:
        counts["recv"] = 1, 0
    return counts
