"""Drafters once more, as plainly as can be: no cache, no batch, everything again for every draft, in float64.

Each says which logits a drafter should draw from, given the tokens that are known and the drafts that lead there. What
the model itself computes is taken from transformers. Layers are numbered by the residual stream that comes into them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

# (known ids, the drafts after them) -> [vocab_size] float64: what the next draft should be drawn from
Naive = Callable[[Sequence[int], Sequence[int]], torch.Tensor]
Tensors = Mapping[str, torch.Tensor]


@cache
def transformers_model(folder: str) -> Any:
    """In float64."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


class States:
    """What a model computes at every position of a sequence: each layer's input, and last what its head reads."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._longest: list[tuple[list[int], tuple[torch.Tensor, ...]]] = []

    def __call__(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """[len(ids), hidden_size] each. A causal model says the same of a prefix, so the longest are kept."""
        for known, states in self._longest:
            if known[: len(ids)] == list(ids):
                return [state[: len(ids)] for state in states]
        with torch.inference_mode():
            found = self._model.model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
        self._longest.append((list(ids), tuple(state[0] for state in found)))
        return [state[0] for state in found]

    def remember(self, sequences: Sequence[Sequence[int]]) -> None:
        """Of these the prefixes will be asked for."""
        for sequence in sorted(sequences, key=len, reverse=True):
            self(sequence)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


def turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """[length, heads, size], turned by the position."""
    length, _, size = x.shape
    angles = torch.arange(length)[:, None].double() * theta ** -(torch.arange(0, size, 2).double() / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention(x: torch.Tensor, weights: Tensors, raw: Mapping[str, Any]) -> torch.Tensor:
    """[length, input size] -> [length, hidden_size]; every position looks at itself and those before it."""
    size, heads, kv_heads = (raw[key] for key in ("head_dim", "num_attention_heads", "num_key_value_heads"))
    q, k, v = (
        F.linear(x, weights[f"{name}_proj.weight"], weights.get(f"{name}_proj.bias")).unflatten(-1, (-1, size))
        for name in "qkv"
    )
    if "q_norm.weight" in weights:
        q, k = (
            rms_norm(x, weights[f"{n}_norm.weight"], raw.get("rms_norm_eps", 1e-6)) for n, x in (("q", q), ("k", k))
        )
    theta = raw.get("rope_theta", 10000.0)
    q, k = turned(q, theta), turned(k, theta)
    k, v = (each.repeat_interleave(heads // kv_heads, dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
    mask = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    if "Mistral" in raw["architectures"][0]:
        mask = mask.triu(1 - raw["sliding_window"])
    out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(dim=-1), v)
    return F.linear(out.flatten(1), weights["o_proj.weight"])


def _under(tensors: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}


def eagle(raw: Mapping[str, Any], tensors: Tensors, model: Any, states: States) -> Naive:
    """EAGLE, or EAGLE-3 if the layer has a `hidden_norm`."""
    raw = {**raw, **raw.get("transformer_layer_config", {}), **raw.get("model", {})}
    tensors = {name: each.double() if each.is_floating_point() else each for name, each in tensors.items()}
    is_third = any("hidden_norm" in name for name in tensors)
    block = _under(tensors, "midlayer.") or _under(tensors, "layers.0.")
    eps = raw.get("rms_norm_eps", 1e-6)
    embedding = tensors.get("embed_tokens.weight", model.model.embed_tokens.weight.detach())
    head = tensors.get("lm_head.weight", model.lm_head.weight.detach())

    def forward(embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The next features of all positions."""
        if is_third:
            normed = rms_norm(features, block["hidden_norm.weight"], eps)
            residual = normed if raw.get("norm_before_residual") else features
            x = torch.cat((rms_norm(embedded, block["input_layernorm.weight"], eps), normed), dim=-1)
        else:
            x = F.linear(torch.cat((embedded, features), dim=-1), tensors["fc.weight"], tensors.get("fc.bias"))
            residual = x
        residual = residual + attention(x, _under(block, "self_attn."), raw)
        x, mlp = rms_norm(residual, block["post_attention_layernorm.weight"], eps), _under(block, "mlp.")
        gated = F.silu(F.linear(x, mlp["gate_proj.weight"])) * F.linear(x, mlp["up_proj.weight"])
        residual = residual + F.linear(gated, mlp["down_proj.weight"])
        return rms_norm(residual, tensors["norm.weight"], eps) if raw.get("norm_output") else residual

    def fused(of_model: Sequence[torch.Tensor]) -> torch.Tensor:
        """The features that EAGLE-3 begins with."""
        key = "eagle_aux_hidden_state_layer_ids"
        layers = raw[key] if key in raw else [layer + 1 for layer in raw["eagle_config"][key]]
        parts = [of_model[layer] for layer in layers]
        if raw.get("fc_norm"):
            parts = [rms_norm(part, tensors[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)]
        whole = torch.cat(parts, dim=-1)
        if raw.get("norm_before_fc"):
            whole = rms_norm(whole, tensors["input_norm.weight"], eps)
        return F.linear(whole, tensors["fc.weight"])

    def logits(feature: torch.Tensor) -> torch.Tensor:
        is_plain = not is_third or raw.get("norm_output")
        found = F.linear(feature if is_plain else rms_norm(feature, tensors["norm.weight"], eps), head)
        if "d2t" not in tensors or "lm_head.weight" not in tensors:
            return found
        whole = torch.full((raw["vocab_size"],), -torch.inf, dtype=torch.float64)
        whole[tensors["d2t"] + torch.arange(len(found))] = found
        return whole

    next_features: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}

    def naive(known: Sequence[int], drafts: Sequence[int]) -> torch.Tensor:
        of_model = states(known[:-1])  # the model has not read the newest token
        features = fused(of_model) if is_third else of_model[-1]
        for num_read in range(len(drafts) + 1):
            ids = (*known[1:], *drafts[:num_read])
            if (key := (len(known), ids)) not in next_features:
                next_features[key] = forward(embedding[torch.tensor(ids)], features)[-1:]
            features = torch.cat((features, next_features[key]))
        return logits(features[-1])

    return naive


