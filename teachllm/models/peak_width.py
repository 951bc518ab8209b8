"""Predict how much of a GPU's memory a token takes while it goes through the layers."""

from __future__ import annotations

from teachllm.models import moe
from teachllm.models.llama_config import LlamaConfig


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
