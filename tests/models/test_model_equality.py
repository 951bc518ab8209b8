"""Every family computes what transformers computes, however its tokens are cut into steps."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from teachllm.config import EngineConfig
from teachllm.layers.norm import RMSNorm
from teachllm.loading.loader import load_model
from teachllm.models.model_config import ModelConfig, load_model_config
from tests.checkpoints import ALL, OWN, make_checkpoint
from tests.engine.reference import FORWARD_COLUMNS, FORWARD_LENGTHS, FORWARD_SEQUENCES, Reference, reference
from tests.golden.make import NUM_HALF_PRECISION, KeepFloat64
from tests.models.flat_batch import logits_by_schedule, random_schedule
from tests.thorough import THOROUGH

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=list(ALL))
def family(request: pytest.FixtureRequest) -> Reference:
    return reference(request.param)


SEQUENCES = [torch.tensor(ids) for ids in FORWARD_SEQUENCES]


def _double(model: torch.nn.Module) -> torch.nn.Module:
    """To float64, except transformers' frequencies: positions become angles in float32 in both engines."""
    frequencies = {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    for module in model.modules():
        if getattr(module, "packed", None) is not None:  # oneDNN has no float64
            module.weight, module.packed = torch.nn.Parameter(module.packed.to_dense()), None
        if isinstance(module, RMSNorm):
            module.prepared = None
    model.double()
    for name, buffer in frequencies.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer)
    return model


def _load(path: str, **settings: Any) -> tuple[ModelConfig, Any]:
    config = EngineConfig(model=path, **settings)
    model_config = load_model_config(config)
    return model_config, load_model(model_config, config, CPU)


def _difference(got: list[torch.Tensor], golden: Reference, num_tokens: int | None = None) -> float:
    """Return the largest difference from transformers in float64, over the first tokens of each sequence."""
    expected = torch.from_numpy(golden.golden["forward_logits"]).split(FORWARD_LENGTHS)
    pairs = zip(got, expected, strict=True)
    return max(float((a[:num_tokens, FORWARD_COLUMNS] - b[:num_tokens]).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("block_size", [1, 16] if THOROUGH else [1])
def test_float64_logits_equal_transformers_to_the_last_digits(family: Reference, block_size: int) -> None:
    model_config, model = _load(family.path)
    steps = random_schedule(FORWARD_LENGTHS, seed=block_size)
    with KeepFloat64() if model.implementation == "transformers" else nullcontext():
        got = logits_by_schedule(_double(model), model_config, SEQUENCES, steps, torch.float64, block_size)
    # Dynamic rope computes its base in float32, in another order of operations than transformers.
    assert _difference(got, family) < (1e-5 if "dynamic" in family.name else 1e-10)


def test_float32_logits_equal_transformers_however_the_tokens_are_cut(family: Reference) -> None:
    model_config, model = _load(family.path)
    whole = [[(i, n) for i, n in enumerate(FORWARD_LENGTHS)]]
    both = [(random_schedule(FORWARD_LENGTHS, seed=7), 16), (whole, 512)]
    for steps, block_size in both if THOROUGH else [both[list(ALL).index(family.name) % 2]]:
        got = logits_by_schedule(model, model_config, SEQUENCES, steps, torch.float32, block_size)
        assert _difference(got, family) < 5e-5


def test_half_precision_stays_as_near_as_transformers_does(family: Reference) -> None:
    both = ["bfloat16", "float16"]
    for dtype in both if THOROUGH else [both[list(ALL).index(family.name) % 2]]:
        model_config, model = _load(family.path, dtype=dtype)
        steps = random_schedule(FORWARD_LENGTHS, seed=3)
        got = logits_by_schedule(model, model_config, SEQUENCES, steps, getattr(torch, dtype), 16)
        assert _difference(got, family, NUM_HALF_PRECISION) <= 2 * family.golden[f"{dtype}_error"]


@pytest.mark.parametrize(
    "name", ["llama3", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"] if THOROUGH else ["qwen2", "mixtral"]
)
def test_our_families_give_the_same_through_the_transformers_backend(name: str) -> None:
    steps = random_schedule(FORWARD_LENGTHS, seed=5)
    both = []
    for implementation in ("teachllm", "transformers"):
        model_config, model = _load(reference(name).path, model_impl=implementation)
        assert model_config.implementation == model.implementation == implementation
        both.append(logits_by_schedule(model, model_config, SEQUENCES, steps, torch.float32, 16))
    assert max(float((ours - theirs).abs().max()) for ours, theirs in zip(*both, strict=True)) < 5e-5


@pytest.mark.parametrize("name", list(ALL))
def test_greedy_decoding_of_every_checkpoint_wanders(name: str) -> None:
    assert all(len(set(row.tolist())) >= 16 for row in reference(name).golden["greedy_ids"])


def test_checkpoints_cover_the_shapes_that_are_promised(tmp_path: Path) -> None:
    shapes = []
    for name in OWN:
        shapes.append(load_model_config(EngineConfig(model=make_checkpoint(name, tmp_path / name))))
    assert {s.head_size for s in shapes} >= {32, 64, 128, 256}
    assert {s.num_attention_heads // s.num_kv_heads for s in shapes} >= {1, 2, 4}
    assert any(s.num_kv_heads == 1 and s.num_attention_heads > 2 for s in shapes)
    assert {s.raw["tie_word_embeddings"] for s in shapes} == {True, False}
