"""A checkpoint on disk: finding its folder, and reading its description without its weights.

A safetensors file begins with its header's length (8 bytes, little-endian) and the header, a JSON object that gives
every tensor's dtype, shape and place in the file. So sizes, shapes and truncation are known before a weight is read.

Source: the safetensors format, https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teachllm.checkpoint.json_values import JsonObject, without_nulls
from teachllm.errors import ModelError

EMBEDDED_MODEL = "teachlm"
EMBEDDED_DRAFTERS = ("teachlm-draft", "teachlm-eagle", "teachlm-medusa")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_MAX_HEADER_BYTES = 100 * 1024 * 1024
_SAFETENSORS, _PICKLE = "model.safetensors", "pytorch_model.bin"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})")
# Names of files beside the model's weights begin so: hidden ones, those of training, an adapter, Mistral's own format.
_NOT_MODELS = (".", "optimizer", "scheduler", "random_states", "adapter_model", "consolidated")
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class StoredTensor:
    """Describe one tensor as a safetensors header does.

    Attributes:
        begin, end: of its bytes in the file.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    begin: int
    end: int

    @property
    def num_elements(self) -> int:
        """Return the product of its sizes."""
        return math.prod(self.shape)

    def is_copy_of(self, other: StoredTensor) -> bool:
        """Return whether both hold the same bytes in the same form."""
        if (self.shape, self.dtype, self.end - self.begin) != (other.shape, other.dtype, other.end - other.begin):
            return False
        with self.file.open("rb") as ours, other.file.open("rb") as theirs:
            ours.seek(self.begin)
            theirs.seek(other.begin)
            sizes = (min(_CHUNK_BYTES, self.end - at) for at in range(self.begin, self.end, _CHUNK_BYTES))
            return all(ours.read(size) == theirs.read(size) for size in sizes)


def find_folder(model: str, revision: str | None = None, load_format: str = "auto", remote_code: bool = False) -> Path:
    """Return the local folder of a model; one of the hub is downloaded once.

    Args:
        model: "teachlm" or a drafter of it, a folder, or a hub id.

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
    """Return the object in a JSON file.

    Raises:
        ModelError: the file is missing or is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}: it is not a checkpoint in Hugging Face format") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def read_json_if_any(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if there is no such file; else as `read_json`."""
    return read_json(path) if path.is_file() else {}


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors in a checkpoint's safetensors files, by name; empty if it has no such file.

    A tensor may lie in two files, as long as both hold the same.

    Raises:
        ModelError: as `safetensors_files`; a file is broken or truncated; or two files hold different tensors of one
            name.
    """
    found = dict[str, StoredTensor]()
    for file in safetensors_files(folder):
        for name, tensor in _read_header(file).items():
            if name in found and not tensor.is_copy_of(found[name]):
                files = f"{found[name].file.name} and {file.name}"
                raise ModelError(
                    f"{folder}: {files} hold different tensors {name}: remove the file that does not belong there"
                )
            found.setdefault(name, tensor)
    return found


def tensors_to_load(folder: Path, load_format: str) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint, by name, as `EngineConfig.load_format` says; with random weights none.

    Raises:
        ModelError: as `stored_tensors`, or as `pickled_tensors`.
    """
    if load_format == "dummy":
        return {}
    if load_format != "pt":
        return stored_tensors(folder)
    from teachllm.checkpoint.pickles import pickled_tensors  # loads torch

    return pickled_tensors(folder)


def wrong_shape(name: str, file: Path, shape: Sequence[int], expected: Sequence[int]) -> str:
    """Return what to say of a tensor that has another shape than expected."""
    return f"{file}: tensor {name} has shape {list(shape)}, config.json means {list(expected)}"


def safetensors_files(folder: Path) -> list[Path]:
    """Return the safetensors files that hold a checkpoint's model, as `weight_files` finds them.

    A single file of any name is the model, unless there is a pickled one: then it may hold anything.
    """
    found = weight_files(folder, _SAFETENSORS, "*.safetensors")
    is_named = any((folder / name).is_file() for name in (_SAFETENSORS, f"{_SAFETENSORS}.index.json"))
    is_pickled = any((folder / name).is_file() for name in (_PICKLE, f"{_PICKLE}.index.json"))
    if is_named or not is_pickled or any(_SHARD.fullmatch(file.stem) for file in found):
        return found
    return []


