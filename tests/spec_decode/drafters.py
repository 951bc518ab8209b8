"""Drafters for the tiny checkpoints, written as published ones are: a draft model, EAGLE and Medusa heads."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.checkpoints import VOCAB_SIZE, build_config, build_model
from tests.engine.reference import reference


@cache
def draft_model(name: str, noise: float = 0.05) -> str:
    """The checkpoint `name` with noise in its weights: right about often, and often wrong."""
    folder = Path(reference(name).path).parent / f"{name}-draft-{noise}"
    model = build_model(name)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std(), alpha=noise)
    model.save_pretrained(folder)
    return str(folder)


@cache
def eagle(name: str, is_third: bool = True, num_layers: int | None = None, draft_vocab_size: int = VOCAB_SIZE) -> str:
    """A random EAGLE head for the checkpoint `name`; `num_layers` of the model, if not its own."""
    config = build_config(name)
    hidden, num_layers = config.hidden_size, num_layers or config.num_hidden_layers
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 2.0 * shape[-1] ** -0.5

    norm = torch.ones(hidden)
    layer = {
        "self_attn.q_proj.weight": random(4 * 16, hidden * (1 + is_third)),
        "self_attn.k_proj.weight": random(2 * 16, hidden * (1 + is_third)),
        "self_attn.v_proj.weight": random(2 * 16, hidden * (1 + is_third)),
        "self_attn.o_proj.weight": random(hidden, 4 * 16),
        "mlp.gate_proj.weight": random(96, hidden),
        "mlp.up_proj.weight": random(96, hidden),
        "mlp.down_proj.weight": random(hidden, 96),
        "post_attention_layernorm.weight": norm.clone(),
    }
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if is_third else "LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
    }
    if is_third:
        layer |= {"input_layernorm.weight": norm.clone(), "hidden_norm.weight": norm.clone()}
        tensors = {f"midlayer.{key}": value for key, value in layer.items()}
        tensors |= {"fc.weight": random(hidden, 3 * hidden), "norm.weight": norm.clone()}
        raw["eagle_aux_hidden_state_layer_ids"] = [0, num_layers // 2, num_layers - 1]
        raw["draft_vocab_size"] = draft_vocab_size
        if draft_vocab_size < VOCAB_SIZE:
            ids = torch.randperm(VOCAB_SIZE, generator=generator)[:draft_vocab_size].sort().values
            is_drafted = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, ids, True)
            tensors |= {"d2t": ids - torch.arange(draft_vocab_size), "t2d": is_drafted}
            tensors["lm_head.weight"] = random(draft_vocab_size, hidden)
    else:
        tensors = {f"layers.0.{key}": value for key, value in layer.items()}
        tensors |= {"fc.weight": random(hidden, 2 * hidden), "embed_tokens.weight": random(VOCAB_SIZE, hidden)}
    return _write(f"{name}-eagle-{is_third}-{num_layers}-{draft_vocab_size}", raw, tensors)


@cache
def medusa(name: str, num_heads: int = 4, shares_head: bool = True) -> str:
    """Random Medusa heads for the checkpoint `name`, in vLLM's form."""
    hidden = build_config(name).hidden_size
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for index in range(num_heads):
        tensors[f"blocks.{index}.layers.0.weight"] = torch.randn(hidden, hidden, generator=generator) * 0.1
        if not shares_head:
            tensors[f"lm_heads.{index}.weight"] = torch.randn(VOCAB_SIZE, hidden, generator=generator)
    raw = {
        "architectures": ["MedusaModel"],
        "hidden_size": hidden,
        "vocab_size": VOCAB_SIZE,
        "num_heads": num_heads,
        "num_hidden_layers": 1,
        "original_lm_head": shares_head,
    }
    return _write(f"{name}-medusa-{num_heads}-{shares_head}", raw, tensors)


def speculation(method: str, name: str, **settings: Any) -> dict[str, Any]:
    """A `speculative_config` for the checkpoint `name`."""
    models = {"draft_model": draft_model, "eagle": eagle, "medusa": medusa}
    model = {"model": models[method](name)} if method in models else {}
    return {"method": method, **model, **settings}


def _write(name: str, raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    folder = Path(reference("qwen3").path).parent / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)
