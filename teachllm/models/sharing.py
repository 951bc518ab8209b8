"""What each rank has of a model: layers by its stage, and of each layer some heads and a part of the widths.

Stages are made by cost, which for decodes is what they read: the last one has the output head as well, so it has fewer
layers. What cannot be shared equally is refused before a weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

from teachllm.distributed.layout import Place
from teachllm.distributed.slices import spread
from teachllm.models.llama_config import LlamaConfig, parse
from teachllm.models.model_config import DTYPE_BYTES, ModelConfig
from teachllm.models.peak_width import peak_width
from teachllm.models.registry import ModelError


def of_rank(config: LlamaConfig, place: Place) -> LlamaConfig:
    """What one rank has of a model: some heads, a part of the widths and of the vocabulary, its stage's layers.

    Raises:
        ModelError: they cannot be shared equally, or there are fewer experts than ranks to spread them over.
    """
    size, layout = place.layout.tensor, place.layout
    if config.moe is not None and config.moe.num_experts < layout.num_expert_ranks:
        raise ModelError(
            f"enable_expert_parallel=True spreads experts over {layout.num_expert_ranks} ranks, and the model has "
            f"{config.moe.num_experts}: lower {'data' if layout.replicas > 1 else 'tensor'}_parallel_size"
        )
    if size > 1:
        shared = {"attention heads": config.num_heads, "intermediate_size": config.intermediate_size}
        shared["vocab_size"] = config.vocab_size
        if config.moe is not None and not layout.spreads_experts:
            shared["experts' intermediate size"] = config.moe.intermediate_size
        for name, number in shared.items():
            if number % size:
                raise ModelError(f"{_cannot_share(size, name, number)}: {_sizes_that_do(config, shared.values())}")
        if config.num_kv_heads % size and size % config.num_kv_heads:
            sizes = _sizes_that_do(config, shared.values())
            raise ModelError(f"{_cannot_share(size, 'KV heads', config.num_kv_heads)}: {sizes}")
    layers, experts = stage_layers(config, place.layout.pipeline)[place.stage], config.moe
    if experts is not None:
        own_layers = tuple(experts.layers[i] for i in layers)
        experts = replace(experts, layers=own_layers, intermediate_size=experts.intermediate_size // size)
    return replace(
        config,
        vocab_size=config.vocab_size // size,
        intermediate_size=config.intermediate_size // size,
        num_layers=len(layers),
        num_heads=config.num_heads // size,
        num_kv_heads=max(config.num_kv_heads // size, 1),
        windows=tuple(config.windows[i] for i in layers),
        moe=experts,
    )


def stage_layers(config: LlamaConfig, num_stages: int) -> list[range]:
    """The layers of each stage, such that the one with the most to read has the least: the last has the head, too.

    Raises:
        ModelError: there are more stages than layers.
    """
    num_layers = config.num_layers
    if num_stages > num_layers:
        raise ModelError(
            f"pipeline_parallel_size={num_stages} is more than the model's {num_layers} layers: set "
            f"pipeline_parallel_size={num_layers} or less"
        )
    if num_stages == 1:
        return [range(num_layers)]
    head = config.vocab_size * config.hidden_size / ((config.num_active_parameters - config.hidden_size) / num_layers)

    def slowest(last: int) -> float:
        return max(-(-(num_layers - last) // (num_stages - 1)), last + head)

    last = min(range(1, num_layers - num_stages + 2), key=lambda count: (slowest(count), -count))
    each, more = divmod(num_layers - last, num_stages - 1)
    sizes = [each + (i < more) for i in range(num_stages - 1)] + [last]
    ends = list(accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _idle(whole: LlamaConfig, own: LlamaConfig, place: Place) -> int:
    """Parameters of a rank's experts beside those that a token meets; less than 0, where it holds fewer than these."""
    if whole.moe is None or own.moe is None:
        return 0
    layout, moe = place.layout, whole.moe
    held = spread(moe.num_experts, layout.num_expert_ranks)[place.expert_rank]
    width = moe.intermediate_size if layout.spreads_experts else own.moe.intermediate_size
    met = own.moe.top_k * own.moe.intermediate_size
    return own.moe.num_layers * 3 * whole.hidden_size * (len(held) * width - met)


def _cannot_share(size: int, what: str, number: int) -> str:
    return f"tensor_parallel_size={size} does not divide the model's {what} ({number})"


def _sizes_that_do(config: LlamaConfig, shared: Iterable[int]) -> str:
    widths = math.gcd(*shared)
    sizes = [n for n in range(1, widths + 1) if widths % n == 0]
    sizes = [n for n in sizes if config.num_kv_heads % n == 0 or n % config.num_kv_heads == 0]
    return f"set tensor_parallel_size to one of {', '.join(map(str, sizes))}"


def model_of_rank(model: ModelConfig, place: Place) -> ModelConfig:
    """What memory arithmetic must know of one rank's part: its own layers, heads, widths and bytes.

    Raises:
        ModelError: it cannot be shared equally.
    """
    if place.layout.num_connected == 1:
        return model
    if model.implementation != "teachllm":
        raise ModelError(
            f"{model.architecture} runs through transformers' code, of which no rank can have a part: set "
            "tensor_parallel_size=1 and pipeline_parallel_size=1; data_parallel_size shares its requests"
        )
    whole = parse(model.raw)
    own, size = of_rank(whole, place), DTYPE_BYTES[model.dtype]
    layers = own.num_active_parameters - own.hidden_size
    sums = place.layout.tensor > 1  # are not added to the stream on the way
    ends = (place.is_first_stage + place.is_last_stage) * own.vocab_size * own.hidden_size
    if whole.tied and place.is_first_stage and place.is_last_stage:
        ends //= 2
    norm = own.hidden_size * place.is_last_stage
    # What is quantized takes its share of the bytes; so does what lies beside: tables of positions, norms of each head.
    of_layers = model.active_bytes * layers // (whole.num_active_parameters - whole.hidden_size)
    whole_ends = (1 if whole.tied else 2) * whole.vocab_size * whole.hidden_size
    idle, own_idle = whole.num_parameters - whole.num_active_parameters - whole_ends, _idle(whole, own, place)
    beside = model.weight_bytes - model.active_bytes - (whole_ends + idle - own_idle) * size
    return replace(
        model,
        num_layers=own.num_layers,
        windows=own.windows,
        num_attention_heads=own.num_heads,
        num_kv_heads=own.num_kv_heads,
        num_parameters=layers + ends + norm + own_idle,
        num_active_parameters=layers + norm,
        peak_width=peak_width(own, is_fixed=sums),
        gated_peak_width=peak_width(own, not own.mlp_bias and own.intermediate_size % 8 == 0, is_fixed=sums),
        fixed_peak_width=peak_width(own, is_fixed=True),
        active_bytes=of_layers + norm * size,
        weight_bytes=of_layers + (norm + ends) * size + beside,
        num_multiplied_as_codes=model.num_multiplied_as_codes
        * layers
        // (whole.num_active_parameters - whole.hidden_size),
    )
