"""Writing a quantized checkpoint: config.json, safetensors, and the tokenizer and settings beside the original.

Tensors that are not quantized are copied as they are, one at a time. config.json comes last: a folder that has one is
whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from teachllm import __version__
from teachllm.checkpoint.files import read_json, stored_tensors
from teachllm.layers.weights.quantized_weights import Quantized, ScaledWeight
from teachllm.quantization.algorithms.blocks import STORED_DTYPES, renamed
from teachllm.quantization.algorithms.recipe import EIGHT_BIT, Recipe
from teachllm.quantization.formats import awq, compressed_tensors, gptq

MAX_SHARD_BYTES = 4 << 30
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_NOT_COPIED = ("config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json")


@dataclass
class Made:
    """Describe what became of a model.

    Attributes:
        blocks: the name of the list of its blocks, "model.layers".
        weights: quantized weights of linear layers, by their whole names.
        changed: other tensors that are not what they were, float32; they are rounded to their dtype in the file.
    """

    blocks: str
    weights: dict[str, Quantized] = field(default_factory=dict)
    changed: dict[str, torch.Tensor] = field(default_factory=dict)


def check_empty(out: Path) -> None:
    """Raise ValueError if the folder has something in it, or is no folder."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: there is a file of that name: give a folder")
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"--out {out}: the folder is not empty: give another, or empty it")


def make_folder(out: Path) -> None:
    """Make a folder; raise ValueError if that fails."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be made ({error.strerror}): give another folder") from None


def write_checkpoint(
    source: Path, out: Path, recipe: Recipe, made: Made, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write a folder that transformers can load, and the engine.

    Args:
        source: the checkpoint that was quantized.
    """
    out.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size, total = 0, 0
    weight_map: dict[str, int] = {}
    pending: list[Path] = []

    def flush() -> None:
        nonlocal size
        from safetensors.torch import save_file

        path = out / f"shard-{len(pending)}"
        save_file(shards[-1], path, metadata={"format": "pt"})
        pending.append(path)
        shards[-1] = {}
        size = 0

    for name, tensor in _tensors(source, recipe, made.weights, made.changed):
        if size and size + tensor.nbytes > max_shard_bytes:
            flush()
        shards[-1][name] = tensor.clone(memory_format=torch.contiguous_format)  # some layers share theirs
        weight_map[name] = len(pending)
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    names = [f"model-{i + 1:05}-of-{len(pending):05}.safetensors" for i in range(len(pending))]
    if len(pending) == 1:
        names = ["model.safetensors"]
    else:
        index = {"metadata": {"total_size": total}, "weight_map": {name: names[i] for name, i in weight_map.items()}}
        _write_json(out / "model.safetensors.index.json", index)
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.name not in _NOT_COPIED:
                shutil.copyfile(file, out / file.name)
    raw = read_json(source / "config.json")
    _write_json(out / ".config.json", raw | {"quantization_config": quantization_config(recipe, made.blocks)})
    for path, name in zip(pending, names, strict=True):
        shutil.copymode(out / ".config.json", path)  # safetensors lets no other user read what it writes
        path.rename(out / name)
    (out / ".config.json").rename(out / "config.json")


def pack_layer(recipe: Recipe, quantized: Quantized) -> dict[str, torch.Tensor]:
    """Return the tensors of a linear layer, by the last part of their names."""
    if isinstance(quantized, ScaledWeight):
        return compressed_tensors.write_scaled(quantized)
    if recipe.method == "rtn":
        return compressed_tensors.write(quantized)
    if recipe.method == "awq" or (recipe.method == "autoround" and not recipe.grid.is_symmetric):
        return awq.write(quantized)
    tensors = gptq.write(quantized, is_version_2=_is_gptq_v2(recipe))
    if recipe.method == "autoround":
        del tensors["g_idx"]
    return tensors


