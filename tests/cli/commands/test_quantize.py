"""`teachllm quantize`: a folder, a table, and one line for what will not do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from teachllm.bench import quantization_loss
from teachllm.bench.quantization_loss import Compared
from teachllm.checkpoint.files import find_folder
from teachllm.quantization.algorithms.recipe import Recipe
from teachllm_cli.commands.quantize import _show


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path, Recipe]]:
    """What was asked for: nothing is quantized here, or measured."""
    asked: list[tuple[str, Path, Recipe]] = []

    def quantize_model(model: str, out: Path, recipe: Recipe, progress: Any, *_: Any) -> Recipe:
        asked.append((model, out, recipe))
        progress(100, 100)
        return recipe

    def compared(models: Iterable[tuple[str, Path]], documents: Any, **settings: Any) -> list[Compared]:
        return [
            Compared(name, (14 - i) * 10**6, 1.25 + i / 100, 0.0005, 0.001 * i, 0.0001, 1000.0 + i)
            for i, (name, _) in enumerate(models)
        ]

    monkeypatch.setattr("teachllm.quantization.algorithms.quantize.quantize_model", quantize_model)
    monkeypatch.setattr(quantization_loss, "compare", compared)
    return asked


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a table would be refused for is not looked for, and no text is read."""
    monkeypatch.setattr(quantization_loss, "read", lambda text, model: [])
    monkeypatch.setattr("teachllm.quantization.algorithms.quantize.check", lambda model, recipes, **_: list(recipes))


def test_a_method_and_its_settings_become_a_recipe(teachllm, made, tmp_path) -> None:
    settings = ("--bits", "8", "--group-size", "64", "--asymmetric", "--desc-act", "--num-samples", "7")
    result = teachllm("quantize", "--model", "a/b", "--method", "gptq", "--out", str(tmp_path / "q"), *settings)
    assert result.exit_code == 0, result.stderr
    recipe = Recipe("gptq", 8, 64, is_symmetric=False, desc_act=True, num_samples=7)
    assert made == [("a/b", tmp_path / "q", recipe)]
    assert str(tmp_path / "q") in result.stderr.replace("\n", "")


def test_a_command_to_try_it_is_shown_where_it_works(teachllm, made, tmp_path) -> None:
    arguments = ("quantize", "--method", "int8", "--out", str(tmp_path / "q"))
    assert "Try it" not in teachllm(*arguments).stderr  # nothing was written, so nothing runs
    shutil.copytree(find_folder("teachlm"), tmp_path / "q")
    assert f"Try it: teachllm chat --model {tmp_path / 'q'}" in teachllm(*arguments).stderr.replace("\n", "")
    settings = json.loads((tmp_path / "q" / "tokenizer_config.json").read_text())
    (tmp_path / "q" / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": None}))
    assert "Try it: teachllm generate --model" in teachllm(*arguments).stderr.replace("\n", "")


def test_a_table_shows_what_each_method_loses_and_wins(teachllm, made, unchecked, tmp_path) -> None:
    output, plot = tmp_path / "table.json", tmp_path / "plot.html"
    files = ("--output-json", str(output), "--plot", str(plot))
    result = teachllm("quantize", "--compare", "--method", "int8", "--method", "gptq", "--group-size", "64", *files)
    assert result.exit_code == 0, result.stderr
    assert [recipe.name for _, _, recipe in made] == ["int8", "gptq-4bit-g64"]
    assert result.stdout.startswith("teachlm, 4 bits, groups of 64")
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()[2:] if line}
    assert rows["original"] == ["14", "1.2500", "1,000"]
    assert rows["int8"] == ["13", "93%", "1.2600", "+0.80%", "±0.05%", "0.001", "1,001"]
    assert rows["gptq"] == ["12", "86%", "1.2700", "+1.60%", "±0.05%", "0.002", "1,002"]
    found = json.loads(output.read_text())["found"]
    assert [each["name"] for each in found] == ["original", "int8", "gptq-4bit-g64"]
    assert found[1]["perplexity"] == 1.26
    assert (found[1]["kl_divergence"], found[1]["kl_standard_error"]) == (0.001, 0.0001)
    assert "gptq-4bit-g64" in plot.read_text()


def test_of_one_answer_no_standard_error_is_shown(teachllm, made, unchecked, monkeypatch, tmp_path) -> None:
    output = tmp_path / "table.json"
    lines = [Compared(name, 10**6, 1.5, None, 0.001, None, 1000.0) for name in ("original", "int8")]
    monkeypatch.setattr(quantization_loss, "compare", lambda *arguments, **settings: lines)
    result = teachllm("quantize", "--compare", "--method", "int8", "--output-json", str(output))
    assert result.exit_code == 0, result.stderr
    assert "+0.00% " in result.stdout and "±" not in result.stdout
    assert json.loads(output.read_text())["found"][1]["standard_error"] is None


def test_a_table_without_methods_is_of_all(teachllm, made, unchecked, tmp_path) -> None:
    result = teachllm("quantize", "--compare", "--out", str(tmp_path / "kept"))
    assert result.exit_code == 0, result.stderr
    names = [recipe.name for _, _, recipe in made]
    assert [name.split("-")[0] for name in names] == ["int8", "fp8", "rtn", "rtn", "gptq", "awq", "autoround"]
    assert [out for _, out, _ in made] == [tmp_path / "kept" / name for name in names]


