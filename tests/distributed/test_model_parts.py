"""The parts of a model on several ranks compute together what the whole one does, in every family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from teachllm.config import EngineConfig
from teachllm.distributed.layout import Layout
from teachllm.distributed.ranks import ALONE, Ranks
from teachllm.errors import ModelError
from teachllm.layers.embedding import Embedding
from teachllm.loading.loader import load_model
from teachllm.models.model_config import ModelConfig, load_model_config
from teachllm.models.own_model import model_of_rank
from teachllm.models.stage import Stage
from teachllm.sampling.shared_vocabulary import Columns
from tests.checkpoints import OWN, VOCAB_SIZE, build_config, make_checkpoint
from tests.distributed.threads import on_ranks
from tests.models.flat_batch import logits_by_schedule, random_schedule
from tests.thorough import THOROUGH

CPU = torch.device("cpu")
LENGTHS = [40, 9, 23]


class OneRank(Stage):
    """A rank's part as if it were the whole."""

    def logits(self, hidden: torch.Tensor, **form: bool) -> torch.Tensor:
        return super().logits(hidden, **form) if self._ranks.coords.is_last_stage else hidden


def run(folder: str, layout: Layout, sequences: list[torch.Tensor], **settings: Any) -> list[list[torch.Tensor]]:
    """Of every rank: what it says are the logits."""
    config = EngineConfig(model=folder, **settings)
    whole = load_model_config(config)

    def work(ranks: Ranks) -> list[torch.Tensor]:
        model, own = load_model(whole, config, CPU, ranks=ranks), model_of_rank(whole, ranks.coords)
        part = OneRank(model, ranks, whole.hidden_size, torch.float32)
        return logits_by_schedule(part, own, sequences, random_schedule(LENGTHS, 3), torch.float32, block_size=4)

    return on_ranks(layout, work)


@pytest.fixture(scope="module", params=list(OWN))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("checkpoints") / request.param)


@pytest.fixture(scope="module")
def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


LAYOUTS = [Layout(2, 1), Layout(1, 2), Layout(1, 3), Layout(2, 2), Layout(2, 2, spreads_experts=True)]


def layouts_for(name: str) -> list[Layout]:
    """Return the layouts that a family can have; in the usual run one of them, and not the same for all families."""
    can_have = [each for each in LAYOUTS if each.pipeline <= build_config(name).num_hidden_layers]
    return can_have if THOROUGH else [can_have[-1 if "mix" in name or "moe" in name else list(OWN).index(name) % 4]]


def test_parts_compute_what_the_whole_does(family: str, sequences: list[torch.Tensor]) -> None:
    [expected] = run(family, Layout(), sequences)
    for layout in layouts_for(Path(family).name):
        found = run(family, layout, sequences)
        for rank in layout.stage(layout.pipeline - 1):  # all ranks of the last stage know the logits
            for ours, theirs in zip(found[rank], expected, strict=True):
                torch.testing.assert_close(
                    ours, theirs, rtol=1e-4, atol=1e-4, msg=lambda text, at=layout: f"{at} {text}"
                )


