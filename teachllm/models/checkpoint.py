"""A checkpoint on disk: finding its folder, and reading its description without its weights.

A safetensors file begins with its header's length (8 bytes, little-endian) and the header, a JSON object that gives
every tensor's dtype, shape and place in the file. So sizes, shapes and truncation are known before a weight is read.

Source: the safetensors format, https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teachllm.models.registry import ModelError

EMBEDDED_MODEL = "teachlm"
EMBEDDED_DRAFTERS = ("teachlm-draft", "teachlm-eagle", "teachlm-medusa")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_MAX_HEADER_BYTES = 100 * 1024 * 1024


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a safetensors header describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def find_folder(model: str, revision: str | None = None, load_format: str = "auto", remote_code: bool = False) -> Path:
    """The local folder of `model`: "teachlm" or a drafter of it, a folder, or a hub id, which is downloaded once.

    Raises:
        ModelError: there is no such folder, and the hub does not have it or cannot be reached.
    """
    if model == EMBEDDED_MODEL or model in EMBEDDED_DRAFTERS:
        return Path(__file__).parent.parent / "assets" / model
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelError(f"model={model!r}: there is no such folder")
    patterns = _HUB_PATTERNS + (["*.bin", "*.pt"] if load_format == "pt" else []) + (["*.py"] if remote_code else [])
    if load_format == "dummy":
        patterns.remove("*.safetensors")
    # Imported here: with a local folder nothing needs the network.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:
        raise ModelError(
            f"model={model!r}: not a local folder, and the hub gave {type(error).__name__}: check the name, or when "
            f"offline download it elsewhere and pass the folder"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelError: the file is missing or is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}: it is not a checkpoint in Hugging Face format") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors in a folder's safetensors files, by name; empty if it has no such file.

    Raises:
        ModelError: a shard that the index names is missing, or a file is broken or truncated.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = [folder / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
        for file in files:
            if not file.exists():
                raise ModelError(f"{folder} lacks the shard {file.name}, which {index.name} names: download it again")
    else:
        files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in _read_header(file).items()}


def _read_header(file: Path) -> dict[str, StoredTensor]:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size, _MAX_HEADER_BYTES):
                raise ValueError("the header is cut off")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors = {name: StoredTensor(file, tuple(d["shape"]), d["dtype"]) for name, d in header.items()}
        ends = {name: 8 + length + d["data_offsets"][1] for name, d in header.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} is broken or truncated ({error}): download it again") from None
    for name, end in ends.items():
        if end > size:
            raise ModelError(f"{file} is truncated: tensor {name} ends at byte {end} of {size}: download it again")
    return tensors


def quantization_config(raw: Mapping[str, Any], folder: Path) -> dict[str, Any] | None:
    """Return a checkpoint's quantization settings, with `quant_method`; None: it is not quantized.

    Args:
        raw: its config.json.

    Raises:
        ModelError: it is something else than settings by name.
    """
    found = raw.get("quantization_config") or raw.get("compression_config")
    beside = folder / "hf_quant_config.json"
    if not found and beside.exists():
        found = read_json(beside) | {"quant_method": "modelopt"}
    if not found:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("quant_method", ""), str):
        raise ModelError(f"{folder}: quantization_config in config.json is not settings by name: get it anew")
    return dict(found)
