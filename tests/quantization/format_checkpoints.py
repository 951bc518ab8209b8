"""Checkpoints in every format, written from a tiny unquantized one, and what an engine makes of them.

The writers are this project's own. What it reads and does not write (4-bit floats, fp8 by other names) is written here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from teachllm import LLM, SamplingParams
from teachllm.layers.weights.quantized_weights import Activations, GroupedWeight, Quantized, ScaledWeight
from teachllm.quantization.formats import awq, compressed_tensors, gptq, rounding
from teachllm.quantization.formats.fp4 import Fp4
from teachllm.quantization.formats.layer_schemes import Quantization, config_of, of_config
from tests.thorough import times

E4M3 = torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]
Tokens = list[tuple[list[int], list[float]]]  # of each prompt, and their log-probabilities

PROMPTS = [[7, 300, 21], [500, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [42]]
GREEDY = SamplingParams(temperature=0, max_tokens=times(6, 24), ignore_eos=True, logprobs=0)


@dataclass(frozen=True)
class Format:
    """How a projection's numbers become tensors of a file.

    Attributes:
        config: `quantization_config`.
        quantize: a float weight -> its quantized weight.
        write: a quantized weight -> its tensors.
        activations: what x becomes.
    """

    config: dict[str, Any]
    quantize: Callable[[torch.Tensor], Any]
    write: Callable[[Any], Tensors]
    activations: Activations = Activations.UNQUANTIZED


def quantization(config: Mapping[str, Any], names: Container[str] | None) -> Quantization:
    """Return what a `quantization_config` says of a checkpoint with these tensors."""
    found = config_of({"quantization_config": dict(config)}, Path("/nowhere"))
    assert found is not None
    return of_config(found, names)


def _gptq(bits: int, size: int, symmetric: bool = True, **more: Any) -> Format:
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric, "desc_act": False, **more}
    return Format(config, lambda w: rounding.grouped(w, bits, size, symmetric), gptq.write)


def _gptq_in_another_order() -> Format:
    """Groups of inputs that do not lie beside each other, the same for all projections with as many inputs."""

    def quantize(weight: torch.Tensor) -> Quantized:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
        quantized = rounding.grouped(weight[:, order], 4, 32, False)
        index = torch.empty(len(order), dtype=torch.int32)
        index[order] = torch.arange(len(order), dtype=torch.int32) // 32
        unordered = torch.empty_like(quantized.qweight)
        unordered[:, order] = quantized.qweight
        return type(quantized)(unordered, quantized.scales, quantized.zeros, 4, index)

    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
    return Format(config, quantize, gptq.write)


def _compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_BY_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}


def _scaled(
    dtype: torch.dtype, per: str, activations: Activations = Activations.BY_TOKEN, of_batch: bool = False
) -> Format:
    kind = "int" if dtype is torch.int8 else "float"
    weights: dict[str, Any] = {"num_bits": 8, "type": kind, "strategy": per, "symmetric": True}
    inputs: dict[str, Any] | None = _BY_TOKEN | {"type": kind}
    if per == "block":
        weights["block_structure"] = [128, 128]
        inputs = {"num_bits": 8, "type": kind, "strategy": "group", "group_size": 128, "dynamic": True}
    if activations is Activations.UNQUANTIZED:
        inputs = None
    if of_batch or activations is Activations.STATIC:
        inputs = {"num_bits": 8, "type": kind, "strategy": "tensor", "dynamic": of_batch, "symmetric": True}
    config = _compressed(f"{kind}-quantized", weights, inputs)

    def quantize(weight: torch.Tensor) -> ScaledWeight:
        static = torch.tensor([0.02]) if activations is Activations.STATIC else None
        return replace(rounding.scaled(weight, dtype, per, activations), input_scale=static)

    return Format(config, quantize, compressed_tensors.write_scaled, activations)


def _packed(bits: int, size: int, symmetric: bool) -> Format:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": size, "symmetric": symmetric}
    config = _compressed("pack-quantized", weights)
    return Format(config, lambda w: rounding.grouped(w, bits, size, symmetric, torch.float32), compressed_tensors.write)


_WHOLE = 2.0**-10  # the second scale of NVFP4: to divide by its inverse is exact


def _fp4(kind: str) -> Format:
    """Of compressed-tensors."""

    def quantize(weight: torch.Tensor) -> GroupedWeight:
        quantized = Fp4(kind).quantize(weight)
        if kind == "mxfp4":
            return quantized
        scales = (quantized.scales / _WHOLE).clamp(max=rounding.E4M3_MAX)  # of what is larger, PyTorch 2.11 makes NaN
        return replace(quantized, scales=scales.to(E4M3).float() * _WHOLE)

    def write(quantized: GroupedWeight) -> Tensors:
        tensors = {"weight_packed": quantized.qweight[:, ::2] | quantized.qweight[:, 1::2] << 4}
        if kind == "mxfp4":
            return tensors | {"weight_scale": (quantized.scales.log2() + 127).to(torch.uint8)}
        scales = {
            "weight_scale": (quantized.scales / _WHOLE).to(E4M3),
            "weight_global_scale": torch.tensor([1 / _WHOLE]),
        }
        return tensors | scales

    weights = {"num_bits": 4, "type": "float", "strategy": "group", "symmetric": True}
    return Format(_compressed(f"{kind}-pack-quantized", weights), quantize, write)


def _nvfp4_of_modelopt() -> Format:
    usual = _fp4("nvfp4")

    def write(quantized: GroupedWeight) -> Tensors:
        tensors = usual.write(quantized)
        names = {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"]}
        return names | {"weight_scale_2": torch.tensor(_WHOLE), "input_scale": torch.tensor(0.003)}

    return Format({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, usual.quantize, write)


def _auto_round(packing: str, how: Format) -> Format:
    config = how.config | {"quant_method": "auto-round", "packing_format": packing, "data_type": "int"}

    def write(quantized: GroupedWeight) -> Tensors:
        tensors = gptq.write(quantized, is_version_2=True) if packing == "auto_round" else how.write(quantized)
        return {name: tensor for name, tensor in tensors.items() if name != "g_idx"}

    return Format(config, how.quantize, write)


def _fp8(method: str, how: Format, names: dict[str, str] | None = None, **config: Any) -> Format:
    """A format of fp8 by another name.

    Args:
        names: of tensors, where they differ.
    """

    def write(quantized: ScaledWeight) -> Tensors:
        return {(names or {}).get(name, name): tensor for name, tensor in how.write(quantized).items()}

    return replace(how, config={"quant_method": method, **config}, write=write)


FORMATS: dict[str, Format] = {
    "gptq int4": _gptq(4, 32),
    "gptq int4 asymmetric": _gptq(4, 32, False),
    "gptq int8": _gptq(8, 32),
    "gptq in another order": _gptq_in_another_order(),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        lambda w: rounding.grouped(w, 4, 32, False),
        awq.write,
    ),
    "packed int4": _packed(4, 32, True),
    "packed int8 asymmetric": _packed(8, 32, False),
    "int8": _scaled(torch.int8, "channel"),
    "fp8": _scaled(E4M3, "channel"),
    "fp8 by tensor": _scaled(E4M3, "tensor"),
    "fp8 by block": _scaled(E4M3, "block", Activations.BY_BLOCK),
    "fp8, activations by batch": _scaled(E4M3, "tensor", of_batch=True),
    "fp8 static": _scaled(E4M3, "tensor", Activations.STATIC),
    "fp8 of weights alone": _scaled(E4M3, "channel", Activations.UNQUANTIZED),
    "int8 of weights alone": _scaled(torch.int8, "channel", Activations.UNQUANTIZED),
    "mxfp4": _fp4("mxfp4"),
    "nvfp4": _fp4("nvfp4"),
    "nvfp4 of ModelOpt": _nvfp4_of_modelopt(),
}
FORMATS |= {
    "auto-round": _auto_round("auto_round", FORMATS["gptq int4 asymmetric"]),
    "auto-round, as gptq": _auto_round("auto_round:auto_gptq", FORMATS["gptq int8"]),
    "auto-round, as awq": _auto_round("auto_round:auto_awq", FORMATS["awq"]),
}
# The same tensors as of a format above, by other names.
RENAMED: dict[str, tuple[str, Format]] = {
    "fp8 by block, as DeepSeek writes it": (
        "fp8 by block",
        _fp8("fp8", FORMATS["fp8 by block"], {"weight_scale": "weight_scale_inv"}, weight_block_size=[128, 128]),
    ),
    "fp8 without blocks": ("fp8 by tensor", _fp8("fp8", FORMATS["fp8 by tensor"], activation_scheme="dynamic")),
    "fp8 without blocks, static": (
        "fp8 static",
        _fp8("fp8", FORMATS["fp8 static"], {"input_scale": "activation_scale"}, activation_scheme="static"),
    ),
    "fbgemm": ("fp8", _fp8("fbgemm_fp8", FORMATS["fp8"], activation_scale_ub=1200.0)),
    "fp8 of ModelOpt": ("fp8 static", _fp8("modelopt", FORMATS["fp8 static"], quant_algo="FP8", ignore=["lm_head"])),
}
FORMATS |= {name: how for name, (_, how) in RENAMED.items()}


def projections(folder: Path) -> Tensors:
    """Numbers of all projections of a checkpoint of plain ones, by name, without ".weight"."""
    tensors = load_file(folder / "model.safetensors")
    return {name.removesuffix(".weight"): tensor for name, tensor in tensors.items() if name.endswith("_proj.weight")}


def write_checkpoint(
    name: str, unquantized: Path, folder: Path, without: str = "", others: Mapping[str, Format] | None = None
) -> dict[str, Any]:
    """Write a checkpoint in format `name` from an unquantized one.

    Args:
        without: a part of the names of projections that stay as they are.
        others: formats of other projections, by a part of their names; config.json does not say so.

    Returns:
        The quantized weights of its projections, by name.
    """
    how = FORMATS[name]
    folder.mkdir(parents=True, exist_ok=True)
    for file in unquantized.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    found = {key: value for key, value in projections(unquantized).items() if not without or without not in key}

    def format_of(key: str) -> Format:
        return next((each for part, each in (others or {}).items() if part in key), how)

    quantized = {key: format_of(key).quantize(weight) for key, weight in found.items()}
    tensors = load_file(unquantized / "model.safetensors")
    for key, each in quantized.items():
        del tensors[f"{key}.weight"]
        tensors |= {f"{key}.{part}": tensor.contiguous() for part, tensor in format_of(key).write(each).items()}
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": how.config}))
    return quantized


def write_dequantized(quantized: dict[str, Any], unquantized: Path, folder: Path) -> None:
    """Write a checkpoint of the dequantized weights."""
    shutil.copytree(unquantized, folder)
    tensors = load_file(unquantized / "model.safetensors")
    for key, each in quantized.items():
        tensors[f"{key}.weight"] = each.dequantize(torch.float32)
    save_file(tensors, folder / "model.safetensors")


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The quantization_config of a checkpoint."""
    raw = json.loads((folder / "config.json").read_text())
    change(raw["quantization_config"])
    (folder / "config.json").write_text(json.dumps(raw))


def edit_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Those of a checkpoint's file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def generate(model: Path, **settings: Any) -> Tokens:
    """What an engine continues `PROMPTS` with."""
    llm = LLM(str(model), dtype="float32", device="cpu", skip_tokenizer_init=True, max_model_len=64, **settings)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], GREEDY, use_tqdm=False)
    found = []
    for output in outputs:
        only = output.outputs[0]
        assert only.logprobs is not None
        pairs = zip(only.logprobs, only.token_ids, strict=True)
        found.append((only.token_ids, [entries[token_id].logprob for entries, token_id in pairs]))
    return found


def assert_same(found: Tokens, expected: Tokens) -> None:
    """The same tokens, with nearly the same log-probabilities."""
    for (tokens, logprobs), (wanted, their_logprobs) in zip(found, expected, strict=True):
        assert tokens == wanted
        assert logprobs == pytest.approx(their_logprobs, abs=1e-4)
