"""An EAGLE-3 head: one Llama layer that continues the target's own hidden states (https://arxiv.org/abs/2503.01840).

It sees three of the target's layers, which know far more than the text alone, and the token just sampled. Drafting
further it goes on from its own output in their place, so training lets it do the same for several steps: a head
that had only ever seen the target's states would go astray after its first guess. Embedding and lm_head are the
target's.

The names of modules and settings are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from drafting import NUM_DRAFTS, TrainingBatch, ahead, chain_mask, distil, lesson, load_heads, read_config, save_heads
from torch import Tensor, nn
from train import ROPE_THETA

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": ROPE_THETA,
    "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
    "max_position_embeddings": 4096,
    "vocab_size": 4096,
    "draft_vocab_size": 4096,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True},
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}
# A later step counts less: it matters only when the earlier ones were right.
STEP_WEIGHT = 0.8


def rotate(x: Tensor, start: int, theta: float) -> Tensor:
    """Rotary embedding of [rows, heads, length, head_dim], whose first position is `start`."""
    half = x.shape[-1] // 2
    frequencies = theta ** -(torch.arange(half, device=x.device) / half)
    angles = torch.arange(start, start + x.shape[2], device=x.device)[:, None] * frequencies  # [length, half]
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class EagleAttention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.head_dim: int = config["head_dim"]
        self.theta: float = config["rope_theta"]
        self.group = config["num_attention_heads"] // config["num_key_value_heads"]
        inputs = 2 * config["hidden_size"]  # the token's embedding beside the hidden state
        heads, kv_heads = (config[key] * self.head_dim for key in ("num_attention_heads", "num_key_value_heads"))
        self.q_proj = nn.Linear(inputs, heads, bias=False)
        self.k_proj = nn.Linear(inputs, kv_heads, bias=False)
        self.v_proj = nn.Linear(inputs, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, config["hidden_size"], bias=False)

    def forward(self, x: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """[rows, length, 2 * hidden_size] -> [rows, length, hidden_size]; `past` holds one entry per earlier step."""
        step, length = len(past), x.shape[1]
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [rows, heads, length, head_dim]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, step, self.theta), rotate(key, step, self.theta)
        past.append((key.repeat_interleave(self.group, dim=1), value.repeat_interleave(self.group, dim=1)))
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*past, strict=True))
        # Without a mask the first step, which has by far the most to do, gets the fast kernel.
        mask = chain_mask(length, step, x.device) if step else None
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, intermediate = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.self_attn = EagleAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = MLP(config)

    def forward(self, embedded: Tensor, states: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], dim=-1)
        x = states + self.self_attn(both, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class TrainedEagle(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        # Of layers whose outputs it sees, as SGLang numbers them here: the inputs of the layers after them.
        self.layer_ids: list[int] = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        size = config["hidden_size"]
        self.fc = nn.Linear(len(self.layer_ids) * size, size, bias=False)
        self.midlayer = Layer(config)
        self.norm = nn.RMSNorm(size, config["rms_norm_eps"])

    @classmethod
    def fresh(cls, target: Any, config: dict[str, Any] = CONFIG) -> TrainedEagle:
        """Untrained, but for the last norm: lm_head is the target's, so the states before it should be too."""
        eagle = cls(config)
        eagle.norm.load_state_dict(target.model.norm.state_dict())
        return eagle

    @classmethod
    def load(cls, folder: Path) -> TrainedEagle:
        eagle = cls(read_config(folder))
        load_heads(folder, eagle)
        return eagle

    def unroll(self, batch: TrainingBatch, teacher_forced: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Per step: what lm_head reads for the next guess [rows, length, hidden_size], and the greedy guess.

        The tokens fed are the text's, or its own guesses; the states are its own after the first step either way.
        """
        # In float32 also where autocast multiplies in bfloat16: the states are added to at every step.
        states = self.fc(torch.cat([batch.hidden[i + 1] for i in self.layer_ids], dim=-1)).float()
        tokens = ahead(batch.ids, 1)
        past: list[tuple[Tensor, Tensor]] = []
        for step in range(NUM_DRAFTS):
            states = self.midlayer(F.embedding(tokens, batch.embedding), states, past)
            normed = self.norm(states)
            tokens = ahead(batch.ids, step + 2) if teacher_forced else F.linear(normed, batch.embedding).argmax(dim=-1)
            yield normed, tokens

    def loss(self, batch: TrainingBatch) -> Tensor:
        total = torch.zeros((), device=batch.ids.device)
        for step, (normed, _) in enumerate(self.unroll(batch, teacher_forced=True)):
            wanted, target_logits = lesson(batch, step + 2)
            total = total + STEP_WEIGHT**step * distil(F.linear(normed[wanted], batch.embedding), target_logits)
        return total

    def drafts(self, batch: TrainingBatch) -> Tensor:
        return torch.stack([tokens for _, tokens in self.unroll(batch, teacher_forced=False)], dim=-1)

    def save(self, folder: Path) -> None:
        save_heads(folder, self, self.config)
