"""What is written is what was made: read by the engine's loader, and by the engine."""

from __future__ import annotations

import json
import math
import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from teachllm import LLM
from teachllm.bench import quantization_loss
from teachllm.checkpoint.files import stored_tensors
from teachllm.layers.weights.quantized_weight_loader import QuantizedWeightLoader
from teachllm.layers.weights.quantized_weights import GroupedWeight, ScaledWeight
from teachllm.quantization.algorithms import folding, methods, write
from teachllm.quantization.algorithms.grid import Grid
from teachllm.quantization.algorithms.quantize import quantize_model, quantize_weights
from teachllm.quantization.algorithms.recipe import EIGHT_BIT, Recipe
from teachllm.quantization.algorithms.texts import calibration_rows
from teachllm.quantization.algorithms.write import Made
from teachllm.quantization.formats.gptq import Gptq
from teachllm.quantization.formats.layer_schemes import config_of, of_config
from teachllm_kernels.quantize_rows import quantize_rows
from tests.checkpoints import make_checkpoint
from tests.quantization.algorithms.conftest import CONVERSATIONS, MLP_WIDTH
from tests.thorough import THOROUGH, only_thorough, times

SOME: dict[str, Any] = {"num_samples": times(2, 4), "seq_len": times(32, 64), "calibration": CONVERSATIONS}
RECIPES = [
    Recipe("int8", smoothquant=True, **SOME),
    Recipe("fp8"),
    Recipe("gptq", group_size=32, is_symmetric=False, desc_act=True, **SOME),
    Recipe("autoround", num_iters=3, is_symmetric=False, group_size=32, **SOME),
]
MORE_RECIPES = [
    Recipe("rtn", bits=8, group_size=-1, is_symmetric=False),
    Recipe("int8"),
    Recipe("rtn", group_size=64),
    Recipe("gptq", **SOME),
    Recipe("gptq", bits=8, group_size=-1, **SOME),
    Recipe("awq", **SOME),
    Recipe("awq", group_size=-1, is_symmetric=True, **SOME),
    Recipe("autoround", num_iters=3, **SOME),
    Recipe("autoround", num_iters=3, bits=8, group_size=64, **SOME),
]
PROJECTIONS = {
    "self_attn": {"q_proj": (512, 256), "k_proj": (256, 256), "v_proj": (256, 256), "o_proj": (256, 512)},
    "mlp": {
        "gate_proj": (MLP_WIDTH, 256),
        "up_proj": (MLP_WIDTH, 256),
        "down_proj": (256, MLP_WIDTH),
    },
}
SHAPES = {
    f"model.layers.{index}.{part}.{name}": shape
    for index in range(2)
    for part, shapes in PROJECTIONS.items()
    for name, shape in shapes.items()
}


@pytest.fixture(scope="module", params=RECIPES + MORE_RECIPES * THOROUGH, ids=lambda recipe: recipe.name)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    return request.param


@pytest.fixture(scope="module")
def made(recipe: Recipe, short: Path) -> Made:
    return quantize_weights(short, recipe)


