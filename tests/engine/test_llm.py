"""LLM, as vLLM's users know it: prompts in any form, results in order, and nothing left behind by what fails."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teachllm import LLM, RequestOutput, SamplingParams
from teachllm.engine.llm_engine import Engine
from teachllm.worker.executor import Executor
from tests.engine.reference import reference
from tests.pairwise import pairwise
from tests.thorough import THOROUGH
from tests.worker.engines import FaultyExecutor, drain, make_llm, num_used_blocks, random_ids, tiny, tokens

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
QUESTION = [{"role": "user", "content": "What is a KV cache?"}]


@pytest.fixture(scope="module")
def teachlm() -> LLM:
    return LLM("teachlm", device="cpu", check_invariants=True, num_gpu_blocks_override=200, max_model_len=1024)


def generate(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def assert_clean(llm: LLM) -> None:
    assert not llm.engine.has_unfinished_requests
    assert num_used_blocks(llm.engine) == 0


# -- prompts and parameters --------------------------------------------------------------------------------


def test_a_prompt_may_be_a_string_a_dictionary_or_ids_alone_or_in_a_list(teachlm: LLM) -> None:
    text = "A KV cache keeps"
    assert teachlm.tokenizer is not None
    ids = teachlm.tokenizer.encode(text)
    as_text: list[Any] = [text, [text], (text,), {"prompt": text}, [{"prompt": text}]]
    as_ids: list[Any] = [ids, [ids], [tuple(ids)], {"prompt_token_ids": ids}, [{"prompt_token_ids": tuple(ids)}]]
    as_ids += [np.array(ids), [np.array(ids)], {"prompt_token_ids": np.array(ids)}]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    expected = generate(teachlm, text, params)[0].outputs[0]
    assert len(expected.token_ids) == 2 and expected.finish_reason == "length"
    for prompts, is_text in [*((each, True) for each in as_text), *((each, False) for each in as_ids)]:
        [output] = generate(teachlm, prompts, params)
        assert output.prompt == (text if is_text else None)
        assert output.outputs[0] == expected
        assert output.prompt_token_ids == ids and all(type(token_id) is int for token_id in output.prompt_token_ids)


def test_a_list_may_mix_strings_and_ids(teachlm: LLM) -> None:
    outputs = generate(teachlm, ["Paged attention", [5, 6, 7], {"prompt_token_ids": [8, 9]}])
    assert [output.prompt for output in outputs] == ["Paged attention", None, None]
    assert [output.prompt_token_ids for output in outputs[1:]] == [[5, 6, 7], [8, 9]]


def test_an_empty_list_of_prompts_gives_an_empty_list() -> None:
    llm = make_llm()
    assert generate(llm, []) == []
    assert llm.chat([], GREEDY, use_tqdm=False) == []


def test_results_come_in_order_whatever_finishes_first() -> None:
    llm = make_llm(max_num_seqs=3)
    lengths = [20, 1, 9, 3, 30, 2]
    prompts = [random_ids(5 + i, seed=i) for i in range(6)]
    params = [SamplingParams(temperature=0, max_tokens=length) for length in lengths]
    outputs = generate(llm, prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    reference("qwen3").judge_outputs(outputs)
    assert_clean(llm)


def test_as_many_parameters_as_prompts_or_one_for_all() -> None:
    llm = make_llm()
    with pytest.raises(ValueError, match="3 prompts and 2 sampling_params: give one for all, or one each"):
        generate(llm, [[1], [2], [3]], [GREEDY, GREEDY])
    assert_clean(llm)


def test_without_parameters_the_checkpoint_decides(tmp_path: Path) -> None:
    folder = shutil.copytree(reference("qwen3").path, tmp_path / "model")
    recommended = {"temperature": 0.0, "top_k": 5, "max_new_tokens": 6, "eos_token_id": None}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    llm = make_llm(model=str(folder))
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, top_k=5, max_tokens=6)
    outputs = llm.generate([random_ids(5)], use_tqdm=False)
    assert len(outputs[0].outputs[0].token_ids) == 6
    reference("qwen3").judge_outputs(outputs)


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(ValueError, match=r"LLM has no setting 'max_num_sequences'; it has model, .*max_num_seqs"):
        LLM("teachlm", max_num_sequences=4)


# -- what a result holds -----------------------------------------------------------------------------------


def test_the_same_prompt_again_is_cached_but_for_its_last_token() -> None:
    llm = make_llm()
    for length, cached in ((1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (40, 32)):
        llm.engine.reset_prefix_cache()
        first, second = (generate(llm, [random_ids(length)])[0] for _ in range(2))
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cached)
        assert tokens(first) == tokens(second)
        reference("qwen3").judge_outputs([second])


def test_the_tokens_of_an_answer_are_cached_too() -> None:
    llm = make_llm()
    [first] = generate(llm, [random_ids(20)], SamplingParams(temperature=0, max_tokens=30))
    [second] = generate(llm, [first.prompt_token_ids + tokens(first)[0] + [7]])
    assert second.num_cached_tokens == 48  # of 51; the last sampled token was never computed
    reference("qwen3").judge_outputs([second])


def test_without_prefix_caching_nothing_is_cached() -> None:
    llm = make_llm(enable_prefix_caching=False)
    assert [generate(llm, [random_ids(40)])[0].num_cached_tokens for _ in range(2)] == [0, 0]


# -- n and seeds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_completions_of_one_prompt_differ_and_share_its_blocks(caching: bool) -> None:
    llm = make_llm(enable_prefix_caching=caching)
    params = SamplingParams(n=3, temperature=1.0, max_tokens=6, seed=1)
    llm.engine.add_request("a", random_ids(40), params)
    llm.engine.step()
    assert num_used_blocks(llm.engine) == 2 + 3  # two full blocks for all, one of each its own
    output = drain(llm.engine)["a"]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(ids) for ids in tokens(output)}) == 3
    assert_clean(llm)


def test_greedy_completions_of_one_prompt_are_equal() -> None:
    [output] = generate(make_llm(), [random_ids(20)], SamplingParams(n=2, temperature=0, max_tokens=8))
    assert tokens(output)[0] == tokens(output)[1]
    reference("qwen3").judge_outputs([output])


def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it() -> None:
    prompt, params = random_ids(20), SamplingParams(temperature=1.0, max_tokens=12, seed=5)
    alone = tokens(generate(make_llm(), [prompt], params)[0])
    assert len(set(alone[0])) > 6
    for position, settings in ((0, {"max_num_batched_tokens": 9}), (4, {"max_num_seqs": 2, "block_size": 3})):
        others = [random_ids(3 + 14 * i, seed=i) for i in range(5)]
        batch = [*others[:position], prompt, *others[position:]]
        beside = [SamplingParams(temperature=0.7, top_k=9, max_tokens=4 + i) for i in range(6)]
        beside[position] = params
        outputs = generate(make_llm(**settings), batch, beside)
        assert tokens(outputs[position]) == alone


def test_another_seed_or_another_child_gives_other_tokens() -> None:
    llm, prompt = make_llm(), random_ids(20)
    seen = []
    for seed in (0, 1, 2**40, -1):
        [output] = generate(llm, [prompt], SamplingParams(n=2, temperature=1.0, max_tokens=12, seed=seed))
        seen += tokens(output)
    assert len({tuple(ids) for ids in seen}) == 8


def test_the_first_of_n_completions_is_the_one_that_comes_alone() -> None:
    llm, prompt = make_llm(), random_ids(20)
    alone, three = (
        generate(llm, [prompt], SamplingParams(n=n, temperature=1.0, max_tokens=9, seed=3))[0] for n in (1, 3)
    )
    assert tokens(three)[0] == tokens(alone)[0]


def test_the_engines_seed_fixes_what_requests_leave_open() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=10)
    prompts = [random_ids(8)] * 3

    def run(seed: int) -> list[list[list[int]]]:
        return [tokens(output) for output in generate(make_llm(seed=seed), prompts, params)]

    first = run(7)
    assert first == run(7)
    assert first != run(8)
    assert len({str(ids) for ids in first}) == 3  # not one seed for all


# -- what fails leaves nothing behind ----------------------------------------------------------------------


def test_one_refused_prompt_leaves_the_engine_clean() -> None:
    llm = make_llm()
    for bad, message in ((random_ids(200), "200 tokens"), ([], "empty"), ([5, 512], "512"), ("text", "skip_tokenizer")):
        with pytest.raises(ValueError, match=message):
            generate(llm, [random_ids(5), random_ids(40), bad, random_ids(6)])
        assert_clean(llm)
    reference("qwen3").judge_outputs(generate(llm, [random_ids(40)]))


def test_a_refused_batch_does_not_touch_the_requests_of_others() -> None:
    for prompts in ([random_ids(5), random_ids(200)], [random_ids(5), random_ids(5)]):
        llm = make_llm()
        llm.engine.add_request("2", random_ids(9), GREEDY)  # an id that `generate` will take as well
        with pytest.raises(ValueError):
            generate(llm, prompts)
        assert [output.outputs[0].finish_reason for output in drain(llm.engine).values()] == ["length"]
        assert_clean(llm)


@pytest.mark.parametrize(
    "case",
    pairwise(point=FaultyExecutor.POINTS, ahead=[False, True], kind=[KeyboardInterrupt, RuntimeError]),
    ids=lambda case: f"{case['kind'].__name__}, {case['point']}, {case['ahead']}",
)
def test_ctrl_c_or_a_failure_ends_the_batch_and_the_next_one_works(
    monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]
) -> None:
    countdown, point, kind = [5], case["point"], case["kind"]

    def fault(where: str) -> BaseException | None:
        countdown[0] -= where == point
        return kind("now") if where == point and countdown[0] == 0 else None

    def with_faults(config: Any, **arguments: Any) -> Engine:
        def wrap(_: Any, inner: Executor) -> Executor:
            return FaultyExecutor(inner, fault)

        return Engine(config, make_executor=wrap, **arguments)

    monkeypatch.setattr("teachllm.engine.llm.Engine", with_faults)
    llm = make_llm(async_scheduling=case["ahead"])
    prompts = [random_ids(30 + i, seed=i) for i in range(5)]
    with pytest.raises(kind, match="now"):
        generate(llm, prompts)
    assert_clean(llm)
    reference("qwen3").judge_outputs(generate(llm, prompts))
    assert_clean(llm)


# -- chat --------------------------------------------------------------------------------------------------


def test_chat_answers_one_conversation_or_several(teachlm: LLM) -> None:
    other = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    params = SamplingParams(temperature=0, max_tokens=8)
    [one] = teachlm.chat(QUESTION, params, use_tqdm=False)
    both = teachlm.chat([QUESTION, other], params, use_tqdm=False)
    assert both[0].outputs[0].text == one.outputs[0].text
    assert one.outputs[0].text
    assert teachlm.tokenizer is not None
    assert both[1].prompt_token_ids == teachlm.tokenizer.apply_chat_template(other)


def test_tools_and_other_template_arguments_reach_the_prompt(teachlm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "count_blocks", "parameters": {"type": "object"}}}]
    assert teachlm.tokenizer is not None

    def prompt(**arguments: Any) -> str:
        [output] = teachlm.chat(QUESTION, replace(GREEDY, max_tokens=1), use_tqdm=False, **arguments)
        assert teachlm.tokenizer is not None
        return teachlm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    assert "count_blocks" in prompt(tools=tools) and "count_blocks" not in prompt()
    template = "{{ mood }}: {{ messages[0].content }}"
    assert prompt(chat_template=template, chat_template_kwargs={"mood": "calm"}) == "calm: What is a KV cache?"
    assert prompt(add_generation_prompt=False) + "<|im_start|>assistant\n" == prompt()


def test_a_template_that_fails_is_one_clear_line_and_disturbs_nothing(teachlm: LLM) -> None:
    with pytest.raises(ValueError, match=r"^the chat template failed: TemplateError: no such role$"):
        teachlm.chat([QUESTION, QUESTION], GREEDY, False, chat_template="{{ raise_exception('no such role') }}")
    with pytest.raises(ValueError, match="the chat template failed: TemplateSyntaxError"):
        next(teachlm.stream_chat(QUESTION, GREEDY, chat_template="{% if %}"))
    with pytest.raises(ValueError, match="a conversation is a list of messages"):
        teachlm.chat("What is a KV cache?", GREEDY, False)  # type: ignore[arg-type]
    assert_clean(teachlm)


def test_chat_without_a_tokenizer_says_what_to_set() -> None:
    with pytest.raises(ValueError, match="chat needs a tokenizer: set skip_tokenizer_init=False"):
        make_llm().chat(QUESTION, GREEDY, use_tqdm=False)


# -- streams -----------------------------------------------------------------------------------------------


def test_a_stream_grows_to_what_chat_answers(teachlm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts, lengths = [], []
    for output in teachlm.stream_chat(QUESTION, params):
        texts.append(output.outputs[0].text)
        lengths.append(len(output.outputs[0].token_ids))
    assert lengths == list(range(1, 13))
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    [whole] = teachlm.chat(QUESTION, params, use_tqdm=False)
    assert texts[-1] == whole.outputs[0].text and output.outputs[0] == whole.outputs[0]
    assert_clean(teachlm)


@pytest.mark.parametrize("ahead", [False, True] if THOROUGH else [True])
def test_closing_a_stream_aborts_it_and_frees_its_blocks(ahead: bool) -> None:
    llm = LLM("teachlm", device="cpu", async_scheduling=ahead, check_invariants=True, max_model_len=256)
    stream = llm.stream_chat(QUESTION, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    output = next(stream)
    assert num_used_blocks(llm.engine) > 0
    stream.close()
    assert output.outputs[0].finish_reason == "abort"
    llm.engine.step()  # running ahead: the plan in flight still has to come back
    assert_clean(llm)


def test_a_stream_that_is_never_started_holds_nothing(teachlm: LLM) -> None:
    teachlm.stream_chat(QUESTION, GREEDY).close()
    assert_clean(teachlm)


def test_streams_and_batches_beside_each_other_lose_nothing(teachlm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    other = [{"role": "user", "content": "What is a block table?"}]
    expected = [output.outputs[0].text for output in teachlm.chat([QUESTION, other], params, use_tqdm=False)]
    first, second = teachlm.stream_chat(QUESTION, params), teachlm.stream_chat(other, params)
    next(first), next(second), next(first)
    generate(teachlm, "Hello", SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    # Both have been finished by the batch's steps; each stream still shows its end.
    for stream, text in ((first, expected[0]), (second, expected[1])):
        shown = [output.outputs[0].text for output in stream]
        assert shown and shown[-1] == text
    assert_clean(teachlm)


def test_settings_are_shown_as_resolved() -> None:
    llm = LLM(**tiny(max_model_len=None))
    assert llm.config.max_model_len == 512 and llm.config.enable_prefix_caching is True
    assert llm.config.device == "cpu"


def test_a_closed_engine_says_so() -> None:
    llm = make_llm()
    llm.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        generate(llm, [[1, 2]])
