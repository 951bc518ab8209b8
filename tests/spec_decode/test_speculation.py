"""With a drafter an answer comes in fewer steps and is the same: whatever was asked for, and wherever it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from teachllm import LLM, EngineConfig, RequestOutput, SamplingParams
from teachllm.checkpoint.files import find_folder
from teachllm.core.in_flight import RequestUpdate
from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from teachllm.engine.llm_engine import Engine
from tests.spec_decode import naive
from tests.thorough import THOROUGH, only_thorough, times
from tests.worker.engines import drain

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "draft_model": {"method": "draft_model", "model": "teachlm-draft"},
    "eagle": {"method": "eagle", "model": "teachlm-eagle"},
    "medusa": {"method": "medusa", "model": "teachlm-medusa"},
    "tree": {
        "method": "draft_model",
        "model": "teachlm-draft",
        "num_speculative_tokens": 3,
        "speculative_token_tree": "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)]",
    },
}
QUESTIONS = [  # of the test set, on which nothing was trained
    "So what exactly do people mean by paged attention?",
    "What would go wrong if an engine had no KV cache?",
    "Our team is debating whether to bother with chunked prefill. What are the benefits?",
    "In plain English, continuous batching would be what?",
    "how often should you reseal grout in a bathroom",
    "What does TTFT mean in the context of LLM serving?",
]
TEXTS = [
    "A KV cache keeps",
    "Prefill and decode. Prefill and decode. Prefill and",
    "1, 2, 3, 4,",
    "Betelgeuse, Ganymede and the analemma,",
    "The scheduler gives the scheduler gives the",
    "Hello!",
]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
NUM_PROMPTS = times(8, 12)


@cache
def llm(method: str | None) -> LLM:
    """With one of the drafters, always at its full length, or without."""
    speculation = None if method is None else {"adaptive": False} | METHODS[method]
    defaults: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 250}
    defaults |= {"device": "cpu", "dtype": "float32", "max_model_len": 256, "check_invariants": True}
    return LLM(**defaults, speculative_config=speculation)


@cache
def prompts() -> list[dict[str, list[int]]]:
    tokenizer = llm(None).tokenizer
    assert tokenizer is not None
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": each}]) for each in QUESTIONS]
    return [{"prompt_token_ids": ids} for ids in [*chats, *map(tokenizer.encode, TEXTS)]]


def answers(
    method: str | None, params: SamplingParams | Sequence[SamplingParams], count: int = NUM_PROMPTS
) -> list[RequestOutput]:
    return llm(method).generate(prompts()[:count], params, use_tqdm=False)


def assert_same(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """To the last field; log-probabilities up to rounding."""
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert one.token_ids == other.token_ids
            assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
            assert one.stop_reason == other.stop_reason
            assert_same_logprobs(one.logprobs, other.logprobs)
        assert_same_logprobs(ours.prompt_logprobs, theirs.prompt_logprobs)


def assert_same_logprobs(found: Any, expected: Any) -> None:
    assert (found is None) == (expected is None)
    for mine, its in zip(found or (), expected or (), strict=True):
        assert list(mine or ()) == list(its or ())
        for token_id in mine or ():
            assert mine[token_id].logprob == pytest.approx(its[token_id].logprob, abs=1e-4)
            assert mine[token_id].rank == its[token_id].rank


@cache
def verified(method: str) -> list[tuple[int, int]]:
    """(drafted, accepted) of every verification from the first call on; it grows."""
    found: list[tuple[int, int]] = []
    scheduler = llm(method).engine.core.scheduler
    update = scheduler.update

    def counting(plan: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestUpdate]:
        updates = update(plan, result)
        found.extend((each.num_drafted, each.num_accepted) for each in updates if each.num_drafted)
        return updates

    scheduler.update = counting  # type: ignore[method-assign]
    return found


# -- the same answers ------------------------------------------------------------------------------------------


@cache
def greedy() -> list[RequestOutput]:
    return answers(None, GREEDY)


@pytest.mark.parametrize("method", METHODS if THOROUGH else ["eagle"])
def test_greedy_answers_are_the_same_and_take_fewer_steps(method: str) -> None:
    scheduler, before = llm(method).engine.core.scheduler, len(verified(method))
    first_step = scheduler.num_steps
    assert_same(answers(method, GREEDY), greedy())
    found = verified(method)[before:]
    assert sum(num_accepted for _, num_accepted in found) > 10
    assert any(num_accepted < num_drafted for num_drafted, num_accepted in found)
    assert scheduler.num_steps - first_step <= 24


@only_thorough
@pytest.mark.parametrize("method", METHODS)
def test_running_ahead_and_adapting_change_nothing_either(method: str) -> None:
    settings: dict[str, Any] = {"max_num_seqs": 5, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 12}
    settings |= {"device": "cpu", "dtype": "float32", "max_model_len": 128, "check_invariants": True}
    ahead = LLM(**settings, async_scheduling=True, speculative_config=METHODS[method])
    assert_same(ahead.generate(prompts(), GREEDY, use_tqdm=False), greedy())
    assert ahead.engine.core.scheduler.num_preemptions > 0


NUM_ENDED = times(1, 3)  # answers


def endings() -> list[SamplingParams]:
    """For some answers, one after the other: each ends at eight places, by each of four reasons."""
    tokenizer = llm(None).tokenizer
    assert tokenizer is not None
    found = []
    for end in range(1, 9):
        for ids in (each.outputs[0].token_ids for each in greedy()[:NUM_ENDED]):
            text = tokenizer.decode(ids[end : end + 2])
            found += [replace(GREEDY, max_tokens=end), replace(GREEDY, stop_token_ids=[ids[end]])]
            found += [replace(GREEDY, stop=[text], include_stop_str_in_output=kept) for kept in (False, True)]
    return found


@cache
def endings_without_drafts() -> list[RequestOutput]:
    return llm(None).generate(prompts_of_endings(), endings(), use_tqdm=False)


def prompts_of_endings() -> list[dict[str, list[int]]]:
    return [prompt for _ in range(8) for prompt in prompts()[:NUM_ENDED] for _ in range(4)]


@pytest.mark.parametrize("method", METHODS if THOROUGH else ["eagle"])
def test_an_answer_may_end_anywhere_inside_a_draft(method: str) -> None:
    expected = endings_without_drafts()
    found = llm(method).generate(prompts_of_endings(), endings(), use_tqdm=False)
    assert_same(found, expected)
    assert {(each.outputs[0].finish_reason, type(each.outputs[0].stop_reason)) for each in found} == {
        ("length", type(None)),
        ("stop", int),
        ("stop", str),
    }
    assert {len(each.outputs[0].token_ids) for each in found} >= set(range(1, 9))
    assert llm(method).engine.core.scheduler.kv.num_used_blocks == 0


CASES: dict[str, SamplingParams] = {
    "min_tokens": SamplingParams(temperature=0, max_tokens=36, min_tokens=32),
    "logprobs": SamplingParams(temperature=0, max_tokens=12, logprobs=3, prompt_logprobs=1),
    "penalties": SamplingParams(
        temperature=0, max_tokens=24, repetition_penalty=1.8, presence_penalty=1.5, frequency_penalty=1.0, logprobs=0
    ),
    "bad_words": SamplingParams(temperature=0, max_tokens=16, bad_words=[" the", " KV cache", " a", " and"]),
    "allowed_token_ids": SamplingParams(temperature=0, max_tokens=12, allowed_token_ids=range(300, 900)),
    "logit_bias": SamplingParams(temperature=0, max_tokens=16, logit_bias={266: 6.0, 281: -50.0, 323: -8.0}),
    "siblings": SamplingParams(temperature=0, max_tokens=12, n=2, logprobs=1),
}


@cache
def without_drafts(case: str) -> list[RequestOutput]:
    """And the terms are felt."""
    found = answers(None, CASES[case], count=4)
    if case not in ("logprobs", "siblings"):
        params = replace(GREEDY, max_tokens=CASES[case].max_tokens)
        free = answers(None, params, count=4)
        assert any(a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(found, free, strict=True))
    return found


@only_thorough
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_what_a_request_asks_for_holds_of_drafted_tokens_too(method: str, case: str) -> None:
    before = len(verified(method))
    assert_same(answers(method, CASES[case], count=4), without_drafts(case))
    assert len(verified(method)) > before


@pytest.mark.parametrize("method", METHODS if THOROUGH else ["eagle"])
def test_requests_that_ask_for_different_things_share_a_batch(method: str) -> None:
    params = [*CASES.values(), GREEDY, SamplingParams(temperature=0.8, seed=5, max_tokens=20)]
    before = len(verified(method))
    found, expected = answers(method, params, count=len(params)), answers(None, params, count=len(params))
    is_certain = method == "ngram"  # then a random token is the same, too
    assert_same(found if is_certain else found[:-1], expected if is_certain else expected[:-1])
    assert len(verified(method)) > before


# -- at random -------------------------------------------------------------------------------------------------


@only_thorough
def test_a_drafter_that_is_certain_changes_no_token_of_a_seeded_request() -> None:
    params = [
        SamplingParams(temperature=0.8, seed=seed, max_tokens=30, n=1 + seed % 2, top_p=0.9 if seed % 3 else 1.0)
        for seed in range(12)
    ]
    before = len(verified("ngram"))
    assert_same(answers("ngram", params), answers(None, params))
    assert sum(num_accepted for _, num_accepted in verified("ngram")[before:]) > 5


@pytest.mark.parametrize("method", ["draft_model", "eagle", "medusa", "tree"] if THOROUGH else ["tree"])
def test_a_seeded_request_gives_the_same_tokens_again_whatever_runs_beside_it(method: str) -> None:
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=24) for seed in range(times(4, 12))]
    together = answers(method, params, len(params))
    assert_same(llm(method).generate(prompts()[3], params[3], use_tqdm=False), [together[3]])


TEMPERATURE, NUM_SEEDS = 0.8, times(90, 300)
FEW = (",", " t", " and", " has", " x", " i", " slot")  # of which all are likely there; the drafter is not told of them


POTATOES = "one potato, two potato, three"
EXACT = [  # of each of these ids to be the second and the third output token after that
    [0.217525, 0.182423, 0.059492, 0.187479, 0.148919, 0.002366, 0.201797],
    [0.410033, 0.209196, 0.016705, 0.191895, 0.166947, 0.002522, 0.002703],
]


def few_ids() -> tuple[list[int], list[int]]:
    """Return a prompt's ids, and the few ids that may follow."""
    tokenizer = llm(None).tokenizer
    assert tokenizer is not None
    ids = [token_id for text in FEW for token_id in tokenizer.encode(text)]
    assert len(ids) == len(FEW)
    return tokenizer.encode(POTATOES), ids


