"""The model contract: what a runner calls, whichever family's code computes it.

A model turns the token ids of a flat batch into hidden states, and hidden states into logits. It has K and V of its
layers in caches that the runner allocates, and it knows nothing of requests: what belongs to which is in the attention
metadata. A family's own modules, those of transformers and one stage of a pipeline all satisfy `Model`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import nn

from teachllm.layers.attention import AttentionMetadata
from teachllm.models.moe_config import MoeConfig

# One layer's K and V, each [num_blocks, block_size, num_kv_heads, head_size].
PagedKV: TypeAlias = tuple[torch.Tensor, torch.Tensor]
# Receives the residual stream before a layer, [num_tokens, hidden_size], and copies it: the layer changes it later.
AuxOut: TypeAlias = Callable[[torch.Tensor], None]
# Two tensors with a row per token, which a model's rotary module returns for a step's positions and its layers take.
Angles: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class Model(Protocol):
    """A causal language model, or one rank's part of it.

    Attributes:
        implementation: "teachllm" or "transformers", as `ModelConfig` has it.
        experts: what some of its layers have in place of one MLP; None: no layer has.
    """

    implementation: str
    experts: MoeConfig | None

    @property
    def fuses_decodes(self) -> bool:
        """Return whether, on a GPU, its layers can leave norm, rotation and KV write to attention."""
        ...

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[PagedKV],
        metadata: AttentionMetadata,
        aux_hidden_states: Mapping[int, AuxOut] | None = None,
        receive: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute one step: write K and V of its tokens and return their hidden states.

        Args:
            input_ids, positions: [num_tokens] int64.
            kv_caches: of the layers, in their order.
            aux_hidden_states: receive the residual stream before some layers, by their index.
            receive: waits for what the stage before returned, [num_tokens, hidden_size]; None: this is the first stage.

        Returns:
            [num_tokens, hidden_size], or [num_logits, hidden_size] if the metadata has `logits_indices`. A stage that
            is not the last returns the residual stream of all tokens.
        """

    def logits(self, hidden: torch.Tensor, *, sharded: bool = False, in_float32: bool = True) -> torch.Tensor:
        """Multiply hidden states, [num_rows, hidden_size], by the output head.

        Args:
            sharded: return this rank's shard of the vocabulary alone.
            in_float32: see `Embedding.logits`.

        Returns:
            [num_rows, vocab_size], or [num_rows, own part of the vocabulary].
        """

    def execute_dummy_step(self) -> None:
        """Compute an empty step: what this rank's experts have to do for replicas that have tokens."""

    def count_load(self) -> torch.Tensor:
        """Count from now on the tokens that each expert gets.

        Returns:
            [layers with experts, num_experts] int64 of the whole model; rows of other stages' layers stay zero.
        """

    def modules(self) -> Iterator[nn.Module]:
        """Yield the model's modules, as `nn.Module` does."""
