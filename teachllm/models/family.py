"""A family of models: how its config.json is read, and how a model of it is built.

This is all that the rest of the engine knows of a family, and `registry.py` has a line for each. What follows from the
code of a model, its tensors, sizes and bytes, is read off a build on the meta device: see `spec.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from teachllm.distributed.ranks import ALONE, Ranks, ShardSpec
from teachllm.errors import ModelError
from teachllm.layers.weights.scheme import UNQUANTIZED, Schemes
from teachllm.models.moe_config import MoeConfig

if TYPE_CHECKING:
    from teachllm.models.decoder import CausalLM


MOST_LAYERS = 1 << 10  # more than any model has, and few enough that what is made for each of them takes seconds


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What the engine has to know of a config.json, of any family. A family's own class adds what its layers need.

    Attributes:
        context_len: the longest sequence that the model is meant for.
        num_heads, num_kv_heads, head_size: of attention, the same in all layers.
        windows: per layer, how many tokens back it looks, itself included; None: to the first one.
        tied: the output head is the embedding.
        eos_token_ids: end-of-sequence ids.
        experts: what some layers have in place of one MLP; None: no layer has.
    """

    context_len: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    windows: tuple[int | None, ...]
    tied: bool
    eos_token_ids: frozenset[int]
    experts: MoeConfig | None = None

    def __post_init__(self) -> None:
        if len(self.windows) != self.num_layers:
            raise ModelError(
                f"the family read windows of {len(self.windows)} layers, and num_layers is {self.num_layers}"
            )

    @property
    def shared_sizes(self) -> dict[str, int]:
        """Return the sizes that tensor-parallel ranks share equally besides KV heads, by their names for people."""
        return {"attention heads": self.num_heads}

    def experts_of(self, layer: int) -> MoeConfig | None:
        """Return what takes the place of a layer's MLP, if anything does."""
        return self.experts if self.experts is not None and self.experts.layers[layer] else None


C = TypeVar("C", bound=DecoderConfig)


@dataclass(frozen=True)
class Part:
    """Say which part of a model is built, and how.

    Attributes:
        layers: the indices of its layers in the whole model, ascending.
        max_len: the number of positions to prepare, at most the model's context.
        schemes: how its projections are quantized.
        ranks: the ranks that share the model. The first stage embeds, the last one has the output head; what lies
            between two stages is hidden states.
    """

    layers: Sequence[int]
    max_len: int
    schemes: Schemes = UNQUANTIZED
    ranks: Ranks = ALONE

    def layer_schemes(self, index: int) -> Schemes:
        """Return how the projections of one layer are quantized."""
        return self.schemes.within(f"model.layers.{index}")

    def shard(self, config: DecoderConfig) -> ShardSpec:
        """Return which part of each of its layers is this rank's."""
        return self.ranks.shard_spec(config.num_kv_heads)


@dataclass(frozen=True)
class Family(Generic[C]):
    """Describe a family of models.

    Attributes:
        parse: reads config.json.
        build: builds a model, or a part of one, without its weights, on PyTorch's default device and in its default
            dtype.
        size_keys: the key of config.json that decides how many rows a tensor has, by the end of the tensor's name; for
            errors.
    """

    parse: Callable[[dict[str, Any]], C]
    build: Callable[[C, Part], CausalLM]
    size_keys: Mapping[str, str] = field(default_factory=dict)
