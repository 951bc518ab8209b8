"""The numbers of a model that the engine must know, whatever code runs it."""

from __future__ import annotations

from dataclasses import dataclass

from teachllm.models.moe_config import MoeConfig


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Describe what an implementation reads from a config.json.

    Attributes:
        context_len: the longest sequence the model is meant for.
        num_kv_heads, head_size: of the KV cache; the same in all layers.
        windows: per layer, how many tokens back it looks, itself included; None looks at all.
        tied: the output head is the embedding.
        eos_token_ids: end-of-sequence ids that config.json names, or that its architecture means by naming none.
        num_parameters: tied ones counted once.
        num_active_parameters: of them, those that a token meets between embeddings and output head. Where a router
            picks experts these are as many of them as one token is sent to, or fewer if that is not known.
        experts: of our own models, what some layers have in place of one MLP; None: no layer has.
        estimated_width: of models that run through transformers' code, an estimate of the elements that a token keeps
            alive at the widest point of the forward pass on a GPU; of our own it is 0, as they are measured.
    """

    context_len: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_size: int
    windows: tuple[int | None, ...]
    tied: bool
    eos_token_ids: frozenset[int]
    num_parameters: int
    num_active_parameters: int
    experts: MoeConfig | None = None
    estimated_width: int = 0