def medusa(raw: Mapping[str, Any], tensors: Tensors, model: Any, states: States) -> Naive:
    """Medusa's heads, under vLLM's names or, with `medusa_num_heads`, the authors'."""
    tensors = {name.removeprefix("medusa_heads."): each.double() for name, each in tensors.items()}
    is_authors = "medusa_num_heads" in raw
    num_layers = raw["medusa_num_layers" if is_authors else "num_hidden_layers"]

    def naive(known: Sequence[int], drafts: Sequence[int]) -> torch.Tensor:
        x, index = states(known[:-1])[-1][-1], len(drafts)  # no head knows what the others say
        for layer in range(num_layers):
            name = f"{index}.{layer}.linear" if is_authors else f"blocks.{index}.layers.{layer}"
            x = x + F.silu(F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias")))
        own = tensors.get(f"{index}.{num_layers}.weight" if is_authors else f"lm_heads.{index}.weight")
        if raw.get("original_lm_head"):
            own = tensors.get("lm_heads.0.weight", tensors.get("lm_head.weight"))
        return F.linear(x, model.lm_head.weight.detach() if own is None else own)

    return naive


def draft_model(model: Any) -> Naive:
    """A model by itself, which reads all that is known."""

    longest, logits = [0], torch.empty(0)

    def naive(known: Sequence[int], drafts: Sequence[int]) -> torch.Tensor:
        nonlocal longest, logits
        ids = [*known, *drafts]
        if longest[: len(ids)] != ids:  # a causal model says the same of a prefix
            with torch.inference_mode():
                longest, logits = ids, model(torch.tensor([ids])).logits[0]
        return logits[len(ids) - 1]

    return naive


def read(folder: str | Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """config.json and the tensors of a checkpoint."""
    import json

    from safetensors.torch import load_file

    return json.loads((Path(folder) / "config.json").read_text()), load_file(Path(folder) / "model.safetensors")
