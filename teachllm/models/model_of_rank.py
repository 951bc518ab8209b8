"""Tell what memory arithmetic must know of one rank's part of a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from teachllm.distributed.layout import RankCoords
from teachllm.errors import ModelError
from teachllm.models.llama_config import parse
from teachllm.models.llama_shape import peak_width
from teachllm.models.model_config import DTYPE_BYTES, ModelConfig
from teachllm.models.quantized_needs import Dequantized, needs_of, of_model
from teachllm.models.sharding import of_rank, stage_layers


def model_of_rank(model: ModelConfig, coords: RankCoords) -> ModelConfig:
    """Describe what a rank has of a model: its own layers, heads, widths and bytes.

    Raises:
        ModelError: it cannot be shared equally.
    """
    if coords.layout.num_connected == 1:
        return model
    if model.implementation != "teachllm":
        raise ModelError(
            f"{model.architecture} runs through transformers' code, of which no rank can have a part: set "
            "tensor_parallel_size=1 and pipeline_parallel_size=1; data_parallel_size shares its requests"
        )
    whole = parse(model.raw)
    own, size = of_rank(whole, coords), DTYPE_BYTES[model.dtype]
    layers = own.num_active_parameters - own.hidden_size
    sums = coords.layout.tensor > 1  # are not added to the residual on the way
    is_both_ends = coords.is_first_stage and coords.is_last_stage
    ends = (coords.is_first_stage + coords.is_last_stage) * own.vocab_size * own.hidden_size
    if whole.tied and is_both_ends:
        ends //= 2
    norm, idle = own.hidden_size * coords.is_last_stage, own.num_idle_parameters
    beside = own.num_beside(model.max_model_len, whole.tied and is_both_ends and model.device_type == "cpu")
    widths: dict[str, Any] = {
        "peak_width": peak_width(own, is_fixed=sums),
        "gated_peak_width": peak_width(own, not own.mlp_bias and own.intermediate_size % 8 == 0, is_fixed=sums),
        "fixed_peak_width": peak_width(own, is_fixed=True),
    }
    saved_bytes, num_w8a8 = 0, 0
    dequantized: tuple[Dequantized, ...] = ()
    quantization = None if model.device_type == "cpu" else of_model(model)  # a CPU multiplies float weights
    if quantization is not None:
        needs = needs_of(model.raw, quantization.schemes, size, coords)
        saved_bytes, dequantized, num_w8a8 = needs.saved_bytes, needs.dequantized, needs.num_w8a8_parameters
        widths |= needs.widths
    active_bytes = (layers + norm) * size - saved_bytes
    return replace(
        model,
        **widths,
        num_layers=own.num_layers,
        first_layer=stage_layers(whole, coords.layout.pipeline)[coords.stage].start,
        experts=own.moe,
        windows=own.windows,
        num_attention_heads=own.num_heads,
        num_kv_heads=own.num_kv_heads,
        num_parameters=layers + norm + idle + ends,
        num_active_parameters=layers + norm,
        active_bytes=active_bytes,
        weight_bytes=active_bytes + (idle + ends + beside) * size,
        num_w8a8_parameters=num_w8a8,
        dequantized=dequantized,
    )