def pickle_files(folder: Path) -> list[Path]:
    """Return the pickles that hold a checkpoint's model, or heads that were published as such."""
    return weight_files(folder, _PICKLE, "pytorch_model*.bin") or [*folder.glob("medusa_lm_head.pt")]


def weight_files(folder: Path, name: str, pattern: str) -> list[Path]:
    """Return the files that hold a model's weights.

    A file called `name` holds all of them. Otherwise its index lists their files; without an index, all files that
    match the pattern count. A folder may also hold a backup, an optimizer's state, an adapter, or other copies.

    Args:
        name: of the file that holds all weights, for example "model.safetensors".
        pattern: of the files of this kind.

    Raises:
        ModelError: a shard is missing, or nothing says which of several files hold the model.
    """
    if (folder / name).is_file():
        return [folder / name]
    if named := _weight_map(folder, name):
        files = [folder / file for file in sorted(set(named.values()))]
        for file in files:
            if not file.is_file():
                tensor = next(tensor for tensor, where in named.items() if where == file.name)
                raise ModelError(
                    f"{folder} lacks the shard {file.name}, which {name}.index.json names for {tensor}: download it"
                )
        return files
    found = sorted(file for file in folder.glob(pattern) if not file.name.startswith(_NOT_MODELS))
    shards = [shard for file in found if (shard := _SHARD.fullmatch(file.stem))]
    if not shards and len(found) < 2:
        return found
    if len(shards) < len(found) or len({(shard[1], shard[3]) for shard in shards}) > 1:
        names = ", ".join(file.name for file in found)
        raise ModelError(
            f"{folder} has several files with weights ({names}) and no {name}: remove those of other models"
        )
    if len(found) < (total := int(shards[0][3])):
        raise ModelError(f"{folder} has {len(found)} of {total} shards of its weights: download it again")
    return found


def _weight_map(folder: Path, name: str) -> dict[str, str]:
    """Tensor -> file, by the index beside `name`; empty if there is no index."""
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return {}
    values = JsonObject(read_json(index), index.name)
    entries = values.object("weight_map")
    found = {tensor: entries.text(tensor) for tensor in entries}
    if not found:
        raise ModelError(f"{index}: weight_map names no tensor: download it again")
    for tensor, file in found.items():
        if Path(file).name != file:
            raise entries.refusal(tensor, "the name of a file beside it")
    return found


def _stored(file: Path, entry: Mapping[str, Any], begin: int) -> StoredTensor:
    """Return a tensor by its entry in the header of a file, whose tensors begin at a byte."""
    first, end = entry["data_offsets"]
    return StoredTensor(file, tuple(entry["shape"]), entry["dtype"], begin=begin + first, end=begin + end)


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size, _MAX_HEADER_BYTES):
                raise ValueError("the header is cut off")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors = {name: _stored(file, entry, begin=8 + length) for name, entry in header.items()}
    except (struct.error, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} is broken or truncated ({error}): download it again") from None
    for name, tensor in tensors.items():
        if tensor.end > size:
            raise ModelError(
                f"{file} is truncated: tensor {name} ends at byte {tensor.end} of {size}: download it again"
            )
    return tensors


def quantization_config(raw: Mapping[str, Any], folder: Path) -> JsonObject | None:
    """Return a checkpoint's quantization settings, with `quant_method`, without nulls; None: it is not quantized.

    Args:
        raw: its config.json.

    Raises:
        ModelError: it is something else than settings by name.
    """
    values, beside = JsonObject(raw, "config.json"), folder / "hf_quant_config.json"
    for key in ("quantization_config", "compression_config"):
        if found := without_nulls(values.object(key).as_dict()):
            settings = JsonObject(found, f"config.json: {key}")
            settings.text("quant_method", "")
            return settings
    if beside.is_file():
        return JsonObject(without_nulls(read_json(beside)) | {"quant_method": "modelopt"}, beside.name)
    return None
