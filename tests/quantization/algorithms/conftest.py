"""The embedded model cut down to its first blocks and a third of their MLPs, which is quantized in a second."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from teachllm.checkpoint.files import EMBEDDED_MODEL, find_folder

NUM_BLOCKS, MLP_WIDTH = 2, 256
CONVERSATIONS = Path(__file__).with_name("conversations.jsonl")  # the first of the text that is calibrated on


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a part of teachlm, with its tokenizer."""
    folder, whole = tmp_path_factory.mktemp("short") / "model", find_folder(EMBEDDED_MODEL)
    shutil.copytree(whole, folder)
    raw = json.loads((whole / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(raw | {"num_hidden_layers": NUM_BLOCKS, "intermediate_size": MLP_WIDTH})
    )
    tensors = load_file(whole / "model.safetensors")
    dropped = tuple(f"model.layers.{index}." for index in range(NUM_BLOCKS, raw["num_hidden_layers"]))
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(dropped)}
    for name, tensor in kept.items():
        if ".mlp." in name:
            part = tensor[:, :MLP_WIDTH] if "down_proj" in name else tensor[:MLP_WIDTH]
            kept[name] = part.contiguous()
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