@only_thorough
def test_the_exact_probabilities_are_transformers() -> None:
    prompt, ids = few_ids()
    model = naive.transformers_model(str(find_folder("teachlm")))
    prefixes, weights, found = [prompt], torch.ones(1, dtype=torch.float64), []
    for _ in range(3):
        with torch.inference_mode():
            logits = model(torch.tensor(prefixes)).logits[:, -1, ids]
        joint = weights[:, None] * (logits / TEMPERATURE).softmax(dim=-1)  # [prefixes, ids]
        found.append(joint.sum(dim=0).tolist())
        prefixes, weights = [[*prefix, token] for prefix in prefixes for token in ids], joint.flatten()
    for mine, theirs in zip(EXACT, found[1:], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("method", ["tree", "draft_model"][: times(1, 2)])
def test_random_tokens_are_distributed_as_the_model_says_whoever_drafts(method: str) -> None:
    prompt, ids = few_ids()
    params = [
        SamplingParams(temperature=TEMPERATURE, seed=seed, max_tokens=4, allowed_token_ids=ids, ignore_eos=True)
        for seed in range(NUM_SEEDS)
    ]
    before = len(verified(method))
    outputs = llm(method).generate([{"prompt_token_ids": prompt}] * NUM_SEEDS, params, use_tqdm=False)
    num_drafted, num_accepted = map(sum, zip(*verified(method)[before:], strict=True))
    assert 0.02 * num_drafted < num_accepted < 0.98 * num_drafted
    for place, probabilities in enumerate(EXACT, start=1):
        tokens = [output.outputs[0].token_ids[place] for output in outputs]
        counts = torch.tensor([tokens.count(each) for each in ids], dtype=torch.float64)
        assert counts.sum() == NUM_SEEDS
        assert_follows(counts, torch.tensor(probabilities, dtype=torch.float64))


def assert_follows(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Chi-square at 1 in 10,000, of ids of which five or more are expected and all others as one."""
    expected = counts.sum() * probabilities
    is_common = expected >= 5
    found = torch.cat((counts[is_common], counts[~is_common].sum()[None]))
    wanted = torch.cat((expected[is_common], expected[~is_common].sum()[None]))
    if wanted[-1] < 5:
        found, wanted = found[:-1], wanted[:-1]
    degrees = len(wanted) - 1
    assert degrees >= 3
    statistic = ((found - wanted).square() / wanted).sum().item()
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3  # Wilson and Hilferty
    assert statistic < limit, (found, wanted)


# -- what it is worth ------------------------------------------------------------------------------------------


@only_thorough
@pytest.mark.parametrize(("method", "least"), [("draft_model", 2.5), ("eagle", 3.0), ("medusa", 1.5)])
def test_a_verification_yields_as_many_tokens_as_the_drafters_were_trained_for(method: str, least: float) -> None:
    before = len(verified(method))
    answers(method, replace(GREEDY, max_tokens=100), count=len(QUESTIONS))
    found = verified(method)[before:]
    assert 1 + sum(num_accepted for _, num_accepted in found) / len(found) >= least


# -- elsewhere -------------------------------------------------------------------------------------------------


@only_thorough
def test_a_core_in_its_own_process_speculates_as_well() -> None:
    pytest.importorskip("zmq")
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        max_model_len=256,
        num_gpu_blocks_override=100,
        speculative_config={"adaptive": False} | METHODS["eagle"],  # type: ignore[arg-type]
    )
    engine = Engine(config, own_process=True)
    try:
        engine.count()
        outputs = [engine.add_request(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts()[:6])]
        drain(engine)
        assert_same(outputs, greedy()[:6])
        stats = engine.stats()
        assert stats is not None and stats.num_accepted_tokens > 0.5 * stats.num_draft_tokens > 10
    finally:
        engine.close()
