"""The scripts of benchmarks/ and training/, which are no packages, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_script(name: str, folder: str = "benchmarks") -> ModuleType:
    path = Path(__file__).resolve().parents[2] / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look themselves up
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


h200 = load_script("h200")
SMALL_SHAPE = dict(  # of a few kilobytes
    h200.SHAPES["qwen3-0.6b"],
    **{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 8, "vocab_size": 64, "eos_token_id": None},
    **{"intermediate_size": 32, "head_dim": 16, "tie_word_embeddings": True, "dtype": "float32"},
)
