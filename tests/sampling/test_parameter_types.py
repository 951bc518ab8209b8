"""A value of another type is refused where it is given, and nothing that runs notices."""

from __future__ import annotations

import re
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from teachllm import LLM, SamplingParams
from teachllm.engine.llm_engine import Engine
from tests.worker.engines import drain, make_engine, random_ids, tiny, tokens

WRONG: list[tuple[str, Any]] = [
    *(("seed", value) for value in ("7", 1.5, True, [1])),
    *(("top_k", value) for value in (2.5, "2", True, None)),
    *(("max_tokens", value) for value in (2.5, "3", True, 1 << 63)),
    *(("min_tokens", value) for value in (1.5, None, 1 << 63)),
    *(("n", value) for value in (1.0, "2", True, 10**9)),
    *(
        ("temperature", value)
        for value in ("0", None, True, [0.5], 1j, 10**400, np.bool_(True), np.str_("0.5"), np.complex64(1))
    ),
    ("temperature", torch.tensor([0.5, 0.7])),
    *(("repetition_penalty", value) for value in (10**400, 0)),
    *(("top_p", value) for value in ("1", None)),
    *(("stop", value) for value in (3, ["x", 3], [b"x"], {"x": 1}, "\ud800", ["\ud800"])),
    *(("bad_words", value) for value in ("abc", [3], {"a": 1}, ["\udfff"])),
    *(("stop_token_ids", value) for value in ("12", [1.5], ["1"], [True], {1: 2})),
    *(("allowed_token_ids", value) for value in ([1.5], "12", 7)),
    *(("logit_bias", value) for value in ([1], {1: "2"}, {1.5: 2.0}, {"x": 1}, {1: None}, {5: 10**400})),
    *(("logprobs", value) for value in (1.5, "2", True)),
    *(("ignore_eos", value) for value in (1, "no", None)),
    *(("detokenize", value) for value in (0, "yes")),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=repr)
def test_a_parameter_of_another_type_is_refused_in_one_line(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}=") as error:
        SamplingParams(**{name: value})
    assert "\n" not in str(error.value)


def test_numbers_and_lists_of_other_libraries_are_as_good() -> None:
    plain = SamplingParams(seed=3, top_k=5, temperature=0.5, stop_token_ids=[4, 5], logit_bias={3: 1.5})
    theirs = SamplingParams(
        seed=np.int64(3),
        top_k=torch.tensor(5),
        temperature=np.float32(0.5),
        stop_token_ids=np.array([4, 5]),
        logit_bias={np.int32(3): torch.tensor(1.5)},
    )
    assert plain == theirs
    assert SamplingParams(stop_token_ids=range(4, 6)) == SamplingParams(stop_token_ids=(4, 5))
    assert SamplingParams(stop=(each for each in "ab"), bad_words=map(str, "c")) == SamplingParams(
        stop=("a", "b"), bad_words=("c",)
    )


def test_none_and_minus_one_mean_what_they_mean_in_vllm() -> None:
    nothing = SamplingParams(stop=None, stop_token_ids=None, bad_words=None, seed=None, logit_bias=None)
    assert nothing == SamplingParams() == SamplingParams(seed=-1)


@pytest.fixture(scope="module")
def llm() -> Any:
    with closing(LLM(**tiny())) as llm:
        yield llm