def quantization_config(recipe: Recipe, blocks: str) -> dict[str, Any]:
    """Return what config.json describes of a checkpoint, for all its readers.

    Args:
        blocks: the name of the list of blocks, "model.layers".
    """
    method = recipe.method
    if method in EIGHT_BIT or method == "rtn":
        return _of_compressed_tensors(recipe)
    grid = recipe.grid
    usual = {"bits": grid.bits, "group_size": grid.group_size}
    if method == "gptq":
        return {
            "quant_method": "gptq",
            **usual,
            "sym": grid.is_symmetric,
            "desc_act": recipe.desc_act,
            "checkpoint_format": "gptq_v2" if _is_gptq_v2(recipe) else "gptq",
            "pack_dtype": "int32",
            "lm_head": False,
            "meta": {"quantizer": [f"teachllm:{__version__}"]},
        }
    if method == "awq":
        return {
            "quant_method": "awq",
            **usual,
            "zero_point": True,  # also where all zeros are the middle one: they are stored
            "version": "gemm",
            "modules_to_not_convert": None,
        }
    return {
        "quant_method": "auto-round",
        **usual,
        "sym": grid.is_symmetric,
        "data_type": "int",
        "packing_format": "auto_round:auto_gptq" if grid.is_symmetric else "auto_round:auto_awq",
        "block_name_to_quantize": blocks,
        "iters": recipe.num_iters,
    }


def _is_gptq_v2(recipe: Recipe) -> bool:
    """Return whether to write version 2: zeros of version 1 have two readings, unless all are the middle of the
    range; so GPTQModel refuses others."""
    return recipe.method == "gptq" and not recipe.grid.is_symmetric


def _of_compressed_tensors(recipe: Recipe) -> dict[str, Any]:
    usual = {"symmetric": True, "dynamic": False}
    inputs: dict[str, Any] | None = None
    if recipe.method in EIGHT_BIT:
        kind = "int" if recipe.method == "int8" else "float"
        layout = f"{kind}-quantized"
        weights = {"num_bits": 8, "type": kind, "strategy": "channel", **usual}
        inputs = {"num_bits": 8, "type": kind, "strategy": "token", "symmetric": True, "dynamic": True}
    else:
        grid, layout = recipe.grid, "pack-quantized"
        strategy = "channel" if grid.group_size == -1 else "group"
        weights = {"num_bits": grid.bits, "type": "int", "strategy": strategy, **usual, "symmetric": grid.is_symmetric}
        if strategy == "group":
            weights["group_size"] = grid.group_size
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _tensors(
    source: Path, recipe: Recipe, quantized: Mapping[str, Quantized], changed: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the new checkpoint, one after the other."""
    from safetensors import safe_open

    stored = stored_tensors(source)
    rename = renamed(source, stored)
    for file in sorted({tensor.file for tensor in stored.values()}):
        with safe_open(file, framework="pt") as reader:
            for stored_name in reader.keys():  # noqa: SIM118 (the reader is no dictionary)
                if stored[stored_name].file != file:
                    continue
                name = rename(stored_name)
                layer = name.removesuffix(".weight")
                if layer in quantized and name != layer:
                    dtype = reader.get_slice(stored_name).get_dtype()
                    for key, tensor in pack_layer(recipe, quantized[layer]).items():
                        yield f"{layer}.{key}", _scale_as_stored(key, tensor, quantized[layer], dtype)
                    continue
                tensor = reader.get_tensor(stored_name)
                yield name, changed[name].to(tensor.dtype) if name in changed else tensor


def _scale_as_stored(key: str, tensor: torch.Tensor, quantized: Quantized, dtype: str) -> torch.Tensor:
    """Convert scales to the model's dtype, as compressed-tensors has them; 8-bit weights were rounded for these."""
    if key == "weight_scale" and isinstance(quantized, ScaledWeight):
        return tensor.to(STORED_DTYPES[dtype])
    return tensor


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
