"""A family of models is one file and one registry line: two toy families, added at run time, run with everything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from teachllm.models import registry
from teachllm.models.build import describe
from tests.checkpoints import VOCAB_SIZE
from tests.engine.test_lossless_settings import PROMPTS, WORKLOAD, check
from tests.models.families import references
from tests.models.families.references import ToyReference

COMMON = {
    **{"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": None},
}
FAMILIES = {
    "moved_norm": ("MovedNormForCausalLM", references.moved_norm, {"rms_norm_eps": 1e-6}),
    "parallel_block": ("ParallelForCausalLM", references.parallel_block, {"logit_scale": 0.5, "layer_norm_eps": 1e-5}),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyReference]:
    """A random checkpoint of a toy family, which is registered as long as it is used."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    architecture, forward, settings = FAMILIES[name]
    raw = COMMON | settings | {"architectures": [architecture], "model_type": name}
    with pytest.MonkeyPatch.context() as patch:
        for table in ("_MODULES", "_OWN_TYPES"):
            patch.setattr(registry, table, dict(getattr(registry, table)))
        registry.register(f"tests.models.families.{name}", {name: architecture})
        (folder / "config.json").write_text(json.dumps(raw))
        generator = torch.Generator().manual_seed(0)
        tensors = {each.name: torch.randn(each.shape, generator=generator) for each in describe(raw).weights}
        for key, tensor in tensors.items():
            tensor.mul_(2.0 * tensor.shape[-1] ** -0.5) if "norm" not in key else tensor.mul_(0.2).add_(1.0)
        save_file(tensors, folder / "model.safetensors")
        yield ToyReference(name, str(folder), raw, forward)


SETTINGS = {
    "plain": {},
    "prefix caching, preemption, chunks": {"spare_blocks": 0},
    "n-gram drafts": {"drafts": "ngram"},
    "right and wrong drafts": {"drafts": "mixed", "async_scheduling": True},
    "no cache": {"enable_kv_cache": False, "enable_prefix_caching": False, "max_num_batched_tokens": 400},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_it_computes_what_its_own_reference_computes(family: ToyReference, settings: dict[str, Any]) -> None:
    configuration = {
        **{"enable_kv_cache": True, "enable_chunked_prefill": True, "enable_prefix_caching": True, "block_size": 8},
        **{"max_num_batched_tokens": 23, "max_num_seqs": 3, "scheduling_policy": "fcfs", "async_scheduling": False},
        "long_prefill_token_threshold": 0,
    }
    settings = dict(settings)
    spare_blocks, drafts = settings.pop("spare_blocks", 1000), settings.pop("drafts", "none")
    check(configuration | settings, WORKLOAD, "qwen3", 2, spare_blocks, drafts, 3, None, False, judge=family)


def test_its_answers_are_not_monotonous(family: ToyReference) -> None:
    assert len({token for prompt in PROMPTS[:4] for token in family.greedy(prompt, 24)}) >= 16
