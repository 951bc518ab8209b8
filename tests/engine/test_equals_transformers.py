"""Greedy tokens equal transformers', for every family, on every rung from naive decoding to paged and chunked."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from teachllm import LLM, SamplingParams
from tests.checkpoints import VOCAB_SIZE
from tests.engine.reference import reference
from tests.thorough import THOROUGH, times

FAMILIES = ["llama2", "llama3", "mistral", "qwen2", "qwen3", "llama_yarn", "qwen3_moe", "mixtral"]
FAMILIES += ["gemma2", "phi3", "olmo2", "gptneox"]
MAX_MODEL_LEN = 192
NUM_TOKENS = times(24, 64)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
MIN_DISTINCT = times(10, 16)

RUNGS: dict[str, dict[str, Any]] = {
    "paged, chunked": {"max_num_batched_tokens": 64},
    "preempted": {"max_num_batched_tokens": 64, "num_gpu_blocks_override": times(12, 40)},
    "no KV cache": {"enable_kv_cache": False, "max_num_batched_tokens": 20 * MAX_MODEL_LEN, "max_num_seqs": 20},
    "contiguous": {"block_size": MAX_MODEL_LEN, "max_num_batched_tokens": 64},
    "static batching": {"scheduling_policy": "static", "max_num_batched_tokens": 64},
    "unchunked": {"enable_chunked_prefill": False, "max_num_batched_tokens": MAX_MODEL_LEN},
}
SERVED = "paged, chunked"
THROUGH_TRANSFORMERS = "through transformers"  # where its model runs here, with our attention


@cache
def prompts() -> list[list[int]]:
    """4 prompts, or 20, of 1 to 120 tokens; every fourth begins like the one before it."""
    rng = random.Random(0)
    made: list[list[int]] = []
    for i in range(times(4, 20)):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 3, 15, 16, 17, 40, 64, 90, 120]))]
        made.append((made[-1][:32] + prompt)[:120] if i % 4 == 3 else prompt)
    return made


def on_gpu(family: str, rung: str) -> Any:
    return pytest.param(family, rung, "cuda", marks=pytest.mark.gpu)


# What a rung changes is the engine's, not the model's: one family sees it all. The others see what is served: of those
# whose attention is alike one here, and all in the thorough half; their logits are compared in tests/models.
CASES = [
    *(
        (family, rung, "cpu")
        for family in FAMILIES
        for rung in RUNGS
        if THOROUGH or family == "llama2" or (rung == SERVED and family in ("mistral", "mixtral", "gemma2"))
    ),
    ("qwen3", THROUGH_TRANSFORMERS, "cpu"),
    on_gpu("qwen3", THROUGH_TRANSFORMERS),
    *(on_gpu(family, "paged, chunked") for family in ("llama3", "mistral", "qwen3", "qwen3_moe", "mixtral", "gemma2")),
    *(on_gpu("qwen3", rung) for rung in ("preempted", "no KV cache", "contiguous")),
]


@pytest.mark.parametrize(("family", "rung", "device"), CASES)
def test_greedy_tokens_equal_transformers(family: str, rung: str, device: str) -> None:
    judge = reference(family)
    pool = {"num_gpu_blocks_override": 1000} if device == "cuda" else {}  # a GPU's whole would take long to check
    llm = LLM(
        judge.path,
        dtype="float32",
        device=device,
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        check_invariants=True,
        **pool | (RUNGS | {THROUGH_TRANSFORMERS: {"model_impl": "transformers"}})[rung],
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts()], GREEDY, use_tqdm=False)
    judge.judge_outputs(outputs, least_distinct=MIN_DISTINCT)
    assert all(len(output.outputs[0].token_ids) == NUM_TOKENS for output in outputs)
    preemptions = llm.engine.core.scheduler.num_preemptions
    assert (preemptions > 0) == (rung == "preempted")
