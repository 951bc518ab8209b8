"""Drafting heads in the forms in which they are published, with random weights, for checkpoints of the tests.

Norms are random too, and everything that may differ does: what is left out or mixed up shows in the logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.checkpoints import VOCAB_SIZE

Tensors = dict[str, torch.Tensor]
Head = tuple[dict[str, Any], Tensors]
HIDDEN_SIZE = 64
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, WIDTH = 4, 2, 16, 96


class Random:
    """Seeded weights."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator) * gain * shape[-1] ** -0.5

    def norm(self, size: int = HIDDEN_SIZE) -> torch.Tensor:
        return 1.0 + 0.3 * torch.randn(size, generator=self._generator)

    def bias(self, size: int = HIDDEN_SIZE) -> torch.Tensor:
        return 0.3 * torch.randn(size, generator=self._generator)

    def ids(self, num: int) -> torch.Tensor:
        """Different ids of the vocabulary, ascending."""
        return torch.randperm(VOCAB_SIZE, generator=self._generator)[:num].sort().values


def _block(
    random: Random, prefix: str, input_size: int, has_biases: bool = False, has_qk_norm: bool = False
) -> Tensors:
    tensors = {
        "self_attn.q_proj.weight": random.matrix(NUM_HEADS * HEAD_SIZE, input_size),
        "self_attn.k_proj.weight": random.matrix(NUM_KV_HEADS * HEAD_SIZE, input_size),
        "self_attn.v_proj.weight": random.matrix(NUM_KV_HEADS * HEAD_SIZE, input_size),
        "self_attn.o_proj.weight": random.matrix(HIDDEN_SIZE, NUM_HEADS * HEAD_SIZE),
        "mlp.gate_proj.weight": random.matrix(WIDTH, HIDDEN_SIZE),
        "mlp.up_proj.weight": random.matrix(WIDTH, HIDDEN_SIZE),
        "mlp.down_proj.weight": random.matrix(HIDDEN_SIZE, WIDTH),
        "post_attention_layernorm.weight": random.norm(),
    }
    if has_biases:
        tensors |= {
            f"self_attn.{name}_proj.bias": random.bias(len(tensors[f"self_attn.{name}_proj.weight"])) for name in "qkv"
        }
    if has_qk_norm:
        tensors |= {f"self_attn.{name}_norm.weight": random.norm(HEAD_SIZE) for name in "qk"}
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _eagle_config(**more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": WIDTH,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_SIZE,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    } | more


def eagle_1(has_bias: bool = True, has_embedding: bool = True, has_qkv_bias: bool = False, seed: int = 1) -> Head:
    """As the first EAGLE's authors publish it: `layers.0`, `fc`, and the model's embedding again.

    Args:
        has_qkv_bias: it is a head for Qwen2.
    """
    random = Random(seed)
    tensors = _block(random, "layers.0", HIDDEN_SIZE, has_biases=has_qkv_bias)
    tensors["fc.weight"] = random.matrix(HIDDEN_SIZE, 2 * HIDDEN_SIZE)
    if has_bias:
        tensors["fc.bias"] = random.bias()
    if has_embedding:
        tensors["embed_tokens.weight"] = random.matrix(VOCAB_SIZE, HIDDEN_SIZE)
    if has_qkv_bias:
        return _eagle_config(architectures=["Qwen2ForCausalLM"], model_type="qwen2"), tensors
    return _eagle_config(), tensors


def eagle_1_with_a_window() -> Head:
    """Of a layer that looks less far back than texts are long."""
    raw, tensors = eagle_1()
    return raw | {"architectures": ["MistralForCausalLM"], "sliding_window": 9}, tensors


def eagle_3(
    inputs: tuple[int, ...] = (0, 1, 2),
    outputs: tuple[int, ...] = (),
    draft_vocab_size: int = VOCAB_SIZE,
    has_head: bool = True,
    has_embedding: bool = False,
    has_qk_norm: bool = False,
    seed: int = 2,
    **flags: bool,
) -> Head:
    """As EAGLE-3's: `midlayer`, and a vocabulary of its own if `draft_vocab_size` is less than the model's.

    Args:
        inputs: the layers whose inputs it reads, as vLLM counts them; or
        outputs: the layers whose outputs it reads, as SGLang does.
        flags: of config.json, some of which come with norms.
    """
    random = Random(seed)
    num_layers = len(outputs or inputs)
    tensors = _block(random, "midlayer", 2 * HIDDEN_SIZE, has_qk_norm=has_qk_norm)
    tensors |= {f"midlayer.{name}.weight": random.norm() for name in ("input_layernorm", "hidden_norm")}
    tensors |= {"fc.weight": random.matrix(HIDDEN_SIZE, num_layers * HIDDEN_SIZE), "norm.weight": random.norm()}
    if draft_vocab_size < VOCAB_SIZE:
        ids = random.ids(draft_vocab_size)
        is_drafted = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, ids, True)
        tensors |= {"d2t": ids - torch.arange(draft_vocab_size), "t2d": is_drafted}
    if has_head:
        tensors["lm_head.weight"] = random.matrix(draft_vocab_size, HIDDEN_SIZE)
    if has_embedding:
        tensors["embed_tokens.weight"] = random.matrix(VOCAB_SIZE, HIDDEN_SIZE)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = random.norm(num_layers * HIDDEN_SIZE)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": random.norm() for index in range(num_layers)}
    raw = _eagle_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=draft_vocab_size, **flags)
    where = raw.setdefault("eagle_config", {}) if outputs else raw
    where["eagle_aux_hidden_state_layer_ids"] = list(outputs or inputs)
    return raw, tensors


