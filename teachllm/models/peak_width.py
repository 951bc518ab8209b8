"""How much of a GPU's memory a token takes while it goes through the layers."""

from __future__ import annotations

from teachllm.models import moe
from teachllm.models.llama_config import LlamaConfig


def peak_width(config: LlamaConfig, is_gated: bool = False, is_fixed: bool = False) -> int:
    """Numbers a token keeps alive at the widest point of the forward pass on a GPU, in steps of thousands of tokens.

    Alive all the way are cosine, sine, the residual stream and what the last norm made of it. Beside them either QKV
    and what attention makes of it, or gate, up and their product; of these the product alone if it `is_gated` before it
    is written. A projection with a bias, one that `is_fixed`, and experts do not add to the residual themselves: what a
    block was given stays beside the sum, and so does what attention gave; at its end the MLP's result, too.
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
