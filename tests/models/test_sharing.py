"""What arithmetic says of a rank's part is what the part has, and stages have about the same to do."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from teachllm.config import EngineConfig
from teachllm.distributed.layout import Layout
from teachllm.distributed.ranks import Ranks
from teachllm.errors import ModelError
from teachllm.models.build import META, build_model, describe
from teachllm.models.decoder import CausalLM
from teachllm.models.model_config import ModelConfig, load_model_config
from teachllm.models.own_model import model_of_rank
from teachllm.models.sharding import stage_layers
from tests.checkpoints import OWN, build_config
from tests.thorough import THOROUGH

LAYOUTS = [Layout(2, 1), Layout(1, 2), Layout(2, 2), Layout(2, 1, spreads_experts=True)]


def described(folder: Path, name: str, device_type: str = "cuda", **changes: Any) -> ModelConfig:
    """A checkpoint without weights."""
    config = build_config(name)
    architecture = {"qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM"}.get(
        config.model_type, f"{config.model_type.capitalize()}ForCausalLM"
    )
    raw = config.to_dict() | {"architectures": [architecture], "dtype": "float32"} | changes
    (folder / "config.json").write_text(json.dumps(raw))
    return load_model_config(EngineConfig(model=str(folder), load_format="dummy"), device_type)


def part(model: ModelConfig, layout: Layout, rank: int) -> CausalLM:
    """Its weights are sizes only."""
    return build_model(model, META, ranks=Ranks(layout.coords(rank)))


@pytest.mark.parametrize("name", OWN if THOROUGH else ["qwen2", "qwen3", "qwen3_moe", "mixtral"])
def test_a_rank_has_the_bytes_that_were_predicted(name: str, tmp_path: Path) -> None:
    model = described(tmp_path, name)
    for layout in LAYOUTS:
        experts = model.experts
        if layout.spreads_experts and (experts is None or experts.num_experts % layout.tensor):
            continue
        for rank in range(layout.num_ranks):
            own = part(model, layout, rank)
            tensors = [*own.parameters(), *own.buffers()]
            assert model_of_rank(model, layout.coords(rank)).weight_bytes == 4 * sum(each.numel() for each in tensors)


def test_idle_experts_are_counted_where_they_are(tmp_path: Path) -> None:
    model = described(tmp_path, "qwen3_moe")
    for layout in (Layout(2, 1), Layout(1, 2), Layout(2, 1, spreads_experts=True)):
        for rank in range(layout.num_ranks):
            found = sum(
                each.numel() for name, each in part(model, layout, rank).named_parameters() if "norm" not in name
            )
            said = model_of_rank(model, layout.coords(rank))
            assert found <= said.num_parameters < found * 1.01  # norms besides
            assert said.num_active_parameters < said.num_parameters


def test_a_cpu_holds_a_tied_head_twice_where_one_stage_has_both_ends(tmp_path: Path) -> None:
    model = described(tmp_path, "qwen3", "cpu")
    vocabulary = 512 * 64 * 4
    gpu = replace(model, device_type="cuda")
    for layout, twice in ((Layout(2, 1), vocabulary // 2), (Layout(1, 2), 0)):
        place = layout.coords(0)
        assert model_of_rank(model, place).weight_bytes - model_of_rank(gpu, place).weight_bytes == twice


def test_whole_experts_are_as_wide_on_a_rank_as_on_all(tmp_path: Path) -> None:
    model = described(tmp_path, "qwen3_moe", moe_intermediate_size=4096)
    parts = [model_of_rank(model, Layout(2, 1, spreads).coords(1)).experts for spreads in (True, False)]
    assert [part and part.intermediate_size for part in parts] == [4096, 2048]


def test_an_intermediate_size_that_no_layer_has_need_not_be_shared(tmp_path: Path) -> None:
    all_sparse: dict[str, Any] = {"intermediate_size": 97, "mlp_only_layers": []}
    model_of_rank(described(tmp_path, "qwen3_moe", **all_sparse), Layout(2, 1).coords(0))
    with pytest.raises(ModelError, match=r"does not divide the model's intermediate_size \(97\): set tensor"):
        model_of_rank(described(tmp_path, "qwen3_moe", intermediate_size=97), Layout(2, 1).coords(0))


def stages_of(model: ModelConfig, num_stages: int) -> list[range]:
    return stage_layers(describe(model.raw), model.vocab_size * model.hidden_size, num_stages)


def slowest(model: ModelConfig, stages: list[range]) -> int:
    layers = describe(model.raw).layers
    costs = [2 * sum(layers[i].num_active_parameters for i in stage) for stage in stages]  # weights, and as much of KV
    return max(*costs[:-1], costs[-1] + model.vocab_size * model.hidden_size)


@pytest.mark.parametrize("sparse", ["", "all", "first half", "every third"])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_no_other_stages_would_be_faster(sparse: str, num_stages: int, tmp_path: Path) -> None:
    dense = {"": range(12), "all": [], "first half": range(6, 12), "every third": [i for i in range(12) if i % 3]}
    more: dict[str, Any] = {"num_hidden_layers": 12, "mlp_only_layers": list(dense[sparse]), "layer_types": None}
    config = described(tmp_path, "qwen3_moe", moe_intermediate_size=300, vocab_size=700, **more)
    stages = stages_of(config, num_stages)
    assert [i for stage in stages for i in stage] == list(range(12)) and all(stages)
    ways = ([0, *cuts, 12] for cuts in combinations(range(1, 12), num_stages - 1))
    least = min(slowest(config, [range(*each) for each in pairwise(way)]) for way in ways)
    assert slowest(config, stages) == least


def test_equal_layers_are_shared_equally_and_the_last_stage_has_fewer(tmp_path: Path) -> None:
    model = described(tmp_path, "llama2", num_hidden_layers=11, vocab_size=128)
    assert [len(stage) for stage in stages_of(model, 3)] == [4, 4, 3]
