"""Divide a model among ranks: layers by stage, and of each layer some heads and a part of the widths.

Stages are made by cost, which for decodes is what they read: weights, and of many requests about as much KV; counted in
parameters, whatever their bytes. The last one has the output head as well, so it has fewer layers. The vocabulary may
be any, its last part is filled up; what else cannot be shared equally is refused before a weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from itertools import accumulate

from teachllm.distributed.layout import Layout
from teachllm.errors import ModelError
from teachllm.models.family import DecoderConfig
from teachllm.models.spec import ModelSpec


def stage_layers(spec: ModelSpec, head: int, num_stages: int) -> list[range]:
    """Return the layers of each stage, such that the stage with the most to read has the least; then the stage with the
    next most, and so on. A layer's cost is twice what one token meets of it: a batch that gives all stages work reads
    about as much KV as weights. The last stage has the head, too.

    Args:
        spec: of the whole model.
        head: the parameters of its output head.

    Raises:
        ModelError: there are more stages than layers.
    """
    num_layers = len(spec.layers)
    if num_stages > num_layers:
        raise ModelError(
            f"pipeline_parallel_size={num_stages} is more than the model's {num_layers} layers: set "
            f"pipeline_parallel_size={num_layers} or less"
        )
    ends = [0, *accumulate(2 * layer.num_active_parameters for layer in spec.layers)]

    @cache
    def best(first: int, stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the costs, the largest first, and where each stage ends, of the layers from `first` on."""
        if stages == 1:
            return (ends[num_layers] - ends[first] + head,), (num_layers,)
        found = []
        for end in range(num_layers - stages + 1, first, -1):  # of equal ones, that with more in front
            costs, behind = best(end, stages - 1)
            found.append((tuple(sorted((ends[end] - ends[first], *costs), reverse=True)), (end, *behind)))
        return min(found, key=lambda each: each[0])

    stops = best(0, num_stages)[1]
    return [range(first, stop) for first, stop in zip((0, *stops), stops, strict=False)]


def check_shared(config: DecoderConfig, layout: Layout) -> None:
    """Check that the ranks of a layout can share a model.

    Raises:
        ModelError: a size cannot be shared equally, or there are fewer experts than ranks to spread them over.
    """
    experts = config.experts
    if experts is not None and experts.num_experts < layout.num_expert_ranks:
        raise ModelError(
            f"enable_expert_parallel=True spreads experts over {layout.num_expert_ranks} ranks, and the model has "
            f"{experts.num_experts}: lower {'data' if layout.replicas > 1 else 'tensor'}_parallel_size"
        )
    if layout.tensor > 1:
        _check_sizes(config, layout.tensor, layout.spreads_experts)


def _check_sizes(config: DecoderConfig, size: int, spreads: bool) -> None:
    shared = dict(config.shared_sizes)
    if config.experts is not None and not spreads:
        shared["experts' intermediate size"] = config.experts.intermediate_size
    for name, number in shared.items():
        if number % size:
            raise ModelError(f"{_cannot_share(size, name, number)}: {_sizes_that_do(config, shared.values())}")
    if config.num_kv_heads % size and size % config.num_kv_heads:
        sizes = _sizes_that_do(config, shared.values())
        raise ModelError(f"{_cannot_share(size, 'KV heads', config.num_kv_heads)}: {sizes}")


def _cannot_share(size: int, what: str, number: int) -> str:
    return f"tensor_parallel_size={size} does not divide the model's {what} ({number})"


def _sizes_that_do(config: DecoderConfig, shared: Iterable[int]) -> str:
    widths = math.gcd(*shared)
    sizes = [n for n in range(1, widths + 1) if widths % n == 0]
    sizes = [n for n in sizes if config.num_kv_heads % n == 0 or n % config.num_kv_heads == 0]
    return f"set tensor_parallel_size to one of {', '.join(map(str, sizes))}"