def speculators_eagle_3(inputs: tuple[int, ...] = (0, 1, 2), has_qk_norm: bool = False, **flags: bool) -> Head:
    """The same as the library speculators writes it: the layer's settings apart, and the layer `layers.0`."""
    raw, tensors = eagle_3(inputs, draft_vocab_size=200, has_embedding=True, has_qk_norm=has_qk_norm, **flags)
    own = {"draft_vocab_size", "eagle_aux_hidden_state_layer_ids", *flags}
    layer = {key: value for key, value in raw.items() if key not in own | {"architectures"}}
    layer |= {"model_type": "qwen3" if has_qk_norm else "llama"}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "somebody/else"}},
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
    }
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return config | {key: raw[key] for key in own}, named


def nested_eagle_1() -> Head:
    """As vLLM writes the first EAGLE's: the layer's keys apart."""
    raw, tensors = eagle_1()
    return {
        "model_type": "eagle",
        "architectures": ["EAGLEModel"],
        "truncated_vocab_size": VOCAB_SIZE,
        "model": raw,
    }, tensors


def medusa(
    num_heads: int = 3, num_layers: int = 2, has_bias: bool = True, shares_head: bool = True, shared: str = ""
) -> Head:
    """In vLLM's form.

    Args:
        shares_head: all use one output head: the model's, or
        shared: their own, by this name.
    """
    random, tensors = Random(3), dict[str, torch.Tensor]()
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"blocks.{head}.layers.{layer}.weight"] = random.matrix(HIDDEN_SIZE, HIDDEN_SIZE)
            if has_bias:
                tensors[f"blocks.{head}.layers.{layer}.bias"] = random.bias()
        if not shares_head:
            tensors[f"lm_heads.{head}.weight"] = random.matrix(VOCAB_SIZE, HIDDEN_SIZE)
    if shared:
        tensors[shared] = random.matrix(VOCAB_SIZE, HIDDEN_SIZE)
    raw = {
        "architectures": ["MedusaModel"],
        "hidden_size": HIDDEN_SIZE,
        "vocab_size": VOCAB_SIZE,
        "truncated_vocab_size": None,
        "num_heads": num_heads,
        "num_hidden_layers": num_layers,
        "medusa_fc_bias": has_bias,
        "original_lm_head": shares_head,
    }
    return raw, tensors


def authors_medusa(
    num_heads: int = 3, num_layers: int = 2, prefix: str = "", num_said: int = 2, has_heads: bool = True
) -> Head:
    """In the authors' form: head 0 is `0.0.linear`, `0.1.linear` and so on, and last its output head, if it has one.

    Args:
        num_said: heads that config.json counts.
    """
    random, tensors = Random(4), dict[str, torch.Tensor]()
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{prefix}{head}.{layer}.linear.weight"] = random.matrix(HIDDEN_SIZE, HIDDEN_SIZE)
            tensors[f"{prefix}{head}.{layer}.linear.bias"] = random.bias()
        if has_heads:
            tensors[f"{prefix}{head}.{num_layers}.weight"] = random.matrix(VOCAB_SIZE, HIDDEN_SIZE)
    raw = {"medusa_num_heads": num_said, "medusa_num_layers": num_layers, "base_model_name_or_path": "somebody/else"}
    return raw, tensors


def write(folder: Path, head: Head, file: str = "model.safetensors") -> str:
    """A checkpoint; the file's ending decides the format."""
    raw, tensors = head
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return str(folder)