def test_a_table_fits_80_columns_whatever_the_model(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = [
        Compared("original", 16_060_000_000, 12.345678, 0, 0, 0, 12_812.3),
        Compared("gptq-4bit-g128-asym-desc-act", 5_745_000_000, 25.123456, 0.12345, 0.123456, 0.1, 10_812.3),
        Compared("int8-smoothquant", 9_085_000_000, 12.4, 0.00012345, 0.0000123456, 0.1, 123_456.7),
    ]
    recipes = [Recipe("gptq", is_symmetric=False, desc_act=True), Recipe("int8", smoothquant=True)]
    _show(found, recipes, "an/8B")
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    assert lines[0] == "an/8B, 4 bits, groups of 128; int8 and fp8 by output"
    assert [line.split() for line in lines[1:5]] == [
        ["GB", "%", "perplexity", "increase", "KL", "tok/s"],
        ["original", "16.06", "12.346", "12,812"],
        ["gptq", "asym", "desc-act", "5.745", "36%", "25.123", "+103.50%", "±12.35%", "0.12", "10,812"],
        ["int8", "smoothquant", "9.085", "57%", "12.400", "+0.44%", "±0.01%", "1.2e-05", "123,457"],
    ]


def test_what_is_measured_is_deleted_before_the_next_is_made(teachllm, made, unchecked, monkeypatch, tmp_path) -> None:
    """Without a folder to keep them in: the one for temporary files is often memory."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = teachllm("quantize", "--compare", "--method", "rtn")
    assert result.exit_code == 0, result.stderr
    first, second = (out.parent for _, out, _ in made)
    assert first != second and first.parent == second.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_table_is_refused_before_the_first_method_runs(teachllm, made, tmp_path) -> None:
    text, used = tmp_path / "text.txt", tmp_path / "kept" / "gptq-4bit-g128"
    text.write_text("")
    result = teachllm("quantize", "--compare", "--text", str(text))
    assert result.exit_code == 1 and "text.txt has nothing to score: it is too short" in result.stderr
    used.mkdir(parents=True)
    (used / "config.json").write_text("{}")
    result = teachllm("quantize", "--compare", "--out", str(tmp_path / "kept"))
    assert result.exit_code == 1 and "gptq-4bit-g128: the folder is not empty" in result.stderr
    result = teachllm("quantize", "--compare", "--calibration", str(tmp_path / "none.txt"))
    assert result.exit_code == 1 and result.stderr.startswith("error: --calibration")
    assert made == []


def test_a_table_is_shown_even_if_its_picture_cannot_be_drawn(teachllm, made, unchecked, monkeypatch, tmp_path) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("teachllm.bench.quantization_loss_plot.write_plot", fail)
    files = ("--plot", str(tmp_path / "a.html"), "--output-json", str(tmp_path / "a.json"))
    result = teachllm("quantize", "--compare", "--method", "int8", *files)
    assert result.exit_code == 1 and "no space left" in result.stderr
    assert "1.2600" in result.stdout and json.loads((tmp_path / "a.json").read_text())["found"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--method: choose one of int8, fp8, rtn"),
        (("--method", "int8", "--method", "fp8"), "--method: choose one of int8"),
        (("--method", "int8"), "--out: give the folder to write"),
        (("--method", "int8", "--out", "x", "--text", "t"), "--text has no effect without --compare"),
        (("--method", "int8", "--out", "x", "--bits", "4"), "--bits has no effect with int8: drop it"),
        (("--method", "rtn", "--out", "x", "--num-iters", "5"), "--num-iters has no effect with rtn: drop it"),
        (("--method", "rtn", "--out", "x", "--device", "banana"), "--device banana: PyTorch finds no such device here"),
        (("--method", "ggml", "--out", "x"), "--method ggml: choose among int8, fp8, rtn, gptq, awq, autoround"),
        (("--compare", "--plot", "/nowhere/plot.html"), "--plot /nowhere/plot.html: there is no folder /nowhere"),
        (("--compare", "--plot", "/"), "--plot /: that is a folder: give a file"),
        (("--compare", "--for-other-engines"), "--for-other-engines has no effect with --compare"),
        (("--compare", "--method", "awq", "--num-iters", "9"), "--num-iters has no effect with awq: drop it"),
    ],
)
def test_what_will_not_do_is_said_in_one_line(arguments: tuple[str, ...], says: str, teachllm, made) -> None:
    result = teachllm("quantize", *arguments)
    assert result.exit_code == 1
    assert says in result.stderr and result.stderr.count("\n") == 1
    assert made == []


def test_a_real_checkpoint_is_written_and_a_folder_in_use_is_left_alone(teachllm, tmp_path) -> None:
    arguments = ("quantize", "--method", "int8", "--device", "cpu", "--out", str(tmp_path / "int8"))
    result = teachllm(*arguments)
    assert result.exit_code == 0, result.stderr
    config = json.loads((tmp_path / "int8" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized"
    again = teachllm(*arguments)
    assert again.exit_code == 1
    assert "the folder is not empty: give another, or empty it" in again.stderr and again.stderr.count("\n") == 1