@pytest.fixture(scope="module")
def written(recipe: Recipe, made: Made, short: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written") / recipe.name
    write.write_checkpoint(short, folder, recipe, made)
    return folder


def read(folder: Path) -> dict[str, Any]:
    """Return the quantized weights of all linear layers, read by the engine's loader."""
    stored = stored_tensors(folder)
    config = config_of(json.loads((folder / "config.json").read_text()), folder)
    assert config is not None
    scheme_of = of_config(config, stored).schemes
    found = {}
    for name, shape in SHAPES.items():
        scheme = scheme_of(name)
        assert scheme is not None
        part = QuantizedWeightLoader(scheme, name, *shape, torch.empty(0))
        for key, slot in part.slots.items():
            if f"{name}.{key}" in stored:
                with safe_open(stored[f"{name}.{key}"].file, framework="pt") as reader:
                    slot.put(reader.get_tensor(f"{name}.{key}"))
        found[name] = part.quantized_weight()
    return found


def test_the_engine_reads_exactly_the_weights_that_were_written(made: Made, written: Path) -> None:
    found = read(written)
    assert found.keys() == made.weights.keys()
    for name, quantized in made.weights.items():
        theirs = found[name]
        assert torch.equal(theirs.qweight.view(torch.uint8), quantized.qweight.view(torch.uint8))
        assert torch.equal(theirs.scales, quantized.scales)
        if isinstance(quantized, GroupedWeight):
            assert theirs.bits == quantized.bits
            assert torch.equal(theirs.with_zeros(), quantized.with_zeros())
            assert (theirs.group_index is None) == (quantized.group_index is None)
            assert quantized.group_index is None or torch.equal(theirs.group_index, quantized.group_index)
        else:
            assert isinstance(theirs, ScaledWeight) and theirs.activations is quantized.activations


def test_dequantized_weights_are_near_the_original(recipe: Recipe, made: Made, short: Path) -> None:
    if made.changed:
        pytest.skip("inputs were scaled, and weights with them")
    weights = AutoModelForCausalLM.from_pretrained(short, dtype=torch.float32)
    for name, quantized in made.weights.items():
        weight = weights.get_submodule(name).weight
        error = (quantized.dequantize(torch.float32) - weight).norm() / weight.norm()
        assert error < (0.04 if recipe.bits == 8 or recipe.method in EIGHT_BIT else 0.4)


def test_what_other_readers_must_know_is_said(recipe: Recipe, written: Path) -> None:
    """The engine itself finds out from the tensors."""
    config = json.loads((written / "config.json").read_text())["quantization_config"]
    if recipe.method in ("gptq", "autoround"):
        assert config["sym"] is recipe.grid.is_symmetric
        assert config["group_size"] == recipe.grid.group_size
        assert config.get("desc_act", False) is recipe.desc_act
    elif recipe.method == "awq":
        assert config["zero_point"] is True and config["version"] == "gemm"
    else:
        assert config["quantization_status"] == "compressed" and config["ignore"] == ["lm_head"]


def test_all_other_tensors_and_files_are_as_they_were(made: Made, written: Path, short: Path) -> None:
    before, after = stored_tensors(short), stored_tensors(written)
    for name, tensor in before.items():
        if name.removesuffix(".weight") in made.weights:
            continue
        assert (after[name].shape, after[name].dtype) == (tensor.shape, tensor.dtype)
        with safe_open(tensor.file, "pt") as old, safe_open(after[name].file, "pt") as new:
            expected = made.changed[name].bfloat16() if name in made.changed else old.get_tensor(name)
            assert torch.equal(new.get_tensor(name), expected)
    raw = json.loads((written / "config.json").read_text())
    del raw["quantization_config"]
    assert raw == json.loads((short / "config.json").read_text())
    assert (written / "tokenizer.json").read_bytes() == (short / "tokenizer.json").read_bytes()


def as_the_engine(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return inputs [..., in] after quantization to 8 bits and back."""
    return quantize_rows(x.flatten(0, -2), dtype).dequantize().view_as(x)


def with_quantized(short: Path, made: Made) -> Any:
    """Return transformers' model with the dequantized weights; where inputs are quantized as well, so are its."""
    model = AutoModelForCausalLM.from_pretrained(short, dtype=torch.float32).eval().requires_grad_(False)
    parameters = dict(model.named_parameters())
    for name, quantized in made.weights.items():
        parameters[f"{name}.weight"].copy_(quantized.dequantize(torch.float32))
        if isinstance(quantized, ScaledWeight):
            model.get_submodule(name).register_forward_pre_hook(
                lambda layer, x, dtype=quantized.qweight.dtype: as_the_engine(x[0], dtype)
            )
    for name, tensor in made.changed.items():
        parameters[name].copy_(tensor.bfloat16())
    return model


def test_the_engine_scores_a_text_as_transformers_does_with_the_dequantized_weights(
    recipe: Recipe, made: Made, written: Path, short: Path
) -> None:
    if not (THOROUGH or recipe.smoothquant):
        pytest.skip("of the usual recipes only one that scales inputs, and weights with them")
    text = quantization_loss.read(CONVERSATIONS, short)[:3]
    few = quantization_loss.Decoding(num_requests=1, prompt_len=4, output_len=2)
    scores, tokens_per_s = quantization_loss.measure(written, text, few, dtype="float32", device="cpu")
    assert tokens_per_s > 0
    expected, model = [], with_quantized(short, made)
    for document in text:
        ids = torch.tensor([document.ids])
        logprobs = model(ids).logits[0, :-1].log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        expected += logprobs[document.first - 1 :].tolist()
    difference = (torch.tensor(scores.logprobs) - torch.tensor(expected)).abs()
    if recipe.method in EIGHT_BIT:  # an input between two quantized values may take either: seldom, yet it shows
        assert difference.mean() < 0.04
    else:
        assert difference.max() < 1e-3
        assert scores.perplexity == pytest.approx(math.exp(-sum(expected) / len(expected)), rel=1e-4)


def test_a_large_checkpoint_is_written_in_shards_that_an_index_names(short: Path, tmp_path: Path) -> None:
    recipe = Recipe("rtn")
    made = quantize_weights(short, recipe)
    write.write_checkpoint(short, tmp_path / "out", recipe, made, max_shard_bytes=1 << 19)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))] and len(files) > 2
    assert set(index["weight_map"].values()) == set(files)
    assert index["weight_map"].keys() == stored_tensors(tmp_path / "out").keys()
    assert read(tmp_path / "out").keys() == made.weights.keys()
    with closing(LLM(str(tmp_path / "out"), device="cpu", max_model_len=16)) as llm:
        assert llm.generate(["A"], use_tqdm=False)


def test_whoever_may_read_the_original_may_read_what_is_written(written: Path) -> None:
    modes = {file.name: file.stat().st_mode & 0o777 for file in written.iterdir()}
    assert set(modes.values()) == {0o666 & ~umask()} and "model.safetensors" in modes and "config.json" in modes


