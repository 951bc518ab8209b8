"""A rank reads no more of a checkpoint than it needs: of an unquantized projection its part, of a quantized one all."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from teachllm.checkpoint.files import stored_tensors
from teachllm.config import EngineConfig
from teachllm.distributed.layout import Layout
from teachllm.distributed.ranks import Ranks
from teachllm.loading.loader import load_model
from teachllm.models.model_config import load_model_config
from tests.checkpoints import make_checkpoint
from tests.quantization.format_checkpoints import FORMATS, write_checkpoint
from tests.thorough import THOROUGH

CPU = torch.device("cpu")


@pytest.fixture
def numbers_read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many were read of each tensor."""
    read: dict[str, int] = {}
    open_file = safetensors.safe_open

    class Part:
        def __init__(self, name: str, part: Any) -> None:
            self._name, self._part = name, part

        def get_shape(self) -> list[int]:
            shape: list[int] = self._part.get_shape()
            return shape

        def __getitem__(self, ranges: Any) -> torch.Tensor:
            found: torch.Tensor = self._part[ranges]
            read[self._name] = read.get(self._name, 0) + found.numel()
            return found

    class Reader:
        def __init__(self, *arguments: Any, **more: Any) -> None:
            self._file = open_file(*arguments, **more)

        def __enter__(self) -> Reader:
            self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def keys(self) -> list[str]:
            return list(self._file.keys())

        def get_tensor(self, name: str) -> torch.Tensor:
            found: torch.Tensor = self._file.get_tensor(name)
            read[name] = read.get(name, 0) + found.numel()
            return found

        def get_slice(self, name: str) -> Part:
            return Part(name, self._file.get_slice(name))

    monkeypatch.setattr(safetensors, "safe_open", Reader)
    return read


def load_rank(folder: Path, layout: Layout, rank: int) -> None:
    config = EngineConfig(model=str(folder))
    load_model(load_model_config(config), config, CPU, ranks=Ranks(layout.coords(rank), *[_Named(layout.tensor)] * 2))


class _Named:
    """A group in which nobody says anything: to load takes none."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0


def check(read: dict[str, int], folder: Path, share: Callable[[str], float]) -> None:
    """Args: share: of a tensor, by its name, that is to be read."""
    expected = {name: math.prod(each.shape) * share(name) for name, each in stored_tensors(folder).items()}
    assert read == {name: size for name, size in expected.items() if size}


def is_whole(name: str) -> bool:
    return "norm" in name or name.endswith(".gate.weight")  # every rank has them


@pytest.mark.parametrize("name", ["llama2", "llama_linear", "qwen3_moe"])
def test_of_unquantized_weights_a_rank_reads_its_part(name: str, tmp_path: Path, numbers_read: dict[str, int]) -> None:
    make_checkpoint(name, tmp_path)

    def share(name: str) -> float:
        adds_up = name.endswith(("o_proj.bias", "down_proj.bias"))  # of a sum, which one rank adds
        return 1.0 if is_whole(name) or adds_up else 0.5

    for rank in range(2):
        numbers_read.clear()
        load_rank(tmp_path, Layout(2, 1), rank)
        check(numbers_read, tmp_path, share)


def test_ranks_that_share_a_kv_head_read_it_both(tmp_path: Path, numbers_read: dict[str, int]) -> None:
    make_checkpoint("llama3", tmp_path)  # 4 heads, one KV head
    load_rank(tmp_path, Layout(4, 1), 3)
    check(numbers_read, tmp_path, lambda name: 1.0 if is_whole(name) or "k_proj" in name or "v_proj" in name else 0.25)


def test_whole_experts_are_read_where_they_are_and_nowhere_else(tmp_path: Path, numbers_read: dict[str, int]) -> None:
    make_checkpoint("qwen3_moe", tmp_path)

    def share(name: str) -> float:
        _, _, expert = name.partition(".experts.")
        if expert:
            return float(int(expert.split(".")[0]) >= 4)  # the second half of eight
        return 1.0 if is_whole(name) else 0.5

    load_rank(tmp_path, Layout(2, 1, spreads_experts=True), 1)
    check(numbers_read, tmp_path, share)


def test_a_stage_reads_its_own_layers(tmp_path: Path, numbers_read: dict[str, int]) -> None:
    make_checkpoint("llama2", tmp_path)
    names = ["embed_tokens", "layers.0.", "layers.1.", "layers.2.", "model.norm", "lm_head"]
    for rank, own in enumerate([names[:2], names[2:3], names[3:]]):
        numbers_read.clear()
        load_rank(tmp_path, Layout(1, 3), rank)
        check(numbers_read, tmp_path, lambda name, own=own: float(any(each in name for each in own)))  # type: ignore[misc]


@pytest.mark.parametrize("name", [name for name in FORMATS if "by other" not in name] if THOROUGH else ["awq", "fp8"])
def test_of_a_quantized_projection_a_rank_reads_all_and_keeps_its_part(
    name: str, tmp_path: Path, numbers_read: dict[str, int]
) -> None:
    write_checkpoint(name, Path(make_checkpoint("llama2", tmp_path / "plain")), tmp_path / "quantized")
    load_rank(tmp_path / "quantized", Layout(2, 1), 1)
    check(
        numbers_read, tmp_path / "quantized", lambda name: 0.5 if name.startswith(("lm_head", "model.embed")) else 1.0
    )
