"""Scales of a quantized KV cache: ranks agree on what is measured, and together have those that one alone has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from teachllm.config import EngineConfig
from teachllm.distributed.layout import Layout
from teachllm.distributed.ranks import Ranks
from teachllm.models.model_config import load_model_config
from teachllm.worker import kv_scales
from teachllm.worker.cpu.model_runner import ModelRunner
from teachllm.worker.kv_scales import _attentions
from tests.checkpoints import make_checkpoint
from tests.distributed.threads import on_ranks
from tests.thorough import THOROUGH

CPU = torch.device("cpu")
LAYOUTS = [Layout(2, 1), Layout(1, 3), Layout(2, 2), Layout(4, 1)]
_GOOD, _BROKEN = torch.tensor([0.5, 0.25]), torch.tensor([0.5, -1.0])  # of two KV heads
STORED = {
    "nothing": {},
    "one head of one layer that nobody measured": {
        f"{layer}.{which}_scale": _BROKEN if (layer, which) == (1, "k") else _GOOD
        for layer in range(3)
        for which in "kv"
    },
    "one layer": {"0.k_scale": _GOOD, "0.v_scale": _GOOD},
    "all": {f"{layer}.{which}_scale": _GOOD for layer in range(3) for which in "kv"},
}


def scales(folder: Path, layout: Layout, kv_cache_dtype: str = "fp8") -> torch.Tensor:
    """[num_layers, 2, num_kv_heads], put together; ranks that have the same head must have the same ones."""
    limits = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    config = EngineConfig(model=str(folder), block_size=4, kv_cache_dtype=kv_cache_dtype, **limits)
    model = load_model_config(config)
    config = config.resolve(model.max_model_len)

    def work(ranks: Ranks) -> torch.Tensor:
        found = [each.settings.kv_scales for each in _attentions(ModelRunner(config, model, CPU, ranks=ranks).model)]
        return torch.stack([torch.stack(each) for each in found if each is not None])

    found, per_head = on_ranks(layout, work), max(layout.tensor // model.num_kv_heads, 1)
    stages = []
    for stage in range(layout.pipeline):
        of_ranks = [found[rank] for rank in layout.stage(stage)]
        for first in range(0, layout.tensor, per_head):
            assert all(torch.equal(each, of_ranks[first]) for each in of_ranks[first : first + per_head])
        stages.append(torch.cat(of_ranks[::per_head], dim=2))
    return torch.cat(stages)


@pytest.mark.parametrize("stored", STORED)
def test_ranks_have_the_scales_that_one_alone_has(stored: str, tmp_path: Path) -> None:
    make_checkpoint("llama_yarn", tmp_path)
    more = {f"model.layers.{name[0]}.self_attn.{name[2:]}": each.clone() for name, each in STORED[stored].items()}
    save_file(load_file(tmp_path / "model.safetensors") | more, tmp_path / "model.safetensors")
    expected = scales(tmp_path, Layout())
    assert torch.equal(expected[0, 1], _GOOD) == (stored != "nothing")
    assert torch.equal(expected[1, 0], _GOOD) == (stored == "all")
    for layout in LAYOUTS if THOROUGH or stored == "nothing" else LAYOUTS[2:3]:
        assert torch.equal(scales(tmp_path, layout), expected), layout


def test_a_head_that_two_ranks_have_gets_the_scale_of_what_either_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("llama_yarn", tmp_path)
    expected = scales(tmp_path, Layout())
    attend, largest = kv_scales._Seen.attend, []

    def more(self: kv_scales._Seen, *args: object) -> torch.Tensor:
        out = attend(self, *args)  # type: ignore[arg-type]
        largest.append(None)
        factor = 4.0 if len(largest) == 1 else 1.0  # one rank rounds a layer otherwise than the one beside it
        self.largest[-1] = (self.largest[-1][0] * factor, self.largest[-1][1])
        return out

    monkeypatch.setattr(kv_scales._Seen, "attend", more)
    found = scales(tmp_path, Layout(4, 1))
    assert (found != expected).sum() == 1 and (found >= expected).all()
