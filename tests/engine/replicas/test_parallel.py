"""However many ranks share a model, or replicas its requests: the greedy tokens are those of one process.

Ranks and replicas are threads here. That processes give the same show tests/worker/processes/test_rank_processes.py and
the tests of replicas.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from teachllm import LLM, SamplingParams
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.thorough import THOROUGH, times
from tests.worker.processes.child_threads import cores_in_threads, patched

GREEDY = SamplingParams(temperature=0, max_tokens=times(8, 16), ignore_eos=True)
_DRAW = random.Random(0)
PROMPTS = [[_DRAW.randrange(VOCAB_SIZE) for _ in range(length)] for length in (3, 40, 17, 1, 25, 60)]
WAYS: dict[str, dict[str, Any]] = {
    "tp=2": {"tensor_parallel_size": 2},
    "pp=2": {"pipeline_parallel_size": 2},
    "tp=2 x pp=2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "dp=2": {"data_parallel_size": 2},
    "dp=2 x tp=2": {"data_parallel_size": 2, "tensor_parallel_size": 2},
}


def generate(folder: str, **settings: Any) -> list[list[int]]:
    limits: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "num_gpu_blocks_override": 24}
    here: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "check_invariants": True}
    llm = LLM(folder, **(here | limits | settings))
    try:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY)
        return [list(output.outputs[0].token_ids) for output in outputs]
    finally:
        llm.close()


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    if torch.cuda.is_available():
        yield  # GPUs exchange by NCCL, which wants processes
        return
    with patched(cores_in_threads):
        yield


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[int]]]:
    folder = make_checkpoint("llama_yarn", tmp_path_factory.mktemp("dense"))
    return folder, generate(folder)


@pytest.mark.parametrize("way", WAYS if THOROUGH else ["tp=2 x pp=2", "dp=2 x tp=2"])
def test_greedy_tokens_are_those_of_one_process(dense: tuple[str, list[list[int]]], way: str) -> None:
    folder, expected = dense
    assert len({token for tokens in expected for token in tokens}) >= 16
    assert generate(folder, **WAYS[way]) == expected


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "disable_custom_all_reduce": True},
        {"tensor_parallel_size": 2, "enforce_eager": True},
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 2, "enforce_eager": True},
        {"data_parallel_size": 2},
    ],
    ids=lambda settings: ", ".join(f"{name}={value}" for name, value in settings.items()),
)
def test_two_gpus_give_the_tokens_of_one(dense: tuple[str, list[list[int]]], settings: dict[str, Any]) -> None:
    folder, expected = dense
    assert generate(folder, device="cuda", dtype="float32", **settings) == expected


def test_experts_may_be_spread_over_ranks_or_cut(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path)
    expected = generate(folder)
    assert generate(folder, tensor_parallel_size=2, enable_expert_parallel=True) == expected
    assert generate(folder, tensor_parallel_size=2) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tensor_parallel_size": 3},
            r"does not divide the model's attention heads \(8\): set tensor_parallel_size to",
        ),
        ({"pipeline_parallel_size": 9}, "is more than the model's 3 layers: set pipeline_parallel_size=3 or less"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "LlamaForCausalLM has none: set it to False"),
        ({"pipeline_parallel_size": 2, "async_scheduling": True}, "set it to False. Stages work on several plans"),
    ],
)
def test_what_ranks_cannot_share_is_refused_before_any_is_started(
    dense: tuple[str, list[list[int]]], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(dense[0], skip_tokenizer_init=True, device="cpu", **settings)
