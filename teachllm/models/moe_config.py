"""Read what a config.json says of a mixture of experts: how many, how many for a token, how wide, in which layers.

Sources: the configurations of Qwen3-MoE and Mixtral in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from teachllm.models.registry import ModelError

_COUNTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
_MIXTRALS = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}  # its config has no such keys


@dataclass(frozen=True)
class ExpertNames:
    """A checkpoint's words for them.

    Attributes:
        block: what takes the place of "mlp".
        gate, up, down: the projections of an expert.
    """

    block: str
    gate: str
    up: str
    down: str


NAMES = {
    "Qwen3MoeForCausalLM": ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
    "MixtralForCausalLM": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
}


@dataclass(frozen=True)
class MoeConfig:
    """The experts of a model.

    Attributes:
        num_experts: in each layer that has any.
        num_held: of them; all, or those that a rank has.
        top_k: to how many of them a token goes.
        intermediate_size: of one expert.
        renormalizes: the weights of a token's experts are scaled to add up to 1.
        layers: per layer, whether it has experts, or one MLP for all tokens.
    """

    num_experts: int
    num_held: int
    top_k: int
    intermediate_size: int
    renormalizes: bool
    layers: tuple[bool, ...]
    names: ExpertNames

    @property
    def num_layers(self) -> int:
        """Layers that have experts."""
        return sum(self.layers)


def parse_moe(values: Mapping[str, Any], architecture: str) -> MoeConfig | None:
    """The experts of a config.json whose absent keys have been given their meaning; None: it is not of a mixture.

    Raises:
        ModelError: a value that no such model can have.
    """
    if architecture not in NAMES:
        return None
    if architecture == "MixtralForCausalLM":
        values = {**values, **_MIXTRALS, "moe_intermediate_size": values["intermediate_size"]}
    values = {**values, "num_experts": values.get("num_experts", values.get("num_local_experts"))}
    for key in _COUNTS:
        if type(values[key]) is not int or values[key] < 1:
            raise ModelError(f"{architecture} with {key}={values[key]!r} is not supported, only with 1 or more")
    num_experts, top_k = values["num_experts"], values["num_experts_per_tok"]
    if top_k > num_experts:
        raise ModelError(f"{architecture}: a token cannot go to {top_k} of {num_experts} experts")
    num_layers, dense = values["num_hidden_layers"], values["mlp_only_layers"]
    if not isinstance(dense, list) or not all(type(i) is int and 0 <= i < num_layers for i in dense):
        raise ModelError(f"{architecture}: mlp_only_layers={dense!r} names layers that are not among its {num_layers}")
    step = values["decoder_sparse_step"]
    return MoeConfig(
        num_experts=num_experts,
        num_held=num_experts,
        top_k=top_k,
        intermediate_size=values["moe_intermediate_size"],
        renormalizes=bool(values["norm_topk_prob"]),
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
        names=NAMES[architecture],
    )
