"""With `batch_invariant=True` a request's tokens and log-probabilities are its own: neither neighbours nor chunks
change a bit of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from teachllm import LLM, SamplingParams
from teachllm.sampling.logprobs import token_logprobs
from tests.worker.gpu.test_gpu_model_runner import SETTINGS, Workload, workload

pytestmark = pytest.mark.gpu

ROOM = {"num_gpu_blocks_override": 400, "enable_prefix_caching": False}
Answer = tuple[list[int], list[dict[int, float]], list[dict[int, float]]]


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_p": 0.9},
    {"temperature": 0.7, "seed": 5, "presence_penalty": 0.5},
)


def scored() -> Workload:
    """Requests of every kind; most ask for log-probabilities, of some tokens or none beside their own, or the prompt's.

    So nearly every batch has rows that could be sampled inside of a graph, beside others that could not.
    """
    made: Workload = []
    for i, (prompt, params) in enumerate(workload(plain=True)):
        asked: dict[str, Any] = {"logprobs": i % 5 - 1} if i % 5 else {}
        asked |= {"prompt_logprobs": i % 2 * 3} if i % 3 == 0 else {}
        kind = KINDS[i % len(KINDS)]
        made.append((prompt, SamplingParams(max_tokens=params.max_tokens, ignore_eos=True, **kind, **asked)))
    return made


def answers(requests: Workload, alone: bool = False, **changes: Any) -> list[Answer]:
    """Tokens, their log-probabilities and the prompt's, of each request."""
    llm = LLM(**SETTINGS | {"device": "cuda", "dtype": "bfloat16", "batch_invariant": True} | changes)
    groups = [[request] for request in requests] if alone else [requests]
    outputs = []
    for group in groups:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in group]
        outputs += llm.generate(prompts, [params for _, params in group], use_tqdm=False)
    llm.engine.close()

    def values(entries: Any) -> list[dict[int, float]]:
        return [{id_: entry.logprob for id_, entry in top.items()} for top in entries or [] if top]

    return [(o.outputs[0].token_ids, values(o.outputs[0].logprobs), values(o.prompt_logprobs)) for o in outputs]


def test_alone_together_and_in_small_chunks_are_bit_for_bit_the_same() -> None:
    requests = scored()
    alone = answers(requests, alone=True, **ROOM)
    assert len({repr(answer) for answer in alone}) > 20
    assert answers(requests, **ROOM) == alone
    assert answers(requests, max_num_batched_tokens=64, **ROOM) == alone
    assert answers(requests, enforce_eager=True, async_scheduling=False, **ROOM) == alone
    assert answers(requests) == alone  # preempted and computed again, some of it found in the prefix cache
    plain = answers(workload(plain=True))  # sampled inside of the graphs
    greedy = slice(0, None, len(KINDS))
    assert [tokens for tokens, _, _ in plain[greedy]] == [tokens for tokens, _, _ in alone[greedy]]


def test_without_it_they_are_not() -> None:
    requests = scored()
    one_by_one, at_once = (answers(requests, alone=alone, batch_invariant=False, **ROOM) for alone in (True, False))
    assert [logprobs for _, logprobs, _ in one_by_one] != [logprobs for _, logprobs, _ in at_once]


def test_a_model_of_transformers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"transformers' model code calls cuBLAS.*: set batch_invariant=False$"):
        answers([], model_impl="transformers")


def test_with_a_vocabulary_of_odd_size_a_rows_place_does_not_matter() -> None:
    logits, ids = 5 * torch.randn(64, 50_257, device="cuda"), torch.arange(64, device="cuda")
    together = token_logprobs(logits, ids, [0] * 64)
    assert [token_logprobs(logits[i : i + 1], ids[i : i + 1], [0])[0] for i in range(64)] == together
