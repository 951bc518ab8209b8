"""Scales move into norms and layers before, and the block computes what it computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, OPTConfig

from teachllm.checkpoint.files import stored_tensors
from teachllm.errors import ModelError
from teachllm.quantization.algorithms import blocks, folding
from teachllm.quantization.algorithms.blocks import DecoderBlock
from teachllm.quantization.algorithms.calibrate import InputStatistics
from teachllm.quantization.algorithms.folding import LayerGroup
from tests.checkpoints import make_checkpoint
from tests.thorough import times

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def first_block(family: str, folder: Path) -> tuple[DecoderBlock, torch.Tensor]:
    """Of a tiny random checkpoint, and what it gets of a text."""
    path = Path(make_checkpoint(family, folder))
    model = blocks.load(path)
    parts = blocks.blocks_of(model, stored_tensors(path))
    rows = torch.randint(500, (3, 20), generator=torch.Generator().manual_seed(0))
    return parts[0], blocks.enter(model, parts, rows)


def groups_of(family: str, folder: Path) -> dict[tuple[str, ...], LayerGroup]:
    block, hidden = first_block(family, folder)
    return {group.names: group for group in folding.groups_of(block, hidden[:1])}


@pytest.mark.parametrize("family", ["llama2", "qwen3", "mistral", "llama_linear"][: times(2, 4)])
def test_norms_and_layers_before_are_found(family: str, tmp_path: Path) -> None:
    found = groups_of(family, tmp_path)
    assert list(found) == [QKV, ("self_attn.o_proj",), GATE_UP, ("mlp.down_proj",)]
    assert found[QKV].source == "input_layernorm"
    assert found["self_attn.o_proj",].source == "self_attn.v_proj"
    assert found[GATE_UP].source == "post_attention_layernorm"
    assert found["mlp.down_proj",].source == "mlp.up_proj"


@pytest.mark.parametrize("family", ["llama2", "qwen3", "mistral", "llama_linear"][: times(2, 4)])
def test_a_folded_block_computes_the_same(family: str, tmp_path: Path) -> None:
    block, hidden = first_block(family, tmp_path)
    before = block.run(hidden)
    for seed, group in enumerate(folding.groups_of(block, hidden[:1])):
        size = folding.source_size(block, group)
        scales = torch.rand(size, generator=torch.Generator().manual_seed(seed)) * 3 + 0.2
        weights = [block.linears()[name].weight.clone() for name in group.names]
        divided = folding.fold(block, group, scales, torch.float32)
        for name, weight in zip(group.names, weights, strict=True):
            assert torch.allclose(block.linears()[name].weight, weight * divided)
    assert torch.allclose(block.run(hidden), before, atol=1e-4 * float(before.abs().max()))


def test_scales_follow_what_a_norm_is_rounded_to(tmp_path: Path) -> None:
    block, hidden = first_block("llama2", tmp_path)
    before, group = block.run(hidden), folding.groups_of(block, hidden[:1])[0]
    divided = folding.fold(block, group, torch.full((64,), 1.2345), torch.bfloat16)
    norm: Any = block.module.get_submodule("input_layernorm")
    assert torch.equal(norm.weight, norm.weight.bfloat16().float())
    assert not torch.allclose(divided, torch.full((64,), 1.2345), atol=1e-4)
    assert torch.allclose(block.run(hidden), before, atol=1e-4 * float(before.abs().max()))


def test_norms_that_add_one_to_their_weights_are_not_folded_into(tmp_path: Path) -> None:
    found = groups_of("gemma2", tmp_path)
    assert found[QKV].source is None and found[GATE_UP].source is None
    assert found["mlp.down_proj",].source == "mlp.up_proj"


def test_blocks_whose_norms_come_behind_have_nothing_to_fold_into(tmp_path: Path) -> None:
    found = groups_of("olmo2", tmp_path)
    assert found[QKV].source is None and found[GATE_UP].source is None


def test_heads_that_share_one_of_v_share_its_scales() -> None:
    group = LayerGroup(("o_proj",), "v_proj", head_size=2)
    of_source = torch.tensor([1.0, 2.0, 3.0, 4.0])  # two heads, each for three of the input
    spread = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 3.0, 4.0, 3.0, 4.0, 3.0, 4.0])
    assert torch.equal(group.spread(of_source, 12), spread)
    assert torch.equal(group.tied(spread, 4), of_source)
    assert torch.equal(group.tied(torch.arange(12.0), 4), torch.tensor([2.0, 3.0, 8.0, 9.0]))


def test_statistics_are_those_of_a_layers_inputs(tmp_path: Path) -> None:
    block, hidden = first_block("llama2", tmp_path)
    name, seen = "mlp.down_proj", []
    handle = block.linears()[name].register_forward_pre_hook(lambda layer, x: seen.append(x[0].flatten(0, -2)))
    block.run(hidden)
    handle.remove()
    x, found = torch.cat(seen), InputStatistics.of(block, name, hidden)
    assert len(x) == 60
    assert torch.allclose(found.hessian, x.t() @ x / 60, atol=1e-5)
    assert torch.allclose(found.mean_abs, x.abs().mean(dim=0), atol=1e-5)
    assert torch.equal(found.max_abs, x.abs().amax(dim=0))
    scales = torch.rand(96) + 0.5
    divided = found.divided_by(scales)
    assert torch.allclose(divided.hessian, (x / scales).t() @ (x / scales) / 60, atol=1e-4)
    assert torch.allclose(divided.max_abs, (x / scales).abs().amax(dim=0))


def test_blocks_get_float32_whatever_lies_before_them(tmp_path: Path) -> None:
    """OPT's small ones widen their embeddings by a layer, and add positions."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 48, "num_attention_heads": 2, "vocab_size": 512}
    config = OPTConfig(**sizes, num_hidden_layers=2, max_position_embeddings=64, dtype="bfloat16")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = blocks.load(tmp_path)
    parts = blocks.blocks_of(model, stored_tensors(tmp_path))
    rows = torch.randint(500, (2, 30), generator=torch.Generator().manual_seed(0))
    hidden = blocks.enter(model, parts, rows)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval().requires_grad_(False)
    expected = whole(rows, output_hidden_states=True).hidden_states
    for block, before in zip(parts, expected, strict=False):
        assert hidden.dtype is torch.float32
        assert torch.allclose(hidden, before, atol=1e-4 * float(before.abs().max()))
        block.to("cpu", torch.float32)
        hidden = block.run(hidden)


