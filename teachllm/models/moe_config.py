"""Read what a config.json says of a mixture of experts: how many, how many for a token, how wide, in which layers.

Sources: the configurations of Qwen3-MoE and Mixtral in transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

from teachllm.checkpoint.json_values import JsonObject


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
        """Count the layers that have experts."""
        return sum(self.layers)


def parse_moe(values: JsonObject, architecture: str) -> MoeConfig | None:
    """Return the experts of a config.json whose absent keys have their meaning; None if it is not of a mixture.

    Raises:
        ModelError: a value that no such model can have.
    """
    if architecture not in NAMES:
        return None
    num_layers, is_mixtral = values.integer("num_hidden_layers"), architecture == "MixtralForCausalLM"
    key = "num_experts" if values.has("num_experts") else "num_local_experts"
    num_experts = values.integer(key)
    top_k = values.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise values.refusal("num_experts_per_tok", f"at most {key}={num_experts}")
    dense = [] if is_mixtral else values.entries("mlp_only_layers")
    if not all(type(i) is int and 0 <= i < num_layers for i in dense):
        raise values.refusal("mlp_only_layers", f"a list of layers below num_hidden_layers={num_layers}")
    step = 1 if is_mixtral else values.integer("decoder_sparse_step")
    return MoeConfig(
        num_experts=num_experts,
        num_held=num_experts,
        top_k=top_k,
        intermediate_size=values.integer("intermediate_size" if is_mixtral else "moe_intermediate_size"),
        renormalizes=is_mixtral or values.flag("norm_topk_prob"),
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
        names=NAMES[architecture],
    )
