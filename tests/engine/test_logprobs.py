"""Log-probabilities of sampled and of prompt tokens are the reference model's, however a request is scheduled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from teachllm import RequestOutput, SamplingParams
from teachllm.outputs import Logprob
from tests.engine.reference import reference
from tests.worker.engines import complete, drain, make_engine, make_llm, num_used_blocks, random_ids, tokens

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def check_logprobs(entries: dict[int, Logprob], logits: torch.Tensor, token_id: int, num_top: int) -> None:
    """Compare one position's entries with the reference's logits [vocab_size]."""
    expected = logits.log_softmax(dim=-1)
    assert token_id in entries and len(entries) in (max(num_top, 1), num_top + 1)
    for found, logprob in entries.items():
        assert logprob.logprob == pytest.approx(float(expected[found]), abs=1e-4)
        # Tokens closer than the rounding of float32 may change places.
        least = int((expected > expected[found] + 1e-4).sum()) + 1
        most = int((expected > expected[found] - 1e-4).sum()) + 1
        assert least <= logprob.rank <= most
    assert next(iter(entries)) == token_id
    likeliest = [logprob for found, logprob in entries.items() if found != token_id or logprob.rank <= num_top]
    likeliest.sort(key=lambda logprob: logprob.rank)
    assert [logprob.rank for logprob in likeliest] == list(range(1, num_top + 1))
    others = [logprob.rank for found, logprob in entries.items() if found != token_id]
    assert others == sorted(others)
    values = [logprob.logprob for logprob in likeliest]
    assert values == sorted(values, reverse=True)


def check_prompt_logprobs(output: RequestOutput, name: str, num_top: int) -> None:
    prompt = output.prompt_token_ids
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    logits = reference(name).logits(prompt[:1], prompt[1:])
    for i, entries in enumerate(output.prompt_logprobs[1:]):
        assert entries is not None
        check_logprobs(entries, logits[i], prompt[i + 1], num_top)


def test_logprobs_are_the_reference_models_for_each_request_as_many_as_it_asked_for() -> None:
    """Before penalties, temperature and filters, and in batches where others ask for more, for fewer, for none."""
    llm = make_llm(max_num_batched_tokens=32)
    wanted = [3, None, 0, 20, 1, None]
    common = {"temperature": 1.5, "top_k": 40, "repetition_penalty": 1.3, "max_tokens": 14, "seed": 0}
    params = [SamplingParams(logprobs=count, **common) for count in wanted]
    outputs = llm.generate([random_ids(12 + 5 * i, seed=i) for i in range(6)], params, use_tqdm=False)
    for output, count in zip(outputs, wanted, strict=True):
        completion = output.outputs[0]
        if count is None:
            assert (completion.logprobs, completion.cumulative_logprob) == (None, None)
            continue
        assert completion.logprobs is not None
        logits = reference("qwen3").logits(output.prompt_token_ids, completion.token_ids)
        for i, entries in enumerate(completion.logprobs):
            check_logprobs(entries, logits[i], completion.token_ids[i], count)
        chosen = [entries[i].logprob for entries, i in zip(completion.logprobs, completion.token_ids, strict=True)]
        assert completion.cumulative_logprob == pytest.approx(sum(chosen))


@pytest.mark.parametrize(("name", "ahead"), [("qwen3", True), ("mistral", False)])
def test_prompt_logprobs_are_complete_however_the_prompt_is_chunked(name: str, ahead: bool) -> None:
    engine = make_engine(name, max_num_batched_tokens=8, async_scheduling=ahead)
    outputs = [
        engine.add_request(
            str(length), random_ids(length, seed=length), replace(GREEDY, prompt_logprobs=3, max_tokens=2)
        )
        for length in (1, 2, 8, 9, 40, 17)
    ]
    drain(engine)
    for output in outputs:
        check_prompt_logprobs(output, name, 3)


def test_prompt_logprobs_do_not_read_the_cache_but_fill_it() -> None:
    engine, prompt = make_engine(), random_ids(40)
    for expected, params in (
        (0, GREEDY),
        (0, replace(GREEDY, prompt_logprobs=0)),
        (32, GREEDY),
    ):
        output = complete(engine, prompt, params)
        assert output.num_cached_tokens == expected
        assert (output.prompt_logprobs is None) == (params.prompt_logprobs is None)
    engine = make_engine()
    check_prompt_logprobs(complete(engine, prompt, replace(GREEDY, prompt_logprobs=0)), "qwen3", 0)
    assert complete(engine, prompt, GREEDY).num_cached_tokens == 32


@pytest.mark.parametrize("ahead", [False, True])
def test_prompt_logprobs_are_there_once_after_preemption_and_with_n_completions(ahead: bool) -> None:
    engine = make_engine(num_gpu_blocks_override=7, max_num_batched_tokens=16, async_scheduling=ahead)
    params = replace(GREEDY, prompt_logprobs=2, max_tokens=20, n=2)
    outputs = [engine.add_request(str(i), random_ids(38 + i, seed=i), params) for i in range(3)]
    drain(engine)
    assert engine.core.scheduler.num_preemptions > 0
    for output in outputs:
        check_prompt_logprobs(output, "qwen3", 2)
        assert [len(ids) for ids in tokens(output)] == [20, 20]
    reference("qwen3").judge_outputs(outputs)


def test_one_of_n_completions_scores_the_prompt_and_the_others_share_its_blocks() -> None:
    engine = make_engine()
    output = engine.add_request("a", random_ids(40), replace(GREEDY, prompt_logprobs=1, n=2))
    engine.step()
    assert num_used_blocks(engine) == 2 + 2
    drain(engine)
    check_prompt_logprobs(output, "qwen3", 1)
