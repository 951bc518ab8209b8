"""What stands before a node of a tree: kept for those alone whose logits depend on it, and no further than it goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from teachllm import LLM, SamplingParams
from teachllm.worker.cpu.drafting import Drafting
from tests.spec_decode.drafters import speculation
from tests.worker.engines import random_ids, tiny, tokens

TREE = {"num_speculative_tokens": 2, "speculative_token_tree": "[(0,), (1,), (0, 0), (1, 0)]", "adaptive": False}
PROMPTS = [{"prompt_token_ids": random_ids(length, seed=length)} for length in (9, 20, 14)]
PLAIN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PENALISED = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, frequency_penalty=1.5)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[list[int], list[int], torch.Tensor | None]]]:
    """Of every step the rows, how many positions of each are sampled, and the histories."""
    found: list[tuple[list[int], list[int], torch.Tensor | None]] = []
    histories = Drafting.histories

    def noting(self: Drafting, inputs: Any, drafts: Any, samples: list[bool]) -> torch.Tensor | None:
        result = histories(self, inputs, drafts, samples)
        found.append((inputs.rows, [len(d) + s for d, s in zip(drafts, samples, strict=True)], result))
        return result

    monkeypatch.setattr(Drafting, "histories", noting)
    return found


def run(params: list[SamplingParams], config: dict[str, Any] | None) -> list[list[list[int]]]:
    with closing(LLM(**tiny(speculative_config=config))) as llm:
        return [tokens(output) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_nobody_builds_a_history_that_nobody_reads(built: list[Any]) -> None:
    found = run([PLAIN] * 3, speculation("draft_model", "qwen3", **TREE))
    assert found == run([PLAIN] * 3, None)
    assert len(built) > 3 and all(histories is None for _, _, histories in built)


@pytest.mark.parametrize(
    "reads", [PENALISED, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, repetition_penalty=1.7)]
)
def test_a_history_goes_as_far_as_its_path_and_only_who_reads_it_has_one(
    built: list[Any], reads: SamplingParams
) -> None:
    params = [PLAIN, reads, PLAIN]
    found = run(params, speculation("draft_model", "qwen3", **TREE))
    assert found == run(params, None)
    wholes = [given["prompt_token_ids"] + output[0] for given, output in zip(PROMPTS, found, strict=True)]
    kept = [each for each in built if each[2] is not None]
    assert kept
    for rows, nums, histories in kept:
        assert histories.shape[0] == sum(nums)
        assert histories.shape[1] <= len(wholes[1]) + 2 < 96  # max_model_len
        for row, part in zip(rows, histories.split(nums), strict=True):
            assert part.any().item() == (row == 1 and len(part) > 0)
            if row == 1:  # rows are taken in order
                known = max(n for n in range(histories.shape[1] + 1) if part[0, :n].tolist() == wholes[1][:n])
                assert known >= len(PROMPTS[1]["prompt_token_ids"])
