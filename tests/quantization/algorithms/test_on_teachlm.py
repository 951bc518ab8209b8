"""What quantizing costs the embedded model, on a part of the held-out text: the bounds that are promised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest

from teachllm.bench import quantization_loss
from teachllm.bench.quantization_loss import Decoding, Scores, divergences
from teachllm.checkpoint.files import EMBEDDED_MODEL, find_folder
from teachllm.quantization.algorithms.quantize import quantize_model
from teachllm.quantization.algorithms.recipe import Recipe
from tests.thorough import only_thorough

EVERY = 4  # documents
FEW = {"num_samples": 32, "seq_len": 256}

pytestmark = only_thorough
Measure = Callable[[Recipe | None], Scores]


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """Of the embedded model; or of what a recipe makes of it, measured once."""
    original, folder = find_folder(EMBEDDED_MODEL), tmp_path_factory.mktemp("quantized")
    text = quantization_loss.read(None, original)[::EVERY]
    found: dict[Recipe | None, Scores] = {}

    def measure(recipe: Recipe | None) -> Scores:
        if recipe not in found:
            path: Path = original if recipe is None else folder / recipe.name
            if recipe is not None:
                quantize_model(EMBEDDED_MODEL, path, recipe)
            found[recipe], _ = quantization_loss.measure(path, text, Decoding(1, 4, 2), dtype="float32", device="cpu")
        return found[recipe]

    return measure


def divergence(scores: Measure, recipe: Recipe) -> float:
    """KL, mean of tokens."""
    return mean(divergences(scores(None), scores(recipe)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "increase"),
    [
        (Recipe("int8"), 0.005),
        (Recipe("fp8"), 0.01),
        (Recipe("rtn", group_size=64), 0.05),
        (Recipe("gptq", group_size=64, **FEW), 0.05),
        (Recipe("awq", group_size=64, is_symmetric=True, **FEW), 0.05),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_perplexity_increases_by_no_more_than_is_said(recipe: Recipe, increase: float, scores: Measure) -> None:
    before, after = scores(None), scores(recipe)
    assert after.perplexity / before.perplexity - 1 <= increase
    assert after.logprobs != before.logprobs


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_calibrated_weights_stay_closer_to_the_original_than_round_to_nearest(method: str, scores: Measure) -> None:
    nearest = Recipe("rtn", group_size=64)
    calibrated = Recipe(method, group_size=64, is_symmetric=None if method == "gptq" else True, **FEW)
    assert divergence(scores, calibrated) < divergence(scores, nearest)


@pytest.mark.slow
def test_eight_bits_stay_closer_than_four(scores: Measure) -> None:
    for recipe in (Recipe("int8"), Recipe("fp8")):
        assert divergence(scores, recipe) < divergence(scores, Recipe("rtn", group_size=64))
