"""When an output ends, and its text: stop strings, stop tokens, the end of sequence, and limits of length."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from teachllm import LLM, RequestOutput, SamplingParams
from teachllm.engine.llm_engine import Engine
from teachllm.worker.executor import Executor
from tests.engine.reference import reference
from tests.thorough import THOROUGH, times
from tests.worker.engines import DraftingExecutor, assert_clean, complete, make_engine, random_ids, tokens

QUESTION = [{"role": "user", "content": "Who are you?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
both = pytest.mark.parametrize("ahead", [True, False][: times(1, 2)], ids=lambda ahead: "ahead" if ahead else "plain")


@pytest.fixture(scope="module")
def teachlm() -> Iterator[dict[bool, LLM]]:
    """The embedded model, whose greedy answers are text; plain, and running ahead."""
    common = {"device": "cpu", "check_invariants": True, "max_model_len": 512, "num_gpu_blocks_override": 200}
    yield {ahead: LLM("teachlm", async_scheduling=ahead, **common) for ahead in (False, True)}


@pytest.fixture(scope="module")
def whole(teachlm: dict[bool, LLM]) -> RequestOutput:
    """The answer that nothing stops but the model itself."""
    return ask(teachlm[False], logprobs=0)


def ask(llm: LLM, **params: Any) -> RequestOutput:
    [output] = llm.chat(QUESTION, SamplingParams(temperature=0, **({"max_tokens": 60} | params)), use_tqdm=False)
    return output


@pytest.mark.parametrize(("ahead", "include"), [(False, True), (True, False)])
def test_a_stop_string_ends_the_output_wherever_tokens_cut_it(
    teachlm: dict[bool, LLM], whole: RequestOutput, ahead: bool, include: bool
) -> None:
    llm, text, ids = teachlm[ahead], whole.outputs[0].text, whole.outputs[0].token_ids
    assert llm.tokenizer is not None
    pieces = [llm.tokenizer.decode(ids[: i + 1]) for i in range(len(ids))]
    num_across = 0
    for begin in range(1, 60, times(20, 5)):
        stop = text[begin : begin + 5]
        at = text.index(stop)
        num_tokens = next(i for i, piece in enumerate(pieces, start=1) if stop in piece)
        num_across += at < len(pieces[num_tokens - 2]) < at + 5
        before = llm.engine.core.scheduler.num_steps
        output = ask(llm, stop=["never", stop], include_stop_str_in_output=include).outputs[0]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.text == text[: at + 5 * include]
        assert output.token_ids == ids[:num_tokens]
        # The core ends it too: one step for the prompt, one a token, and running ahead one whose token is dropped.
        assert llm.engine.core.scheduler.num_steps - before <= num_tokens + ahead
        assert_clean(llm.engine)
    assert num_across > 0
    output = ask(llm, stop=text[0]).outputs[0]
    assert (output.text, len(output.token_ids), output.stop_reason) == ("", 1, text[0])


def test_a_stop_string_inside_accepted_drafts_drops_the_tokens_after_it(
    teachlm: dict[bool, LLM], whole: RequestOutput
) -> None:
    llm, ids = teachlm[False], whole.outputs[0].token_ids

    def make(_: Any, inner: Executor) -> Executor:
        return DraftingExecutor(inner, lambda _, num_outputs: ids[num_outputs : num_outputs + 7])

    engine = Engine(llm.config, make_executor=make)
    for begin in (5, 25):
        stop = whole.outputs[0].text[begin : begin + 4]
        expected = ask(llm, stop=stop, logprobs=0).outputs[0]
        params = SamplingParams(temperature=0, max_tokens=60, stop=stop, logprobs=0)
        output = complete(engine, whole.prompt_token_ids, params).outputs[0]
        assert (output.text, output.token_ids, output.stop_reason) == (expected.text, expected.token_ids, stop)
        assert len(output.logprobs or ()) == len(output.token_ids)
        assert output.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-3)
    assert_clean(engine)


def test_n_completions_stop_each_at_its_own_place(teachlm: dict[bool, LLM]) -> None:
    llm = teachlm[True]
    params = SamplingParams(n=4, temperature=1.5, seed=1, max_tokens=16, ignore_eos=True, logprobs=1)
    [whole] = llm.chat(QUESTION, params, use_tqdm=False)
    stop = whole.outputs[0].text[12:16]
    [output] = llm.chat(QUESTION, replace(params, stop=stop), use_tqdm=False)
    for before, after in zip(whole.outputs, output.outputs, strict=True):
        assert after.text == before.text.partition(stop)[0]
        assert after.finish_reason == ("stop" if stop in before.text else "length")
        assert after.token_ids == before.token_ids[: len(after.token_ids)]
        assert after.logprobs is not None and len(after.logprobs) == len(after.token_ids)
    assert len({len(completion.token_ids) for completion in output.outputs}) > 1
    assert_clean(llm.engine)


@both
def test_min_tokens_puts_off_stop_strings_and_the_end_of_sequence(
    teachlm: dict[bool, LLM], whole: RequestOutput, ahead: bool
) -> None:
    llm, first = teachlm[ahead], whole.outputs[0]
    ends = llm.engine.model_config.eos_token_ids
    assert (first.finish_reason, first.stop_reason) == ("stop", None) and first.token_ids[-1] in ends
    stop = first.text[4:8]
    early = len(ask(llm, stop=stop).outputs[0].token_ids)
    late = ask(llm, stop=stop, min_tokens=early + 1, max_tokens=16).outputs[0]
    assert len(late.token_ids) > early and late.text.startswith(first.text[:8])
    longer = ask(llm, min_tokens=len(first.token_ids) + 3, max_tokens=len(first.token_ids) + 6).outputs[0]
    assert len(longer.token_ids) >= len(first.token_ids) + 3
    assert not ends & set(longer.token_ids[: len(first.token_ids) + 2])


@both
def test_ignore_eos_goes_on_to_max_tokens(teachlm: dict[bool, LLM], whole: RequestOutput, ahead: bool) -> None:
    first = whole.outputs[0]
    end = first.token_ids[-1]
    further = ask(teachlm[ahead], ignore_eos=True, max_tokens=40).outputs[0]
    assert further.token_ids[: len(first.token_ids)] == first.token_ids
    assert (len(further.token_ids), further.finish_reason, further.stop_reason) == (40, "length", None)
    named = ask(teachlm[ahead], ignore_eos=True, stop_token_ids=[end]).outputs[0]
    assert (named.token_ids, named.finish_reason, named.stop_reason) == (first.token_ids, "stop", end)
    assert named.text == first.text


@both
def test_a_stop_token_ends_the_output_and_is_its_last_id(ahead: bool) -> None:
    engine = make_engine(async_scheduling=ahead)
    whole = tokens(complete(engine, random_ids(9), replace(GREEDY, max_tokens=30)))[0]
    stop = whole[10]
    output = complete(engine, random_ids(9), replace(GREEDY, max_tokens=30, stop_token_ids=[stop, 511])).outputs[0]
    assert output.token_ids == whole[: whole.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason, output.text) == ("stop", stop, "")
    late = complete(engine, random_ids(9), replace(GREEDY, max_tokens=30, stop_token_ids=[stop], min_tokens=20))
    assert stop not in tokens(late)[0][:19] and len(tokens(late)[0]) >= 20
    assert_clean(engine)


@both
def test_without_max_tokens_an_output_runs_to_max_model_len(ahead: bool) -> None:
    engine = make_engine(async_scheduling=ahead)
    for length in (1, 33, 95) if THOROUGH else (33, 95):
        output = complete(engine, random_ids(length), replace(GREEDY, max_tokens=None))
        assert (len(tokens(output)[0]), output.outputs[0].finish_reason) == (96 - length, "length")
        reference("qwen3").judge_outputs([output])
    assert_clean(engine)


def test_the_text_is_what_the_tokenizer_makes_of_all_ids(teachlm: dict[bool, LLM], whole: RequestOutput) -> None:
    llm = teachlm[False]
    assert llm.tokenizer is not None
    prompts = ["A", "1. One\n2.", "Ünïcödé 模型", "def f(x):"]
    for skip in (True, False):
        params = SamplingParams(
            temperature=3.0, max_tokens=times(8, 40), seed=1, skip_special_tokens=skip, ignore_eos=True
        )
        for output in llm.generate(prompts, params, use_tqdm=False):
            completion = output.outputs[0]
            ids = output.prompt_token_ids
            text = llm.tokenizer.decode(ids + completion.token_ids, skip_special_tokens=skip)
            assert text == llm.tokenizer.decode(ids, skip_special_tokens=skip) + completion.text
    without, first = ask(llm, detokenize=False).outputs[0], whole.outputs[0]
    assert (without.token_ids, without.text) == (first.token_ids, "") and first.text


def test_logprobs_carry_the_text_of_their_tokens(teachlm: dict[bool, LLM]) -> None:
    completion = ask(teachlm[False], logprobs=2, max_tokens=5).outputs[0]
    assert completion.logprobs is not None
    chosen = [entries[i].decoded_token for entries, i in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert "".join(text or "" for text in chosen) == completion.text


def test_bad_words_do_not_appear(teachlm: dict[bool, LLM], whole: RequestOutput) -> None:
    banned = sorted(re.findall(r"[a-z]+", whole.outputs[0].text), key=len)[-3:]
    output = ask(teachlm[False], bad_words=banned).outputs[0]
    assert output.text and not any(word in output.text for word in banned)
