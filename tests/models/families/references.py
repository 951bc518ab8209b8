"""The toy families in float64, on whole sequences, from the tensors of a checkpoint alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.engine.reference import Reference

Weights = dict[str, torch.Tensor]


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _rms(x - x.mean(-1, keepdim=True), weight, eps)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Each [num_heads, length, head_size] -> [length, num_heads * head_size]: causal, at most `window` tokens back."""
    k, v = (each.repeat_interleave(len(q) // len(each), dim=0) for each in (k, v))
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)


def _heads(x: torch.Tensor, weight: torch.Tensor, size: int) -> torch.Tensor:
    return (x @ weight.T).unflatten(-1, (-1, size)).transpose(0, 1)


def _angles(length: int, size: int, theta: float) -> torch.Tensor:
    """[length, size / 2]."""
    return torch.arange(length, dtype=torch.float64)[:, None] / theta ** (torch.arange(0, size, 2) / size)


def _turn_halves(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Channel i with channel i + size / 2, as Llama."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _turn_neighbours(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Channel 2i with channel 2i + 1."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def _of_layer(weights: Weights, layer: int) -> Weights:
    prefix = f"model.layers.{layer}."
    return {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}


def moved_norm(weights: Weights, raw: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
    """[length] -> logits, [length, vocab_size]."""
    size, eps = raw["hidden_size"] // raw["num_attention_heads"], raw["rms_norm_eps"]
    angles = _angles(len(ids), size, raw["rope_theta"])
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(raw["num_hidden_layers"]):
        of = _of_layer(weights, layer)
        q, k, v = (_heads(x, of[f"self_attn.{name}_proj.weight"], size) for name in "qkv")
        attended = _attention(_turn_halves(q, angles), _turn_halves(k, angles), v) @ of["self_attn.o_proj.weight"].T
        x = x + _rms(attended, of["post_attention_layernorm.weight"], eps)
        h = _rms(x, of["pre_mlp_layernorm.weight"], eps)
        gate, up = (h @ of[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.gelu(gate, approximate="tanh") * up) @ of["mlp.down_proj.weight"].T
    return _rms(x, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T


def parallel_block(weights: Weights, raw: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
    """[length] -> logits, [length, vocab_size]."""
    size, eps = raw["hidden_size"] // raw["num_attention_heads"], raw["layer_norm_eps"]
    angles = _angles(len(ids), size, raw["rope_theta"])
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(raw["num_hidden_layers"]):
        of = _of_layer(weights, layer)
        h = _layer_norm(x, of["input_layernorm.weight"], eps)
        q, k, v = (_heads(h, of[f"self_attn.{name}_proj.weight"], size) for name in "qkv")
        q = _turn_neighbours(_layer_norm(q, of["self_attn.q_norm.weight"][:, None], eps), angles)
        k = _turn_neighbours(_layer_norm(k, of["self_attn.k_norm.weight"][:, None], eps), angles)
        attended = _attention(q, k, v) @ of["self_attn.o_proj.weight"].T
        gate, up = (h @ of[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + attended + (F.silu(gate) * up) @ of["mlp.down_proj.weight"].T
    normed = _layer_norm(x, weights["model.norm.weight"], eps)
    return raw["logit_scale"] * normed @ weights["model.embed_tokens.weight"].T


class ToyReference(Reference):
    """What a toy family computes, one request at a time."""

    def __init__(self, name: str, path: str, raw: dict[str, Any], forward: Callable[..., torch.Tensor]) -> None:
        super().__init__(name, path)
        self.raw, self._forward, self._found = raw, forward, dict[tuple[int, ...], Any]()

    @cached_property
    def weights(self) -> Weights:
        return {name: each.double() for name, each in load_file(Path(self.path, "model.safetensors")).items()}

    def _greedy(self, prompt: Any, num_tokens: int = 24) -> Any:
        if tuple(prompt) not in self._found:
            ids, logprobs, gaps = list(prompt), [], []
            for _ in range(num_tokens):
                values, best = self._forward(self.weights, self.raw, torch.tensor(ids))[-1].log_softmax(-1).topk(2)
                ids.append(int(best[0]))
                logprobs.append(float(values[0]))
                gaps.append(float(values[0] - values[1]))
            self._found[tuple(prompt)] = ids[len(prompt) :], np.array(logprobs), np.array(gaps)
        return self._found[tuple(prompt)]