def test_more_ranks_than_kv_heads_share_them(tmp_path: Path, sequences: list[torch.Tensor]) -> None:
    folder = make_checkpoint("llama3", tmp_path)  # 4 heads, one KV head
    [expected] = run(folder, Layout(), sequences)
    for logits in run(folder, Layout(tensor=4), sequences):
        for ours, theirs in zip(logits, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_shared_equally_is_refused_with_the_sizes_that_do(tmp_path: Path) -> None:
    folder = make_checkpoint("llama3", tmp_path)
    with pytest.raises(ModelError, match=r"tensor_parallel_size=3 does not divide the model's attention heads \(4\)"):
        run(folder, Layout(tensor=3), [])
    with pytest.raises(ModelError, match="set tensor_parallel_size to one of 1, 2, 4"):
        run(folder, Layout(tensor=3), [])
    with pytest.raises(ModelError, match="pipeline_parallel_size=4 is more than the model's 3 layers"):
        run(folder, Layout(pipeline=4), [])


def test_what_runs_through_transformers_is_not_shared(tmp_path: Path) -> None:
    config = EngineConfig(model=make_checkpoint("gemma2", tmp_path))
    with pytest.raises(ModelError, match="Gemma2ForCausalLM runs through transformers' code, of which no rank"):
        model_of_rank(load_model_config(config), Layout(2, 1).coords(0))


def test_ranks_hold_together_what_the_whole_holds(tmp_path: Path) -> None:
    config = EngineConfig(model=make_checkpoint("llama2", tmp_path), load_format="dummy")
    whole: ModelConfig = load_model_config(config)
    layout = Layout(2, 3)
    parts = [model_of_rank(whole, layout.coords(rank)) for rank in range(layout.num_ranks)]
    assert sum(part.num_layers for part in parts) == layout.tensor * whole.num_layers
    assert all(part.num_kv_heads * layout.tensor == whole.num_kv_heads for part in parts)
    assert model_of_rank(whole, ALONE.coords) == replace(whole)


@pytest.mark.parametrize("name", ["llama2", "qwen3"])  # with a head of its own, and tied
def test_a_vocabulary_may_be_of_any_size(name: str, tmp_path: Path) -> None:
    config = build_config(name)
    config.vocab_size = VOCAB_SIZE - 3
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    sequences = [torch.arange(5, 45), torch.arange(300, 309), torch.arange(VOCAB_SIZE - 26, VOCAB_SIZE - 3)]
    [expected] = run(str(tmp_path), Layout(), sequences)
    for layout in (Layout(2, 1), Layout(2, 2)):
        for logits in run(str(tmp_path), layout, sequences)[-2:]:
            for ours, theirs in zip(logits, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_rows_of_no_token_are_never_the_best() -> None:
    table = torch.randn(9, 16)  # of 8 ranks the fifth has one token, and those behind it none

    def work(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
        shard = ranks.shard_spec(num_kv_heads=8)
        embedding = Embedding(9, 16, shard.part, shard.group)
        ((_, place),) = embedding.checkpoint_tensors("")
        assert place.ranges is not None
        place.target.copy_(table[place.ranges])
        hidden = embedding(torch.arange(9))
        logits = embedding.logits(-100.0 * hidden)  # all are far below the 0 of an empty row
        return hidden, Columns(9, shard.group).argmax(logits)

    for hidden, best in on_ranks(Layout(tensor=8), work):
        assert torch.equal(hidden, table)
        assert torch.equal(best, (-100.0 * table @ table.t()).argmax(-1))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("layout", [Layout(1, 1, True, 2), Layout(1, 2, True, 2), Layout(1, 1, True, 3)], ids=str)
def test_what_a_rank_lacks_of_spread_experts_is_known_before_it_is_loaded(
    name: str, layout: Layout, tmp_path: Path
) -> None:
    config = EngineConfig(model=make_checkpoint(name, tmp_path))
    whole = load_model_config(config)

    def work(ranks: Ranks) -> tuple[int, ModelConfig]:
        model = load_model(whole, config, CPU, ranks=ranks)
        held = [weight.nbytes for layer in model.layers for weight in layer.mlp.parameters() if weight.dim() == 3]
        return sum(held), model_of_rank(whole, ranks.coords)

    found = on_ranks(layout, work)
    norm = whole.hidden_size * 4
    for stage in range(layout.pipeline):
        of_stage = found[stage :: layout.num_ranks]
        with_all = model_of_rank(whole, Layout(1, layout.pipeline).coords(stage))
        in_all = sum(held for held, _ in of_stage)
        for held, own in of_stage:
            assert 0 < held < in_all
            assert with_all.weight_bytes - own.weight_bytes == pytest.approx(in_all - held, abs=norm)
