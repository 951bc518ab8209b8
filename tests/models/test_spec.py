"""A family that contradicts itself is refused in one line before a weight is read, and a spec says what is built."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from teachllm import EngineConfig
from teachllm.distributed.ranks import WHOLE
from teachllm.errors import ModelError
from teachllm.layers.checkpoint_tensors import Destination, destination
from teachllm.loading.loader import load_model
from teachllm.models import registry
from teachllm.models.build import describe
from teachllm.models.decoder import added_up
from teachllm.models.families import llama
from teachllm.models.families.llama import LlamaLayer
from teachllm.models.family import Part
from teachllm.models.model_config import load_model_config
from tests.checkpoints import build_config, make_checkpoint

Tensors = Iterator[tuple[str, Destination]]


def config_json(name: str) -> dict[str, Any]:
    """The config.json of a checkpoint of `tests/checkpoints.py`."""
    config = build_config(name)
    architecture = {"qwen3_moe": "Qwen3MoeForCausalLM"}.get(name, f"{config.model_type.capitalize()}ForCausalLM")
    return config.to_dict() | {"architectures": [architecture]}


def test_a_spec_is_what_transformers_model_has() -> None:
    """Names, shapes and numbers of parameters, written down by hand for one checkpoint: see `tests/checkpoints.py`."""
    spec = describe(config_json("qwen3_moe"))
    shapes = {name: weight.shape for name, weight in spec.weights}
    block, hidden = "model.layers.0", 64
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (512, hidden)
    assert shapes[f"{block}.self_attn.q_proj.weight"] == (4 * 32, hidden)
    assert shapes[f"{block}.self_attn.v_proj.weight"] == (2 * 32, hidden)
    assert shapes[f"{block}.self_attn.q_norm.weight"] == (32,)
    assert shapes[f"{block}.mlp.experts.7.down_proj.weight"] == (hidden, 40)
    assert shapes["model.layers.1.mlp.down_proj.weight"] == (hidden, 96)
    experts = [weight for weight in spec.layers[0].weights if ".experts." in weight.name]
    assert len(experts) == 8 * 3 and {weight.share_met for weight in experts} == {Fraction(3, 8)}
    attention = hidden * (4 + 2 + 2) * 32 + 4 * 32 * hidden + 2 * 32
    assert spec.layers[0].num_active_parameters == attention + 2 * hidden + 8 * hidden + 3 * (3 * hidden * 40)
    assert spec.layers[1].num_active_parameters == attention + 2 * hidden + 3 * hidden * 96
    kept = spec.layers[0].kept
    assert (kept.num_kv_heads, kept.head_size, kept.window) == (2, 32, None)
    assert spec.projections[:2] == (f"{block}.self_attn.q_proj", f"{block}.self_attn.k_proj")
    assert spec.projections[-1] == "lm_head" and "model.layers.1.mlp.up_proj" in spec.projections
    assert not any("experts" in name or "layers.0.mlp" in name for name in spec.projections)


def undeclared(layer: LlamaLayer, path: str) -> Tensors:
    yield f"{path}.input_layernorm.weight", destination(layer.input_layernorm.weight.data)


def unbuilt(layer: LlamaLayer, path: str) -> Tensors:
    yield from ORIGINAL(layer, path)
    yield f"{path}.gate.weight", destination(torch.empty(4, device="meta"))


def misshapen(layer: LlamaLayer, path: str) -> Tensors:
    for name, place in ORIGINAL(layer, path):
        shape = (63, 64) if name.endswith("q_proj.weight") else getattr(place, "shape", None)
        yield name, place if shape is None else type(place)(place.target, shape)


def twice(layer: LlamaLayer, path: str) -> Tensors:
    yield from ORIGINAL(layer, path)
    yield f"{path}.input_layernorm.scale", destination(layer.input_layernorm.weight.data)


def one_for_another(layer: LlamaLayer, path: str) -> Tensors:
    for name, place in ORIGINAL(layer, path):
        is_up = name.endswith("up_proj.weight")
        yield name, destination(layer.mlp.gate_up_proj.weight.weight.data[:96]) if is_up else place  # type: ignore[union-attr]


def one_name_for_two(layer: LlamaLayer, path: str) -> Tensors:
    for name, place in ORIGINAL(layer, path):
        yield name.replace("up_proj", "gate_proj"), place


ORIGINAL = LlamaLayer.checkpoint_tensors


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (undeclared, "tensors that fill 0 of the 24576 values of parameter layers.0.self_attn.qkv_proj.weight.weight"),
        (unbuilt, "declares tensor model.layers.0.gate.weight, and its model has no parameter that it fills"),
        (
            misshapen,
            r"declares tensor model.layers.0.self_attn.q_proj.weight with shape \[63, 64\], and it fills \[256, 64\]",
        ),
        (twice, "tensors that fill 128 of the 64 values of parameter layers.0.input_layernorm.weight"),
        (one_for_another, r"fill some values of parameter layers.0.mlp.gate_up_proj.weight.weight twice"),
        (one_name_for_two, "declares tensor model.layers.0.mlp.gate_proj.weight twice"),
    ],
)
def test_tensors_that_contradict_the_module_are_refused(
    tensors: Callable[[LlamaLayer, str], Tensors], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaLayer, "checkpoint_tensors", tensors)
    with pytest.raises(ModelError, match=says):
        describe(config_json("llama3"))


def test_a_list_of_layers_that_does_not_match_their_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(config: Any, part: Part) -> Any:
        layers = [LlamaLayer(config, i, schemes=part.schemes, shard=WHOLE) for i in part.layers[:-1]]
        return llama.CausalLM(config, part, layers, nn.Identity(), nn.Identity)

    monkeypatch.setattr(llama, "FAMILY", llama.Family(llama.parse, build))
    with pytest.raises(ModelError, match=r"the family built 2 layers of 3: range\(0, 3\)"):
        describe(config_json("llama3"))


def test_windows_that_do_not_match_the_number_of_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = llama.parse(config_json("llama3"))
    with pytest.raises(ModelError, match="windows of 2 layers, and num_layers is 3"):
        type(config)(**vars(config) | {"windows": (None, None)})


@pytest.mark.parametrize("architectures", [{"llama_4": "LlamaForCausalLM"}, {"llama": "Llama4ForCausalLM"}], ids=str)
def test_a_family_that_is_registered_twice_is_refused(architectures: dict[str, str]) -> None:
    known = registry.own_architectures()
    with pytest.raises(ValueError, match=r"is registered twice, by teachllm\.models\.families\.llama and by my\.llama"):
        registry.register("my.llama", architectures)
    assert registry.own_architectures() == known


def test_an_architecture_that_no_family_has_is_named_with_those_that_there_are() -> None:
    with pytest.raises(ModelError, match="no code for BloomForCausalLM, only for LlamaForCausalLM, Mistral"):
        registry.family_of("BloomForCausalLM")


def test_a_family_that_contradicts_itself_is_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("llama3", tmp_path)
    monkeypatch.setattr(LlamaLayer, "checkpoint_tensors", undeclared)
    with pytest.raises(ModelError) as error:
        load_model_config(EngineConfig(model=folder))
    assert "\n" not in str(error.value)


def test_layers_that_keep_something_else_than_the_configuration_says_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(config: Any, part: Part) -> Any:
        fewer = replace(config, num_kv_heads=2)
        own = {"schemes": part.schemes, "shard": WHOLE}
        layers = [LlamaLayer(fewer if i == 1 else config, i, **own) for i in part.layers]
        return llama.CausalLM(config, part, layers, nn.Identity(), lambda: llama.RMSNorm(64, eps=1e-6))

    monkeypatch.setattr(llama, "FAMILY", llama.Family(llama.parse, build))
    with pytest.raises(ModelError, match=r"layer 1 keeps .*num_kv_heads=2.*configuration says .*num_kv_heads=1"):
        describe(config_json("llama3"))


def test_to_describe_a_model_takes_no_part_of_pytorch_that_loads_for_a_second(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    script = (
        "import sys\nfrom teachllm import EngineConfig\nfrom teachllm.models.model_config import load_model_config\n"
        f"load_model_config(EngineConfig(model={folder!r}))\nprint('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_what_quantization_saves_is_saved_on_matrices_and_not_on_biases(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2", tmp_path)  # with biases on Q, K and V
    plain, quantized = (
        load_model_config(EngineConfig(model=folder, dtype="bfloat16", quantization=method), "cuda")
        for method in (None, "int8")
    )
    matrices = [
        weight.shape for layer in describe(plain.raw).layers for weight in layer.weights if len(weight.shape) > 1
    ]
    saved = sum(num_out * num_in - 4 * num_out for num_out, num_in in matrices)  # a float32 scale per output
    assert plain.active_bytes - quantized.active_bytes == plain.weight_bytes - quantized.weight_bytes == saved > 0
    assert quantized.num_w8a8_parameters == sum(num_out * num_in for num_out, num_in in matrices)


def test_without_a_checkpoint_norms_are_1_and_biases_0(tmp_path: Path) -> None:
    for name in ("qwen2", "qwen3"):
        config = EngineConfig(model=make_checkpoint(name, tmp_path / name), load_format="dummy")
        model = load_model(load_model_config(config), config, torch.device("cpu"))
        found = {key: each for key, each in model.named_parameters() if "norm" in key or "bias" in key}
        assert len(found) >= 7
        assert all(bool((each == float("norm" in key)).all()) for key, each in found.items())


def test_hidden_states_have_the_models_dtype_whatever_is_added_to_them() -> None:
    residual, parts = torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(3, 2, 4)  # float32, in three parts
    hidden = added_up(parts, residual)
    assert hidden.dtype == torch.bfloat16 and torch.equal(hidden, 4 * residual)
