"""An engine reads quantized checkpoints, and computes with the dequantized weights."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from teachllm.config import EngineConfig
from teachllm.errors import ModelError
from teachllm.layers.weights.cpu_scaled_weight import CPUScaledWeight
from teachllm.layers.weights.quantized_weight_loader import QuantizedWeightLoader
from teachllm.layers.weights.quantized_weights import Activations
from teachllm.loading.loader import load_model
from teachllm.models.model_config import load_model_config
from teachllm.quantization.formats import rounding
from teachllm.quantization.formats.on_the_fly import OnTheFly
from tests.quantization.format_checkpoints import (
    FORMATS,
    RENAMED,
    Tensors,
    Tokens,
    assert_same,
    edit,
    edit_tensors,
    generate,
    projections,
    write_checkpoint,
    write_dequantized,
)
from tests.thorough import THOROUGH, times


@cache
def of_unquantized(unquantized: Path) -> Tokens:
    """Return what an engine continues the prompts with before anything is quantized."""
    return generate(unquantized)


@pytest.fixture(scope="module")
def of_format(unquantized: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tokens]:
    """Return what an engine continues the prompts with if all weights are quantized in a format, by its name."""

    @cache
    def generated(name: str, **settings: Any) -> Tokens:
        folder = tmp_path_factory.mktemp("format")
        write_checkpoint(name, unquantized, folder)
        return generate(folder, **settings)

    return generated


@pytest.mark.parametrize("settings", [{}, {"load_format": "dummy"}], ids=["read", "dummy"])
def test_at_most_one_layers_quantized_weights_lie_in_memory_as_they_were_read(
    settings: dict[str, Any], unquantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[weakref.ref[QuantizedWeightLoader]] = []
    num_alive: list[int] = []
    make = QuantizedWeightLoader.__init__

    def remember(part: QuantizedWeightLoader, *arguments: Any, **more: Any) -> None:
        make(part, *arguments, **more)
        parts.append(weakref.ref(part))

    quantize = OnTheFly.quantize

    def count(scheme: OnTheFly, weight: torch.Tensor) -> Any:
        num_alive.append(sum(part.is_read for part in (each() for each in parts) if part is not None))
        return quantize(scheme, weight)

    monkeypatch.setattr(QuantizedWeightLoader, "__init__", remember)
    monkeypatch.setattr(OnTheFly, "quantize", count)
    gc.disable()  # nobody can say when that would come
    try:
        config = EngineConfig(model=str(unquantized), quantization="int8", **settings)
        model = load_model(load_model_config(config), config, torch.device("cpu"))
        left = [each() for each in parts if each() is not None]
    finally:
        gc.enable()
    assert max(num_alive) <= 3 and len(parts) > 7  # q, k and v are merged
    assert model is not None and not left


# A format of each family, and of each way to be written.
OF_WEIGHTS_ALONE = [name for name, how in FORMATS.items() if how.activations is Activations.UNQUANTIZED]
WITH_ACTIVATIONS = [name for name, how in FORMATS.items() if how.activations is not Activations.UNQUANTIZED]
SOME_OF_WEIGHTS_ALONE = [
    "gptq in another order",
    "awq",
    "fp8 of weights alone",
    "nvfp4 of ModelOpt",
]


@pytest.mark.parametrize("name", OF_WEIGHTS_ALONE if THOROUGH else SOME_OF_WEIGHTS_ALONE)
def test_an_engine_computes_with_the_dequantized_weights(name: str, unquantized: Path, tmp_path: Path) -> None:
    quantized = write_checkpoint(name, unquantized, tmp_path / "quantized")
    write_dequantized(quantized, unquantized, tmp_path / "dequantized")
    found = generate(tmp_path / "quantized")
    assert_same(found, generate(tmp_path / "dequantized"))
    assert found != of_unquantized(unquantized)


@pytest.mark.parametrize("name", WITH_ACTIVATIONS if THOROUGH else ["fp8 static"])
def test_activations_are_quantized_too_and_little_changes(name: str, unquantized: Path, tmp_path: Path) -> None:
    quantized = write_checkpoint(name, unquantized, tmp_path / "quantized")
    write_dequantized(quantized, unquantized, tmp_path / "dequantized")
    (first, *_), (expected, *_) = generate(tmp_path / "quantized"), generate(tmp_path / "dequantized")
    assert first[1][0] != expected[1][0]
    assert first[1][0] == pytest.approx(expected[1][0], abs=0.5)


@pytest.mark.parametrize("name", RENAMED if THOROUGH else ["fp8 by block, as DeepSeek writes it"])
def test_the_same_quantized_weights_by_other_names_are_the_same_model(name: str, wide: Path, tmp_path: Path) -> None:
    usual, _ = RENAMED[name]
    for each in (name, usual):
        write_checkpoint(each, wide, tmp_path / each)
    assert_same(generate(tmp_path / name), generate(tmp_path / usual))


@pytest.mark.parametrize("name", ["fp8 of ModelOpt", "nvfp4 of ModelOpt"][: times(1, 2)])
def test_the_quantization_config_may_lie_in_a_file_beside(
    name: str, unquantized: Path, of_format: Callable[..., Tokens], tmp_path: Path
) -> None:
    write_checkpoint(name, unquantized, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    config = raw.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    beside = {"quant_algo": config["quant_algo"], "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": beside}))
    assert_same(generate(tmp_path), of_format(name))


@pytest.mark.parametrize("name", ["packed int4", "nvfp4 of ModelOpt"][: times(1, 2)])
def test_scales_of_k_and_v_lie_beside_quantized_weights(name: str, unquantized: Path, tmp_path: Path) -> None:
    scales = {
        f"model.layers.{layer}.self_attn.{which}_proj.{which}_scale": torch.tensor([0.25 + layer])
        for layer in range(3)
        for which in "kv"
    }
    quantized = write_checkpoint(name, unquantized, tmp_path / "quantized")
    write_dequantized(quantized, unquantized, tmp_path / "dequantized")
    measured = generate(tmp_path / "quantized", kv_cache_dtype="fp8")
    for folder in ("quantized", "dequantized"):
        edit_tensors(tmp_path / folder, lambda tensors: tensors.update(scales))
    found = generate(tmp_path / "quantized", kv_cache_dtype="fp8")
    assert_same(found, generate(tmp_path / "dequantized", kv_cache_dtype="fp8"))
    assert found != measured


def test_activations_that_would_share_a_scale_in_a_batch_get_their_own_and_it_is_said(
    unquantized: Path, tmp_path: Path
) -> None:
    write_checkpoint("fp8, activations by batch", unquantized, tmp_path / "batch")
    write_checkpoint("fp8 by tensor", unquantized, tmp_path / "token")
    with pytest.warns(UserWarning, match=r"one scale for .* a whole batch .* lossy"):
        found = generate(tmp_path / "batch")
    assert_same(found, generate(tmp_path / "token"))


PARTS = ["k_proj", "up_proj", "layers.1."]
INCOMPLETE = ["gptq int4", "awq", "fp8 of weights alone", "packed int8 asymmetric"]


@pytest.mark.parametrize(
    ("name", "without"),
    list(product(INCOMPLETE, PARTS)) if THOROUGH else [("gptq int4", "k_proj"), ("awq", "layers.1.")],
)
def test_projections_that_a_checkpoint_leaves_as_they_were_are_read_as_they_are(
    name: str, without: str, unquantized: Path, tmp_path: Path
) -> None:
    quantized = write_checkpoint(name, unquantized, tmp_path / "quantized", without)
    assert any(without in key for key in projections(unquantized)) and not any(without in key for key in quantized)
    write_dequantized(quantized, unquantized, tmp_path / "dequantized")
    assert_same(generate(tmp_path / "quantized"), generate(tmp_path / "dequantized"))


@pytest.mark.parametrize("method", ["int4", "int8", "fp8"][: times(2, 3)])
def test_unquantized_weights_are_quantized_as_they_are_read(method: str, unquantized: Path) -> None:
    exact, found = of_unquantized(unquantized), generate(unquantized, quantization=method)
    assert found != exact
    assert found[0][1][0] == pytest.approx(exact[0][1][0], abs=2.0)


def test_what_is_quantized_already_is_not_quantized_again(unquantized: Path, tmp_path: Path) -> None:
    write_checkpoint("awq", unquantized, tmp_path / "quantized")
    with pytest.raises(ModelError, match=r"quantization='fp8' is for .* quantized with 'awq' already: leave quantizat"):
        generate(tmp_path / "quantized", quantization="fp8")


def test_int4_as_it_is_read_wants_inputs_in_groups(unquantized: Path, tmp_path: Path) -> None:
    shutil.copytree(unquantized, tmp_path / "model")
    raw = json.loads((unquantized / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw | {"intermediate_size": 100}))
    assert generate(tmp_path / "model", load_format="dummy", quantization="int8")
    says = r"down_proj \[64, 100\]: groups of 128 do not divide its 100 inputs: set quantization='int8'"
    with pytest.raises(ModelError, match=says):
        generate(tmp_path / "model", load_format="dummy", quantization="int4")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gptq int4", {}),  # has biases of zeros
        ("packed int4", {"sparsity_config": {"format": "dense"}}),
        ("fp8", {"kv_cache_scheme": "static"}),
    ],
)
def test_what_other_tools_write_beside_it_changes_nothing(
    name: str, changes: dict[str, Any], unquantized: Path, of_format: Callable[..., Tokens], tmp_path: Path
) -> None:
    write_checkpoint(name, unquantized, tmp_path / "other")
    edit(tmp_path / "other", lambda config: config.update(changes))
    bias = {"model.layers.1.mlp.down_proj.bias": torch.zeros(64)}
    edit_tensors(tmp_path / "other", lambda tensors: tensors.update(bias))
    settings = {"kv_cache_dtype": "fp8"} if name == "fp8" else {}
    assert_same(generate(tmp_path / "other", **settings), of_format(name, **settings))


def test_groups_of_compressed_tensors_without_weights_are_passed_over(
    unquantized: Path, of_format: Callable[..., Tokens], tmp_path: Path
) -> None:
    write_checkpoint("fp8", unquantized, tmp_path)
    edit(tmp_path, lambda config: config["config_groups"].update(kv={"targets": ["re:.*attn"], "weights": None}))
    assert_same(generate(tmp_path), of_format("fp8"))


def test_a_head_is_quantized_if_the_file_has_its_scales(
    unquantized: Path, of_format: Callable[..., Tokens], tmp_path: Path
) -> None:
    write_checkpoint("fp8", unquantized, tmp_path)

    def quantize_head(tensors: Tensors) -> None:
        quantized = FORMATS["fp8"].quantize(tensors.pop("lm_head.weight"))
        tensors.update({f"lm_head.{name}": tensor for name, tensor in FORMATS["fp8"].write(quantized).items()})

    edit_tensors(tmp_path, quantize_head)
    edit(tmp_path, lambda config: config.update(ignore=[]))
    found, expected = generate(tmp_path), of_format("fp8")
    assert found != expected
    for (_, logprobs), (_, theirs) in zip(found, expected, strict=True):
        assert logprobs[0] == pytest.approx(theirs[0], abs=0.5)


def test_a_quantized_head_may_be_random(unquantized: Path, tmp_path: Path) -> None:
    write_checkpoint("gptq int4", unquantized, tmp_path)
    edit(tmp_path, lambda config: config.update(lm_head=True))
    assert generate(tmp_path, load_format="dummy")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_sums_of_quantized_values_are_not_too_large_for_float16(dtype: torch.dtype) -> None:
    quantized = rounding.scaled(torch.ones(8, 256), dtype)
    y = CPUScaledWeight(quantized, torch.float16).product(torch.ones(2, 256, dtype=torch.float16), None)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.float(), torch.full((2, 8), 256.0), rtol=0.01, atol=0.0)