def umask() -> int:
    found = os.umask(0o022)
    os.umask(found)
    return found


def test_each_block_gets_what_the_quantized_blocks_before_it_put_out(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[methods.Task] = []

    def nearest(task: methods.Task) -> methods.QuantizedWeights:
        tasks.append(task)
        return methods.nearest(task)

    monkeypatch.setattr(methods, "method_of", lambda recipe: nearest)
    recipe = Recipe("autoround", **SOME)
    made = quantize_weights(short, recipe)
    tokenizer = AutoTokenizer.from_pretrained(short)
    rows = calibration_rows(recipe.calibration, tokenizer, recipe.num_samples, recipe.seq_len)
    # What a model gives out last went through its last norm, too.
    quantized = with_quantized(short, made)(rows, output_hidden_states=True).hidden_states[:-1]
    unquantized = with_quantized(short, Made("model.layers"))(rows, output_hidden_states=True).hidden_states[:-1]
    assert len(tasks) == len(quantized) == 2
    for task, expected in zip(tasks, quantized, strict=True):
        assert torch.allclose(task.hidden, expected, atol=1e-4)
    assert torch.allclose(tasks[0].wanted, unquantized[1], atol=1e-4)
    assert not torch.allclose(quantized[1], unquantized[1], atol=1e-2)


def test_progress_comes_to_its_end_and_never_goes_back(short: Path) -> None:
    recipes = Recipe("autoround", num_iters=5, **SOME), Recipe("int8"), Recipe("gptq", **SOME)
    for recipe in recipes[: times(1, 3)]:
        seen: list[tuple[int, int]] = []
        quantize_weights(short, recipe, lambda done, total, seen=seen: seen.append((done, total)))
        assert seen == sorted(seen) and seen[-1] == (100, 100) and len(set(seen)) >= 8


def test_weights_are_quantized_from_the_file_whatever_config_json_says(short: Path, tmp_path: Path) -> None:
    shutil.copytree(short, tmp_path / "model")
    tensors = {name: tensor.float() * 1.001 for name, tensor in load_file(short / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    made = quantize_weights(tmp_path / "model", Recipe("rtn", bits=8, group_size=64))
    name = "model.layers.0.mlp.up_proj"
    expected = Grid(8, 64, scale_dtype=torch.float32).nearest(tensors[f"{name}.weight"])
    assert torch.equal(made.weights[name].qweight, expected.qweight)
    assert torch.equal(made.weights[name].scales, expected.scales)


def test_the_list_of_blocks_is_named_as_it_is(tmp_path: Path) -> None:
    folder = Path(make_checkpoint("gptneox", tmp_path))
    made = quantize_weights(folder, Recipe("rtn", group_size=32))
    assert made.blocks == "gpt_neox.layers"
    config = write.quantization_config(Recipe("autoround"), made.blocks)
    assert config["block_name_to_quantize"] == "gpt_neox.layers"


def test_only_gptq_with_zeros_of_its_own_is_version_2(short: Path) -> None:
    quantized = Grid(4, 32, is_symmetric=False).nearest(torch.randn(64, 64))
    for is_symmetric, version in ((True, "gptq"), (False, "gptq_v2")):
        recipe = Recipe("gptq", group_size=32, is_symmetric=is_symmetric)
        assert write.quantization_config(recipe, "")["checkpoint_format"] == version
        scheme = Gptq(4, 32, is_symmetric, stored_offset=1 if is_symmetric else 0)
        found = scheme.read(write.pack_layer(recipe, quantized), 64, 64)
        assert torch.equal(found.with_zeros(), quantized.with_zeros())


@only_thorough
def test_only_methods_that_scale_inputs_try_out_who_can_divide_them(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a copy of each block."""
    tried: list[str] = []
    monkeypatch.setattr(folding, "_keeps_output", lambda block, group, hidden: bool(tried.append(block.name)))
    quantize_weights(short, Recipe("gptq", **SOME))
    assert not tried
    quantize_weights(short, Recipe("awq", **SOME))
    assert set(tried) == {"model.layers.0", "model.layers.1"}


@pytest.mark.parametrize("how", ["without a prefix", "under the head's name"])
def test_what_other_names_hold_is_quantized_as_under_the_usual_ones(how: str, tmp_path: Path) -> None:
    folder = Path(make_checkpoint("qwen3", tmp_path / "model"))
    quantize_model(str(folder), tmp_path / "usual", Recipe("int8"))
    weights = load_file(folder / "model.safetensors")
    if how == "without a prefix":
        weights = {name.removeprefix("model."): weight for name, weight in weights.items()}
    else:
        weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    quantize_model(str(folder), tmp_path / "other", Recipe("int8"))
    usual, other = (load_file(tmp_path / name / "model.safetensors") for name in ("usual", "other"))
    assert usual.keys() == other.keys() and all(torch.equal(usual[name], other[name]) for name in usual)
