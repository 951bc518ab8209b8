"""Read what the engine must know of a config.json of the Llama family before any weight is read."""

from __future__ import annotations

from typing import Any

from teachllm.models.llama_config import parse
from teachllm.models.peak_width import peak_width
from teachllm.models.shape import Shape


def shape(raw: dict[str, Any]) -> Shape:
    """Return the model's shape. Errors as in `llama_config.parse`."""
    config = parse(raw)
    return Shape(
        context_len=config.rotary.context_len,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        windows=config.windows,
        tied=config.tied,
        eos_token_ids=config.eos_token_ids,
        num_parameters=config.num_parameters,
        num_active_parameters=config.num_active_parameters,
        peak_width=peak_width(config),
        gated_peak_width=peak_width(config, is_gated=not config.mlp_bias and config.intermediate_size % 8 == 0),
        fixed_peak_width=peak_width(config, is_fixed=True),
    )
