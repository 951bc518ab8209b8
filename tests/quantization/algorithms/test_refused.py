"""What will not do is named, with the setting that would, before a weight is read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from teachllm.errors import ModelError
from teachllm.quantization.algorithms import blocks
from teachllm.quantization.algorithms.quantize import check, quantize_model
from teachllm.quantization.algorithms.recipe import Recipe
from tests.checkpoints import make_checkpoint
from tests.quantization.algorithms.conftest import CONVERSATIONS
from tests.thorough import only_thorough, times

SOME: dict[str, Any] = {"num_samples": 4, "seq_len": 64, "calibration": CONVERSATIONS}


def few(method: str) -> dict[str, Any]:
    """As little as a calibrated method takes."""
    return SOME | ({"num_iters": 1} if method == "autoround" else {})


def test_a_folder_with_something_in_it_is_left_alone(short: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"the folder is not empty: give another, or empty it"):
        quantize_model(str(short), tmp_path, Recipe("int8"))
    with pytest.raises(ValueError, match=r"there is a file of that name: give a folder"):
        quantize_model(str(short), tmp_path / "notes.txt", Recipe("int8"))
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_what_is_quantized_already_is_refused(short: Path, tmp_path: Path) -> None:
    quantize_model(str(short), tmp_path / "once", Recipe("int8"))
    with pytest.raises(ModelError, match=r"is quantized already \(compressed-tensors\): give the chec"):
        quantize_model(str(tmp_path / "once"), tmp_path / "twice", Recipe("gptq"))
    assert not (tmp_path / "twice").exists()


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (
            Recipe("gptq", group_size=96),
            r"layers.0.self_attn.q_proj has 256 inputs, which groups of 96",
        ),
        (
            Recipe("awq", group_size=512),
            r"256 inputs, which groups of 512 .*: set --group-size 128",
        ),
        (
            Recipe("gptq", num_samples=10**6),
            r"calibration.jsonl is too short: .* set --num-samples \d+, or",
        ),
        (Recipe("awq", seq_len=1), r"--seq-len 1 is too short: at least 2"),
        (
            Recipe("awq", seq_len=10**6),
            r"is too short: .* set --num-samples 1 and --seq-len \d+, or give a",
        ),
    ][: times(4, 5)],
)
def test_a_setting_that_does_not_fit_is_named_with_its_layer_and_the_fix(
    recipe: Recipe, says: str, short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "load", None)  # it is found before a weight is read
    with pytest.raises(ValueError, match=says):
        quantize_model(str(short), tmp_path / "out", recipe)
    assert not (tmp_path / "out").exists()


def test_what_will_not_do_for_one_recipe_is_found_before_any_weight_is_read(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "load", None)
    check(str(short), [Recipe("rtn"), Recipe("gptq", **SOME)])
    with pytest.raises(ValueError, match="256 inputs, which groups of 96 do not divide"):
        check(str(short), [Recipe("rtn"), Recipe("awq", group_size=96, **SOME)])
    with pytest.raises(ValueError, match=r"none.txt cannot be read"):
        check(str(short), [Recipe("int8"), Recipe("autoround", calibration=Path("none.txt"))])


@pytest.mark.parametrize("family", ["phi3", "qwen3_moe"])
def test_what_the_engine_will_not_run_is_written_for_others_and_not_measured(family: str, tmp_path: Path) -> None:
    folder = Path(make_checkpoint(family, tmp_path / family))
    with pytest.raises(ModelError, match=r"ForCausalLM takes no quantized weights .* nothing to measure"):
        check(str(folder), [Recipe("int8")], for_other_engines=None)
    with pytest.raises(ModelError, match=r"ForCausalLM takes no quantized weights .*: add --for-other-engines"):
        quantize_model(str(folder), tmp_path / "int8", Recipe("int8"))
    assert not (tmp_path / "int8").exists()
    if family == "phi3":
        quantize_model(str(folder), tmp_path / "int8", Recipe("int8"), for_other_engines=True)
        assert (tmp_path / "int8" / "config.json").exists()


@pytest.mark.parametrize(("sizes", "chosen"), [((256, 256), 128), ((576, 1536), 64), ((96, 256), 32), ((48, 80), 16)])
def test_groups_are_the_largest_usual_ones_that_divide_every_layer(sizes: tuple[int, ...], chosen: int) -> None:
    layers = [(f"layer{i}", 64, num_in) for i, num_in in enumerate(sizes)]
    for method in ("rtn", "gptq", "awq", "autoround"):
        assert Recipe(method).fitted(layers).group_size == chosen
        assert Recipe(method, group_size=8).fitted(layers).group_size == 8
    assert Recipe("int8").fitted(layers) == Recipe("int8")


def test_smaller_groups_are_said(tmp_path: Path) -> None:
    folder = make_checkpoint("llama2", tmp_path / "llama2")
    with pytest.warns(UserWarning, match=r"groups of (64|32|16), the largest usual ones that divide"):
        quantize_model(str(folder), tmp_path / "rtn", Recipe("rtn"))


def test_a_folder_that_cannot_be_made_is_named_before_the_work(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "load", None)
    with pytest.raises(ValueError, match="--out /dev/null/x cannot be made"):
        quantize_model(str(short), Path("/dev/null/x"), Recipe("int8"))


def with_tensors(short: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> str:
    """A copy of a checkpoint, some of whose tensors are others."""
    shutil.copytree(short, folder)
    tensors = load_file(short / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_a_tensor_that_the_file_has_not_is_named_without_a_report_of_transformers(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "load", None)
    model = with_tensors(short, tmp_path / "model", lambda all: all.pop("model.layers.1.input_layernorm.weight"))
    with pytest.raises(ModelError, match=r"its checkpoint has no model.layers.1.input_layernorm.weight"):
        quantize_model(model, tmp_path / "out", Recipe("awq"))


@pytest.mark.parametrize("method", ["rtn", "int8", "fp8", "gptq", "awq", "autoround"][: times(1, 6)])
def test_numbers_that_are_not_finite_are_named_with_their_layer(method: str, short: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    model = with_tensors(short, tmp_path / "model", lambda all: all[name].view(-1)[7].fill_(torch.inf))
    some = few(method) if method in ("gptq", "awq", "autoround") else {}
    with pytest.raises(ModelError, match=rf"{name} holds infinities or NaN: download the checkpoint again"):
        quantize_model(model, tmp_path / "out", Recipe(method, **some))
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("method", ["autoround", "gptq", "awq"][: times(1, 3)])
def test_activations_that_overflow_are_named_with_their_layer(method: str, short: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    model = with_tensors(short, tmp_path / "model", lambda all: all[name].fill_(1e38))
    with pytest.raises(
        ModelError, match=r"layers.1.*: activations of the calibration text overflow: give .* --method int8"
    ):
        quantize_model(model, tmp_path / "out", Recipe(method, **few(method)))


@only_thorough
def test_outliers_that_overflow_are_named_with_their_layer(short: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    model = with_tensors(short, tmp_path / "model", lambda all: all[name].fill_(1e38))
    with pytest.raises(ModelError, match=r"layers.[01].*: activations of the calibration text overflow"):
        quantize_model(model, tmp_path / "out", Recipe("int8", smoothquant=True, **SOME))
