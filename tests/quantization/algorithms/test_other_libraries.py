"""The formats' own libraries load what is written, and compute the same. Each is skipped where it is not installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from teachllm.quantization.algorithms import write
from teachllm.quantization.algorithms.quantize import quantize_weights
from teachllm.quantization.algorithms.recipe import Recipe
from tests.quantization.algorithms.test_written import SOME, with_quantized
from tests.thorough import only_thorough

IDS = torch.randint(3, 4000, (2, 40), generator=torch.Generator().manual_seed(0))
LIBRARIES = {
    "compressed_tensors": (
        Recipe("int8"),
        Recipe("int8", smoothquant=True, **SOME),
        Recipe("fp8"),
        Recipe("rtn"),
        Recipe("rtn", bits=8, group_size=-1),
    ),
    "gptqmodel": (
        Recipe("gptq", **SOME),
        Recipe("gptq", group_size=32, is_symmetric=False, desc_act=True, **SOME),
        Recipe("gptq", bits=8, group_size=-1, **SOME),
        Recipe("awq", **SOME),
        Recipe("awq", group_size=64, is_symmetric=True, **SOME),
    ),
    "auto_round": (
        Recipe("autoround", num_iters=3, **SOME),
        Recipe("autoround", num_iters=3, is_symmetric=False, **SOME),
        Recipe("autoround", num_iters=3, bits=8, group_size=64, **SOME),
    ),
}
CASES = [(library, recipe) for library, recipes in LIBRARIES.items() for recipe in recipes]


def logits(model: Any) -> torch.Tensor:
    """[2, 40, vocabulary] float32."""
    with torch.no_grad():
        return model(IDS).logits.float()


@only_thorough
@pytest.mark.parametrize(("library", "recipe"), CASES, ids=[recipe.name for _, recipe in CASES])
def test_a_library_computes_with_the_dequantized_weights(
    library: str, recipe: Recipe, short: Path, tmp_path: Path
) -> None:
    pytest.importorskip(library)
    made = quantize_weights(short, recipe)
    write.write_checkpoint(short, tmp_path / "out", recipe, made)
    if recipe.method in ("gptq", "awq"):  # its plain kernels: others round more
        raw = json.loads((tmp_path / "out" / "config.json").read_text())
        raw["quantization_config"]["backend"] = "torch" if recipe.method == "gptq" else "torch_awq"
        (tmp_path / "out" / "config.json").write_text(json.dumps(raw))
    dtype = torch.float16 if recipe.method == "autoround" else torch.float32  # it has no other
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype).eval())
    expected = logits(with_quantized(short, made))
    unquantized = logits(AutoModelForCausalLM.from_pretrained(short, dtype=torch.float32).eval())
    difference, lost = (found - expected).abs().mean(), (unquantized - expected).abs().mean()
    print(f"{recipe.name}: mean |difference| {difference:.2e} of logits; {lost:.2e} lost by quantizing")
    # Some round numbers to float16; and of int8 and fp8, inputs lie between two quantized values now and then.
    assert difference < 0.003 + 0.01 * lost


@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_unpacks_zeros_as_they_were_packed(bits: int) -> None:
    """By itself: transformers with compressed-tensors 0.20 makes room for zeros that are not packed, and refuses."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    recipe = Recipe("rtn", bits=bits, group_size=32, is_symmetric=False)
    quantized = recipe.grid.nearest(torch.randn(48, 64, generator=torch.Generator().manual_seed(0)) + 0.3)
    group = write.quantization_config(recipe, "")["config_groups"]["group_0"]
    scheme = QuantizationScheme(targets=group["targets"], weights=group["weights"])
    found = PackedQuantizationCompressor.decompress(write.pack_layer(recipe, quantized), scheme)["weight"]
    assert torch.allclose(found.float(), quantized.dequantize(torch.float32), atol=2e-3)
