"""How much of a GPU's memory a token takes while it goes through the layers."""

from __future__ import annotations

from teachllm.models import moe
from teachllm.models.llama_config import LlamaConfig


def peak_width(config: LlamaConfig, is_gated: bool = False, is_fixed: bool = False) -> int:
    """Numbers a token keeps alive at the widest point of the forward pass on a GPU, in steps of thousands of tokens.

    Alive all the way are cosine, sine, the residual stream and what the last norm made of it. Beside them either QKV
    and what attention makes of it, or gate, up and their product; of these the product alone if it `is_gated` before it
    is written. A projection with a bias, or one that `is_fixed`, does not add to the stream itself: its result is there
    as well, and inside a block the one it was given. So are the experts' results.
    """
    heads_size = config.num_heads * config.head_size
    qkv_size = heads_size + 2 * config.num_kv_heads * config.head_size
    apart = (config.o_bias or is_fixed) + (config.mlp_bias or is_fixed or config.moe is not None)
    own_results = apart + 1 if apart else 0
    wide = qkv_size + heads_size
    if config.moe is not None:
        wide = max(wide, moe.peak_width(config.moe, config.hidden_size))
    if config.moe is None or not all(config.moe.layers):
        wide = max(wide, (1 if is_gated else 3) * config.intermediate_size)
    return 2 * config.head_size + (2 + own_results) * config.hidden_size + wide
