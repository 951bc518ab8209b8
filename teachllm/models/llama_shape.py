"""Describe a model of the Llama family before any weight is read: its shape, its needs, and whether its files fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from teachllm.checkpoint.files import StoredTensor
from teachllm.errors import ModelError
from teachllm.models import moe
from teachllm.models.llama_config import LlamaConfig, parse
from teachllm.models.moe_config import MoeConfig
from teachllm.models.shape import Shape
from teachllm.models.tensor_names import EMBEDDING

_LAYER = "model.layers.{}."
_NORM = _LAYER + "input_layernorm.weight"


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
        experts=config.moe,
    )


def peak_width(config: LlamaConfig, is_gated: bool = False, is_fixed: bool = False) -> int:
    """Return the elements per token that are alive at the widest point of the forward pass on a GPU.

    This holds for steps of thousands of tokens.

    Cosine, sine, the residual and the output of the last norm are alive throughout. Beside them are either QKV and the
    attention output, or gate, up and their product; if `is_gated`, only the product, since gate and up are never
    written. A projection with a bias, a projection that `is_fixed`, and experts do not add to the residual in place:
    then the block's input stays beside the sum, and so does the attention output; at the end so does the MLP's result.
    """
    heads_size = config.num_heads * config.head_size
    qkv_size = heads_size + 2 * config.num_kv_heads * config.head_size
    heads_apart, mlp_apart = config.o_bias or is_fixed, config.mlp_bias or is_fixed
    apart = heads_apart + (mlp_apart or config.moe is not None)
    beside = apart + 1 if apart else 0
    wide = qkv_size + heads_size
    if config.moe is not None:
        wide = max(wide, moe.peak_width(config.moe, config.hidden_size))
    if config.moe is None or not all(config.moe.layers):
        at_end = config.intermediate_size + mlp_apart * config.hidden_size
        wide = max(wide, (1 if is_gated else 3) * config.intermediate_size, at_end)
    return 2 * config.head_size + (2 + beside) * config.hidden_size + wide


def check_sizes(config: LlamaConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Refuse sizes that are not those of the stored tensors, as far as tensors with their plain names tell.

    This comes before anything of these sizes is made: one that is wrong by a digit asks for more memory than there is,
    and the error would be about memory.

    Args:
        stored: by this project's names; may be empty.

    Raises:
        ModelError: names the key of config.json, the tensor and its file.
    """
    for key, name, expected in _rows(config):
        if name in stored and stored[name].shape[:1] != (expected,):
            tensor = stored[name]
            raise ModelError(
                f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, config.json means {expected} rows "
                f"({key})"
            )
    first, last = (_NORM.format(layer) for layer in (0, config.num_layers - 1))
    if first in stored and last not in stored:
        folder = stored[first].file.parent
        raise ModelError(f"{folder} lacks tensor {last}, which config.json means (num_hidden_layers)")


def _rows(config: LlamaConfig) -> Iterator[tuple[str, str, int]]:
    """Yield (key of config.json, tensor, number of its rows)."""
    yield "vocab_size", EMBEDDING, config.vocab_size
    yield "hidden_size", _NORM.format(0), config.hidden_size
    attention = _LAYER.format(0) + "self_attn."
    yield "num_attention_heads, head_dim", f"{attention}q_proj.weight", config.num_heads * config.head_size
    yield "num_key_value_heads, head_dim", f"{attention}k_proj.weight", config.num_kv_heads * config.head_size
    dense, sparse = (
        next((layer for layer in range(config.num_layers) if (config.experts_of(layer) is None) == is_dense), None)
        for is_dense in (True, False)
    )
    if dense is not None:
        yield "intermediate_size", f"{_LAYER.format(dense)}mlp.gate_proj.weight", config.intermediate_size
    if sparse is not None and (experts := config.moe) is not None:
        yield from _rows_of_experts(experts, f"{_LAYER.format(sparse)}{experts.names.block}.")


def _rows_of_experts(experts: MoeConfig, block: str) -> Iterator[tuple[str, str, int]]:
    yield "num_experts or num_local_experts", f"{block}gate.weight", experts.num_experts
    yield (
        "moe_intermediate_size or intermediate_size",
        f"{block}experts.0.{experts.names.gate}.weight",
        experts.intermediate_size,
    )
