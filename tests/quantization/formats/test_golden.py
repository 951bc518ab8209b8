"""What other libraries packed is read to the bit: their own dequantized weights come out (see golden/README.md)."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from teachllm.errors import ModelError
from teachllm.layers.weights.quantized_weight_loader import QuantizedWeightLoader
from teachllm.layers.weights.quantized_weights import Activations, ScaledWeight
from teachllm.quantization.formats.layer_schemes import quantization_of
from teachllm.quantization.formats.scaled import Scaled
from tests.quantization.format_checkpoints import quantization

GOLDEN = Path(__file__).parent / "golden"
PROJECTION = "model.layers.0.mlp.up_proj"


@cache
def load(case: str) -> tuple[dict[str, torch.Tensor], dict[str, Any], torch.Tensor]:
    """(tensors as in a checkpoint, what config.json says, what the library made of them)."""
    with safe_open(GOLDEN / f"{case}.safetensors", framework="pt") as reader:
        tensors = {name.removeprefix(f"{case}."): reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
        about = reader.metadata()
    return tensors, json.loads(about["quantization_config"]), tensors.pop("dequantized")


def names_of(tensors: dict[str, torch.Tensor]) -> frozenset[str]:
    return frozenset(f"{PROJECTION}.{name}" for name in tensors)


CASES = sorted(path.stem for path in GOLDEN.glob("*.safetensors"))
REFUSED = {"ct_w8a8_int8_tensor_static": "activations that are not symmetric"}


@pytest.mark.parametrize("case", [case for case in CASES if case not in REFUSED])
def test_a_golden_file_dequantizes_to_the_weights_of_its_library(case: str) -> None:
    stored, config, expected = load(case)
    tensors = dict(stored)
    scheme = quantization(config, names_of(stored)).schemes(PROJECTION)
    assert scheme is not None
    part = QuantizedWeightLoader(scheme, case, *expected.shape, torch.empty(0))
    for name, slot in part.slots.items():
        if name in tensors:
            slot.put(tensors.pop(name))
        else:
            assert slot.stored.is_optional, name
    assert tensors.keys() <= {"bias"}
    quantized = part.quantized_weight()
    if case == "modelopt_fp8_tensor":  # where the library rounds the scale, too, engines do not
        assert isinstance(quantized, ScaledWeight)
        quantized = replace(quantized, scales=quantized.scales.bfloat16().float())
    assert torch.equal(quantized.dequantize(expected.dtype), expected)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("modelopt")])
def test_hf_quant_config_json_says_what_config_json_does(case: str, tmp_path: Path) -> None:
    tensors, config, _ = load(case)
    with safe_open(GOLDEN / f"{case}.safetensors", framework="pt") as reader:
        (tmp_path / "hf_quant_config.json").write_text(reader.metadata()["hf_quant_config"])
    for names in (names_of(tensors), None):
        found, expected = quantization_of({}, tmp_path, None, names), quantization(config, names)
        assert found is not None and found.name == expected.name == "modelopt"
        for name in (PROJECTION, "lm_head"):
            assert found.schemes(name) == expected.schemes(name)


def test_a_fault_of_hf_quant_config_json_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": 8}}')
    with pytest.raises(ModelError, match=r"^hf_quant_config.json: quantization: quant_algo=8: must be a string"):
        quantization_of({}, tmp_path, None, None)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_named(case: str) -> None:
    _, config, _ = load(case)
    with pytest.raises(ModelError, match=REFUSED[case]):
        quantization(config, None)


def test_activations_without_a_quantized_product_stay_unquantized() -> None:
    stored, config, _ = load("ct_mxfp8a16")
    as_it_is = quantization(config, names_of(stored)).schemes(PROJECTION)
    for group in config["config_groups"].values():
        group["input_activations"] = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
    scheme = quantization(config, names_of(stored)).schemes(PROJECTION)
    assert isinstance(scheme, Scaled) and scheme == as_it_is and scheme.activations is Activations.UNQUANTIZED
