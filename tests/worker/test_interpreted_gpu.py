"""What a GPU's host code and kernels do, drafts and trees of them above all, without a GPU: interpreted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, given, settings

from teachllm import LLM, SamplingParams
from teachllm.core.request import Request
from teachllm.spec_decode.draft_length import FixedLength
from tests.checkpoints import VOCAB_SIZE
from tests.engine.reference import reference
from tests.engine.test_lossless_settings import ANYTHING, check
from tests.spec_decode.drafters import speculation
from tests.worker.interpreted_gpu import InterpretedRunner, interpret

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs this itself: tests/worker/test_gpu_drafting.py"),
]
TREE = {"speculative_token_tree": "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)]"}
PROMPTS = [[i * 7 % VOCAB_SIZE for i in range(start, start + count)] for start, count in ((0, 20), (3, 5), (40, 33))]


@settings(max_examples=4, phases=[Phase.explicit, Phase.generate])  # to make a failure smaller takes too long
@given(**ANYTHING)
def test_settings_do_not_change_greedy_tokens(**drawn: Any) -> None:
    assume(drawn["drafts"] not in ("right", "wrong", "mixed"))  # which only a CPU's executor proposes
    assume(drawn["configuration"]["enable_kv_cache"])
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        check(**drawn)


def engine(method: str, more: dict[str, Any], max_num_seqs: int = 4, **settings: Any) -> LLM:
    return LLM(
        reference("qwen3").path,
        **{"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "max_model_len": 96},
        max_num_seqs=max_num_seqs,
        num_gpu_blocks_override=40,
        **settings,
        speculative_config=speculation(method, "qwen3", num_speculative_tokens=3, adaptive=False, **more),
    )


def sampled(method: str, more: dict[str, Any], params: SamplingParams) -> tuple[list[Any], int]:
    """Tokens and log-probabilities, and how many drafts held."""
    llm = engine(method, more)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    speculated = llm.speculation()
    assert speculated is not None
    return [output.outputs[0] for output in outputs], speculated.stats.num_accepted_tokens


@pytest.mark.parametrize("more", [{}, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("method", ["draft_model", "medusa", "eagle"])
def test_random_tokens_are_those_of_a_cpu(method: str, more: dict[str, Any]) -> None:
    """With the same noise the same drafts are drawn, and verified with the same verdict."""
    params = SamplingParams(temperature=0.9, top_p=0.95, frequency_penalty=0.3, seed=3, max_tokens=12, logprobs=1)
    expected, num_held = sampled(method, more, params)
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        found, num_held_there = sampled(method, more, params)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert num_held_there == num_held > 0
    for ours, theirs in zip(found, expected, strict=True):
        for here, there in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert {i: entry.logprob for i, entry in here.items()} == pytest.approx(
                {i: entry.logprob for i, entry in there.items()}, abs=1e-3
            )


def test_a_prefix_that_was_computed_without_drafts_is_caught_up_with() -> None:
    """Its blocks hold K and V of the target alone: what a draft model makes of them would hold no more often."""
    num_held = []
    for is_found in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            interpret(patch)
            llm = engine("draft_model", {})
            for max_tokens in (1, 16) if is_found else (16,):  # the first one ends before there is anything to draft
                params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
                (output,) = llm.generate([{"prompt_token_ids": PROMPTS[2]}], params, use_tqdm=False)
            assert bool(output.num_cached_tokens) == is_found
            speculated = llm.speculation()
            assert speculated is not None
            num_held.append(speculated.stats.num_accepted_tokens)
    assert num_held[0] == num_held[1] > 4


class Ups(FixedLength):
    """Everybody, some and nobody, in turn."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, requests: Sequence[Request], num_tokens: int) -> list[tuple[int, str]]:
        how = self._random.choice(["all", "some", "some", "none"])
        counts = {"all": lambda: 3, "some": lambda: self._random.choice([0, 0, 1, 3]), "none": lambda: 0}[how]
        return [(counts(), how) for _ in requests]


@pytest.mark.parametrize("seed", range(2))
def test_a_drafter_that_is_asked_now_and_then_misses_nothing(seed: int) -> None:
    """The model drafts for itself: whatever it was not shown, it would get wrong."""
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        llm = engine("draft_model", {"model": reference("qwen3").path}, max_num_batched_tokens=64)
        llm.engine.core.scheduler.draft_length = Ups(seed)
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    speculated = llm.speculation()
    assert speculated is not None
    assert speculated.stats.num_accepted_tokens == speculated.stats.num_draft_tokens > 20


def test_every_size_of_decodes_is_recorded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    monkeypatch.setattr(InterpretedRunner, "records_ahead", True)
    llm = engine("medusa", {}, max_num_seqs=2)
    graphs = llm.engine.core.executor._runner._graphs  # type: ignore[attr-defined]
    recorded = set(graphs._full)
    # (sequences, tokens, tokens of a decode, drafts to come): one of padding more where drafts are verified.
    shapes = {
        (1, 1, 1, 0),
        (2, 2, 1, 0),
        (2, 2, 2, 1),
        (3, 4, 2, 1),
        (2, 3, 3, 2),
        (3, 6, 3, 2),
        (2, 4, 4, 3),
        (3, 8, 4, 3),
    }
    variants = ((False, False), (True, False))
    assert recorded == {("full", *shape, variant, more) for *shape, more in shapes for variant in variants}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for prompt in PROMPTS[:2]:
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    later = {key for key in set(graphs._full) - recorded if key[3]}  # but for prompts
    assert not later
