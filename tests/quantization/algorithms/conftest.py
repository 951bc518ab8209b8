"""The embedded model cut down to its first blocks, which is quantized in a second."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from teachllm.models.checkpoint import EMBEDDED_MODEL, find_folder

NUM_BLOCKS = 2


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of teachlm's first blocks, with its tokenizer."""
    folder, whole = tmp_path_factory.mktemp("short") / "model", find_folder(EMBEDDED_MODEL)
    shutil.copytree(whole, folder)
    raw = json.loads((whole / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": NUM_BLOCKS}))
    tensors = load_file(whole / "model.safetensors")
    dropped = tuple(f"model.layers.{index}." for index in range(NUM_BLOCKS, raw["num_hidden_layers"]))
    save_file(
        {name: tensor for name, tensor in tensors.items() if not name.startswith(dropped)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder
