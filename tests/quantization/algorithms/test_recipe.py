"""Settings that contradict each other are refused in one line that says the fix; a table takes those that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from teachllm.quantization.algorithms.recipe import EIGHT_BIT, METHODS, Recipe, several


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"method": "int3"}, "--method int3: choose among int8, fp8, rtn, gptq, awq, autoround"),
        ({"method": "gptq", "bits": 3}, "--bits 3: gptq has 4 or 8: choose one"),
        ({"method": "awq", "bits": 8}, "--bits 8: awq has only 4: drop it"),
        ({"method": "int8", "bits": 8}, "--bits has no effect with int8: drop it"),
        ({"method": "gptq", "group_size": 0}, "--group-size 0: must be positive, or -1 for all inputs of an output"),
        ({"method": "fp8", "group_size": 64}, "--group-size has no effect with fp8"),
        ({"method": "int8", "is_symmetric": False}, "--asymmetric has no effect with int8: drop it"),
        ({"method": "awq", "desc_act": True}, "--desc-act has no effect with awq: drop it"),
        ({"method": "fp8", "smoothquant": True}, "--smoothquant has no effect with fp8: drop it"),
        ({"method": "rtn", "calibration": Path("a.txt")}, "--calibration has no effect with rtn"),
        ({"method": "int8", "calibration": Path("a.txt")}, "--calibration has no effect with int8"),
        ({"method": "rtn", "num_samples": 3}, "--num-samples has no effect with rtn: drop it"),
        ({"method": "int8", "seq_len": 9}, "--seq-len has no effect with int8: drop it"),
        ({"method": "awq", "num_iters": 5}, "--num-iters has no effect with awq: drop it"),
        ({"method": "gptq", "num_samples": 0}, "--num-samples 0: must be at least 1"),
        ({"method": "autoround", "num_iters": 0}, "--num-iters 0: must be at least 1"),
        (
            {"method": "autoround", "bits": 8, "is_symmetric": False},
            "--bits 8: autoround --asymmetric has only 4: drop it",
        ),
    ],
)
def test_settings_that_a_method_does_not_have_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Recipe(**settings)


@pytest.mark.parametrize(
    ("recipe", "shape", "says"),
    [
        (Recipe("gptq"), (64, 96), "a.b has 96 inputs, which groups of 128 do not divide: set --group-size 32"),
        (Recipe("rtn"), (64, 100), "a.b has 100 inputs, which groups of 128 do not divide: set --group-size -1"),
        (
            Recipe("gptq", group_size=-1),
            (64, 100),
            r"a.b \[64, 100\]: GPTQ packs 8 .*: use --method int8 or fp8",
        ),
        (Recipe("awq"), (20, 128), r"a.b \[20, 128\]: AWQ packs 8 .*: use --method int8"),
        (Recipe("autoround", is_symmetric=False), (20, 128), r"a.b \[20, 128\]: AWQ packs 8 .*: use --method int8"),
    ],
)
def test_a_layer_that_a_format_cannot_hold_is_named(recipe: Recipe, shape: tuple[int, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        recipe.check_layer("a.b", *shape)
    Recipe("int8").check_layer("a.b", *shape)


def test_each_method_of_a_table_takes_the_settings_that_it_has() -> None:
    found = several(METHODS, {"bits": 4, "group_size": 64, "num_iters": 7, "desc_act": True})
    assert [recipe.name for recipe in found] == [
        *("int8", "fp8", "rtn-4bit-g64", "rtn-4bit-g64-asym"),
        *("gptq-4bit-g64-desc-act", "awq-4bit-g64", "autoround-4bit-g64"),
    ]
    assert found[-1].num_iters == 7


@pytest.mark.parametrize("smoothquant", [False, True])
def test_a_text_is_for_those_of_a_table_that_look_at_one(smoothquant: bool) -> None:
    given = {"calibration": Path("a.txt"), "num_samples": 5, "seq_len": 9, "smoothquant": smoothquant}
    looking = {"gptq", "awq", "autoround"} | ({"int8"} if smoothquant else set())
    for recipe in several(None, given):
        is_given = (recipe.calibration, recipe.num_samples, recipe.seq_len) == (Path("a.txt"), 5, 9)
        assert is_given == recipe.needs_text == (recipe.method in looking)


@pytest.mark.parametrize("is_symmetric", [None, True, False])
def test_a_table_of_so_many_bits_is_of_the_methods_that_have_them(is_symmetric: bool | None) -> None:
    found = several(None, {"bits": 8, "is_symmetric": is_symmetric})
    expected = {"int8", "fp8", "rtn", "gptq"} | ({"autoround"} if is_symmetric is not False else set())
    assert {recipe.method for recipe in found} == expected
    assert all(recipe.grid.bits == 8 for recipe in found if recipe.method not in EIGHT_BIT)


@pytest.mark.parametrize(
    ("methods", "settings", "says"),
    [
        (["int8", "fp8"], {"group_size": 32}, "--group-size has no effect with int8, fp8: drop it"),
        (["rtn", "awq"], {"num_iters": 5}, "--num-iters has no effect with rtn, awq: drop it"),
        (["awq"], {"bits": 8}, "--bits 8: awq has only 4: drop it"),
        (None, {"bits": 3}, "--bits 3: rtn has 4 or 8: choose one"),
        (["int8"], {"num_samples": 5}, "--num-samples has no effect with int8: drop it"),
        (["int8", "fp8"], {"bits": 8}, "--bits has no effect with int8, fp8: drop it"),
        (["awq", "none"], {}, "--method none: choose among"),
    ],
)
def test_a_setting_that_none_of_a_table_has_is_refused(
    methods: list[str] | None, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        several(methods, settings)
