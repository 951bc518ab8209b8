"""What a step must exchange, by the shape of the model: the other side of what `Traffic` counts.

    tensor     every layer has two sums of all tokens' hidden states, behind attention and behind the MLP; the embedding
               has one. Sampling takes each rank's best logit and its token
    pipeline   hidden states of all tokens go from stage to stage

So tensor parallelism exchanges 2 (n - 1) / n * (2 layers + 1) times as much as one boundary between stages does, and
has to wait for it 2 layers + 1 times.
"""

from __future__ import annotations

from teachllm.distributed.layout import Place

Counts = dict[str, tuple[int, int]]  # (calls, bytes sent) by operation
_BYTES_OF_BEST = 16  # a logit and a token id, float64


def step_bytes(
    place: Place, num_layers: int, hidden_size: int, dtype_bytes: int, num_tokens: int, num_sampled: int
) -> Counts:
    """What one rank sends in a step on a CPU whose requests are greedy, and ask for nothing but tokens.

    Args:
        num_layers: of its stage.
        dtype_bytes: of a hidden state's number.
        num_sampled: rows that are sampled from.
    """
    counts: Counts = {}
    size, hidden = place.layout.tensor, num_tokens * hidden_size * dtype_bytes
    if size > 1:
        num_sums = 2 * num_layers + place.is_first_stage
        counts["all_reduce"] = num_sums, num_sums * (2 * (size - 1) * hidden // size)
        if place.is_last_stage and num_sampled:
            counts["all_gather"] = 1, (size - 1) * num_sampled * _BYTES_OF_BEST
    if not place.is_last_stage:
        counts["send"] = 1, hidden
    if not place.is_first_stage:
        counts["recv"] = 1, 0
    return counts