@pytest.fixture(scope="module")
def teachlm() -> Any:
    with closing(LLM("teachlm", device="cpu")) as llm:
        yield llm


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ({"prompt_token_ids": [5], "cache_salt": 3}, {}, "cache_salt=3: must be a string"),
        ({"prompt_token_ids": [5], "cache_salt": "\ud800"}, {}, "cache_salt has half a surrogate pair"),
        ({"prompt_token_ids": [5], "multi_modal_data": {}}, {}, "'multi_modal_data' is not supported"),
        ({"prompt_token_ids": [5], "prompt": "x"}, {}, 'either "prompt" or "prompt_token_ids"'),
        ({"prompt_token_ids": [5.5]}, {}, "prompt token id 5.5 is not in the vocabulary"),
        ({"prompt_token_ids": ["5"]}, {}, "prompt token id '5' is not in the vocabulary"),
        ({"prompt_token_ids": [5] * 96}, {}, "the prompt has 96 tokens and max_model_len=96"),
        ({"prompt_token_ids": [True]}, {}, "not True or False"),
        ({"prompt_token_ids": "5"}, {}, '"prompt_token_ids" a list of token ids'),
        ({"prompt": [5]}, {}, '"prompt" is a text'),
        (b"5", {}, "not bytes"),
        ({"prompt_token_ids": [5]}, {"priority": 1 << 63}, "priority=9223372036854775808: must be"),
        ({"prompt_token_ids": [5]}, {"priority": 1.5}, "priority=1.5: must be"),
        ({"prompt_token_ids": [5]}, {"priority": "1"}, "priority='1': must be"),
    ],
    ids=repr,
)
def test_what_is_refused_leaves_nothing_in_the_engine(llm: LLM, prompt: Any, options: Any, says: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
    good = {"prompt_token_ids": [5, 6, 7]}
    [expected] = llm.generate(good, params, use_tqdm=False)
    num_before = llm.engine.inputs.num_requests
    with pytest.raises(ValueError, match=re.escape(says)):
        llm.generate([good, prompt], params, use_tqdm=False, **options)
    assert not llm.engine.has_unfinished_requests
    # By their number, requests without a seed draw their tokens.
    assert llm.engine.inputs.num_requests - num_before == (0 if options else 1)
    [after] = llm.generate(good, params, use_tqdm=False)
    assert after.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_priority_of_another_type_disturbs_no_neighbour() -> None:
    def run(engine: Engine, *, with_bad_ones: bool) -> list[list[int]]:
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        outputs = []
        for i in range(4):
            outputs.append(engine.add_request(str(i), random_ids(5 + i, seed=i), greedy, priority=-i))
            if with_bad_ones:
                for wrong in (None, "1", 0.5):
                    with pytest.raises(ValueError, match=r"^priority="):
                        engine.add_request(f"bad {i} {wrong}", random_ids(5), greedy, priority=wrong)  # type: ignore[arg-type]
                engine.step()
        drain(engine)
        return [tokens(each)[0] for each in outputs]

    found = [run(make_engine(scheduling_policy="priority"), with_bad_ones=each) for each in (False, True)]
    assert found[0] == found[1]


def test_prompts_with_different_salts_share_no_block_and_those_with_one_do(llm: LLM) -> None:
    ids, params = random_ids(64, seed=9), SamplingParams(temperature=0, max_tokens=2, detokenize=False)

    def cached(salt: str | None) -> int:
        [output] = llm.generate({"prompt_token_ids": ids, "cache_salt": salt}, params, use_tqdm=False)
        return output.num_cached_tokens or 0

    assert [cached(salt) for salt in ("a", "b", None, "a", "b")] == [0, 0, 0, 48, 48]


def test_priorities_of_other_libraries_are_as_good_and_none_is_zero(llm: LLM) -> None:
    params, prompts = SamplingParams(temperature=0, max_tokens=2, detokenize=False), [[5, 6], [7, 8]]
    for priority in (None, 3, np.int64(3), np.array([1, 2]), range(2), (1, 2), [np.int64(1), np.int32(2)]):
        outputs = llm.generate(prompts, params, use_tqdm=False, priority=priority)
        assert len(outputs) == 2


def test_prompts_of_other_libraries_are_as_good(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, detokenize=False)
    expected = [output.prompt_token_ids for output in llm.generate([[5, 6], [7, 8]], params, use_tqdm=False)]
    assert expected == [[5, 6], [7, 8]]
    for prompts in (np.array(expected), torch.tensor(expected), [np.array([5, 6]), torch.tensor([7, 8])]):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == expected
    for one in (np.array([5, 6]), torch.tensor([5, 6])):
        [output] = llm.generate(one, params, use_tqdm=False)
        assert output.prompt_token_ids == [5, 6]


@pytest.mark.parametrize("wrong", [{"temperature": 0}, ["a"]], ids=repr)
def test_what_are_no_sampling_params_are_refused(llm: LLM, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^sampling_params="):
        llm.generate([[5]], wrong, use_tqdm=False)


@pytest.mark.parametrize("wrong", [None, 5, b"text"], ids=repr)
def test_what_are_no_prompts_are_refused(llm: LLM, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^prompts="):
        llm.generate(wrong, use_tqdm=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"messages": None}, "messages=None: must be a conversation"),
        ({"messages": 5}, "messages=5: must be a conversation"),
        ({"messages": [5]}, "a conversation is a list of messages like"),
        ({"chat_template": 5}, "chat_template=5: must be a text"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs=5: must be variables"),
        ({"chat_template_kwargs": {"messages": []}}, "must be variables of the template by name, without messages"),
        ({"tools": "x"}, "tools='x': must be a list of objects"),
        ({"tools": [5]}, "tools=[5]: must be a list of objects"),
    ],
    ids=repr,
)
def test_arguments_of_a_chat_that_are_none_are_refused(teachlm: LLM, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        teachlm.chat(**{"messages": [{"role": "user", "content": "Hi"}]} | arguments)


def test_half_a_surrogate_pair_in_a_message_is_refused(teachlm: LLM) -> None:
    with pytest.raises(ValueError, match=r"^a conversation has half a"):
        teachlm.chat([{"role": "user", "content": "\ud800"}])


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video"])
def test_a_message_with_what_no_language_model_reads_is_refused(teachlm: LLM, kind: str) -> None:
    with pytest.raises(ValueError, match=f"a part of type '{kind}'"):
        teachlm.chat([{"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": kind}]}])
