"""Engines with drafters that are loaded, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from teachllm import EngineConfig
from teachllm.engine.llm_engine import Engine
from teachllm.errors import ModelError
from tests.spec_decode.heads import forms
from tests.worker.engines import tiny

_SPECULATION = ("load_format", "num_speculative_tokens", "speculative_token_tree")


def edited(head: forms.Head, tensors: dict[str, torch.Tensor | None] | None = None, **raw: Any) -> forms.Head:
    """The head with other settings and tensors; `...` and None take one out."""
    config = {key: value for key, value in (head[0] | raw).items() if value is not ...}
    return config, {key: value for key, value in (head[1] | (tensors or {})).items() if value is not None}


def make(method: str, model: Path | str, family: str = "llama2", **changes: Any) -> Engine:
    speculation = {key: changes.pop(key) for key in _SPECULATION if key in changes}
    given: Any = {"method": method, "model": str(model), "num_speculative_tokens": 3, "adaptive": False} | speculation
    return Engine(EngineConfig(**tiny(family, **changes), speculative_config=given))


def refusal(method: str, model: Path | str, family: str = "llama2", **changes: Any) -> str:
    with pytest.raises(ModelError) as error:
        make(method, model, family, **changes)
    message = str(error.value)
    assert "\n" not in message
    return message


def short(value: Any) -> str:
    """A parameter's name; one of a function is not the same in every process."""
    return "" if callable(value) else str(value)[:40]
