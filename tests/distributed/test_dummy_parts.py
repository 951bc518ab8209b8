"""Random weights of several ranks are parts of those that one alone has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from teachllm.distributed.layout import Layout
from teachllm.distributed.shards import Shard
from teachllm.layers.checkpoint_tensors import TensorDestination, destination
from teachllm.loading import random_weights
from teachllm.loading.random_weights import fill_parts_randomly
from tests.checkpoints import OWN, build_config, make_checkpoint
from tests.distributed.test_model_parts import LAYOUTS, run
from tests.quantization.format_checkpoints import FORMATS
from tests.thorough import THOROUGH

SEQUENCES: Any = [torch.arange(5, 45), torch.arange(100, 109), torch.arange(300, 323)]


@pytest.mark.parametrize("name", OWN if THOROUGH else ["llama3", "llama_linear", "qwen3_moe"])
def test_ranks_make_the_model_that_one_makes(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path)
    config = build_config(name)
    [expected] = run(folder, Layout(), SEQUENCES, load_format="dummy", seed=3)
    [other] = run(folder, Layout(), SEQUENCES, load_format="dummy", seed=4)
    assert not torch.allclose(expected[0], other[0], atol=0.1)
    for layout in LAYOUTS if THOROUGH else [Layout(2, 2)]:
        num_experts = getattr(config, "num_local_experts", 1)
        if layout.pipeline > config.num_hidden_layers or (layout.spreads_experts and num_experts % layout.tensor):
            continue
        for logits in run(folder, layout, SEQUENCES, load_format="dummy", seed=3)[-layout.tensor :]:
            for ours, theirs in zip(logits, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["gptq int4", "mxfp4", *(["awq", "packed int4", "fp8 of weights alone"] if THOROUGH else [])]
)
def test_ranks_make_the_quantized_weights_that_one_makes(name: str, tmp_path: Path) -> None:
    folder = Path(make_checkpoint("llama2", tmp_path))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": FORMATS[name].config}))
    [expected] = run(str(folder), Layout(), SEQUENCES, load_format="dummy")
    for logits in run(str(folder), Layout(2, 2), SEQUENCES, load_format="dummy")[2:]:
        for ours, theirs in zip(logits, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_part_is_drawn_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_weights, "_AT_ONCE", 5 * 12)
    drawn = []
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda size, **more: drawn.append(size) or randn(size, **more))
    whole = torch.empty(24, 12)
    fill_parts_randomly([("weight", destination(whole))], seed=0)
    assert whole.std() == pytest.approx(12**-0.5, rel=0.2) and whole.unique().numel() == whole.numel()
    for rows, columns in [(Shard(1, 3), Shard()), (Shard(0, 2), Shard(2, 4)), (Shard(), Shard(1, 2))]:
        part = torch.empty(24 // rows.count, 12 // columns.count)
        fill_parts_randomly([("weight", destination(part, rows, columns))], seed=0)
        assert torch.equal(part, whole[rows.of(24), columns.of(12)])
    assert max(size[0] for size in drawn) == 5
    empty = torch.empty(0, 12)
    fill_parts_randomly([("weight", TensorDestination(empty, (24, 12), (slice(24, 24), slice(0, 12))))], seed=0)