@pytest.mark.parametrize("family", ["qwen2_window", "gptneox", "llama2", "gemma2"][: times(2, 4)])
def test_blocks_one_after_the_other_are_the_model(family: str, tmp_path: Path) -> None:
    path = Path(make_checkpoint(family, tmp_path))
    model = blocks.load(path)
    parts = blocks.blocks_of(model, stored_tensors(path))
    rows = torch.randint(500, (2, 30), generator=torch.Generator().manual_seed(0))
    hidden = blocks.enter(model, parts, rows)
    expected = model(rows, output_hidden_states=True).hidden_states
    for block, before in zip(parts, expected, strict=False):
        assert torch.allclose(hidden, before, atol=1e-4 * float(before.abs().max()))
        hidden = block.run(hidden)


def test_a_model_that_is_not_made_of_linear_layers_is_refused_by_the_first_of_its_tensors(tmp_path: Path) -> None:
    path = Path(make_checkpoint("llama2", tmp_path))
    model = blocks.load(path)
    model.model.layers[1].mlp.extra = nn.Conv1d(4, 4, 3)
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.extra.weight belongs to a Conv1d, and only "):
        blocks.blocks_of(model, stored_tensors(path))
    model = blocks.load(path)
    model.model.layers[1].mlp.extra = nn.Linear(4, 4)
    with pytest.raises(ModelError, match=r"its checkpoint has no model.layers.1.mlp.extra.weight"):
        blocks.blocks_of(model, stored_tensors(path))
