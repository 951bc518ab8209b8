"""Two checkpoints of one small layer with the embedded model's tokenizer: one random, one that recites.

The random one is for tests that ask thousands of times. The reciting one is for answers that no small model gives by
itself, such as calls of tools: its attention and its MLP add nothing, so that what comes next depends on the last
token alone, and every piece of the text it knows leads to the next. Everything else is as for any other model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import teachllm

_EMBEDDED = Path(teachllm.__file__).parent / "assets" / "teachlm"
_VOCAB_SIZE, _END, _NEWLINE = 4096, 2, 201  # a conversation's prompt ends with a newline
_HIDDEN_SIZE = 32


def random_checkpoint(folder: Path, **generation: Any) -> str:
    """Writes it to `folder`, and returns that.

    Args:
        generation: what it recommends, as in generation_config.json.
    """
    weights = _weights(_VOCAB_SIZE)
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if weight.dim() == 2:
            weight.normal_(generator=generator).mul_(0.5 if name == "lm_head.weight" else 0.2)
    return _write(folder, weights, (), generation)


def reciting_checkpoint(folder: Path, pieces: Sequence[str]) -> str:
    """Writes one that answers every conversation with these pieces of text: each becomes a token, so it must be new."""
    assert len(set(pieces)) == len(pieces) < _HIDDEN_SIZE
    weights = _weights(_VOCAB_SIZE + len(pieces))
    path = [_NEWLINE, *range(_VOCAB_SIZE, _VOCAB_SIZE + len(pieces)), _END]
    for i, (token_id, next_id) in enumerate(pairwise(path)):
        weights["model.embed_tokens.weight"][token_id, i] = 1
        weights["lm_head.weight"][next_id, i] = 10
    return _write(folder, weights, pieces, {})


def _weights(vocab_size: int) -> dict[str, torch.Tensor]:
    """Those of Llama; norms are one, and all else is zero."""
    layer, square = "model.layers.0.", (_HIDDEN_SIZE, _HIDDEN_SIZE)
    shapes: dict[str, tuple[int, ...]] = {
        name: (vocab_size, _HIDDEN_SIZE) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    shapes |= {f"{layer}self_attn.{name}_proj.weight": square for name in "qkvo"}
    shapes |= {f"{layer}mlp.{name}_proj.weight": square for name in ("gate", "up", "down")}
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    norms = (f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight", "model.norm.weight")
    return weights | {name: torch.ones(_HIDDEN_SIZE) for name in norms}


def _write(folder: Path, weights: dict[str, torch.Tensor], pieces: Sequence[str], generation: dict[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _VOCAB_SIZE + len(pieces),
        "hidden_size": _HIDDEN_SIZE,
        "intermediate_size": _HIDDEN_SIZE,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": _HIDDEN_SIZE,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": _END,
        "dtype": "float32",
    }
    tokenizer = json.loads((_EMBEDDED / "tokenizer.json").read_text(encoding="utf-8"))
    for token_id, piece in enumerate(pieces, start=_VOCAB_SIZE):
        assert piece not in tokenizer["model"]["vocab"], f"{piece!r} is a token already"
        token = {"id": token_id, "content": piece, "special": False, "single_word": False, "normalized": False}
        tokenizer["added_tokens"].append(token | {"lstrip": False, "rstrip": False})
    for name, content in (
        ("config.json", config),
        ("generation_config.json", {"eos_token_id": _END} | generation),
        ("tokenizer.json", tokenizer),
    ):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    shutil.copy(_EMBEDDED / "tokenizer_config.json", folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)
