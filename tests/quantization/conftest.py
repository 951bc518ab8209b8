"""A tiny unquantized checkpoint, which others are quantized from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def unquantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_checkpoint("llama2", tmp_path_factory.mktemp("plain") / "model"))


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With projections that have several blocks of 128 x 128."""
    return Path(make_checkpoint("qwen3", tmp_path_factory.mktemp("wide") / "model"))
