"""Plans and outputs cross between processes unchanged, to the last bit."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm import SamplingParams
from teachllm.core.scheduler_output import (
    ModelRunnerOutput,
    NewRow,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from teachllm.worker.processes.plan_codec import decode_output, decode_plan, encode_output, encode_plan
from tests.request_kinds import KINDS
from tests.thorough import times

IDS = st.integers(0, 2**31 - 1)
ID_LISTS = st.lists(IDS, max_size=5)
NAMES = st.text("aé模😀\n\x00\ud800", max_size=8)  # a lone surrogate too
FINITE = st.floats(-50, 50)
PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 4),
    temperature=st.floats(0, 10),
    top_p=st.floats(1e-9, 1.0),
    presence_penalty=st.floats(-2, 2),
    logit_bias=st.none() | st.dictionaries(IDS, FINITE, max_size=3),
    seed=st.none() | st.integers(-(2**70), 2**70),
    max_tokens=st.none() | st.integers(4, 9),
    min_tokens=st.integers(0, 4),
    stop=st.none() | st.just("end") | st.lists(st.text("aé模", min_size=1, max_size=5), max_size=2),
    stop_token_ids=ID_LISTS | ID_LISTS.map(tuple),
    allowed_token_ids=st.none() | st.lists(IDS, min_size=1, max_size=3),
    logprobs=st.none() | st.integers(0, 5),
)
ROWS = st.builds(
    NewRow,
    token_ids=ID_LISTS,
    num_prompt_tokens=st.integers(1, 99),
    sampling_params=PARAMS,
    child_index=st.integers(0, 5),
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=st.frozensets(IDS, max_size=3),
    bad_word_token_ids=st.lists(ID_LISTS.map(tuple), max_size=2).map(tuple),
)
SHARES = st.builds(
    ScheduledRequest,
    request_id=NAMES,
    start=st.integers(-1, 2**40),
    num_tokens=st.integers(1, 2**20),
    draft_token_ids=st.lists(st.integers(-1, 2**31), max_size=4),
    samples=st.booleans(),
    first_new_block=st.integers(0, 2**20),
    new_block_ids=ID_LISTS,
    new_row=st.none() | ROWS,
    num_next_drafts=st.integers(0, 16),
    why=st.none() | st.text("aé模", max_size=4),
)
PLANS = st.builds(
    SchedulerOutput,
    step=st.integers(-1, 2**60),
    scheduled=st.lists(SHARES, max_size=5),
    dropped=st.lists(NAMES, max_size=3),
    preempted=st.lists(NAMES, max_size=2),
)


@st.composite
def token_logprobs(draw: Any) -> TokenLogprobs:
    top = draw(ID_LISTS)
    values = [draw(st.floats()) for _ in range(1 + len(top))]  # infinite and no numbers, too
    return TokenLogprobs(draw(IDS), values[0], draw(IDS), top, values[1:])


SCORES = st.none() | st.lists(st.none() | st.lists(token_logprobs(), max_size=3), max_size=4)
OUTPUTS = st.builds(
    ModelRunnerOutput,
    sampled_token_ids=st.lists(ID_LISTS, max_size=6),
    logprobs=SCORES,
    prompt_logprobs=SCORES,
    num_drafted=st.none() | ID_LISTS,
    draft_token_ids=st.none() | st.lists(st.lists(st.integers(-1, 9), max_size=3), max_size=4),
    seconds=st.none() | st.floats(),
    expert_load=st.none() | st.lists(st.lists(st.integers(0, 2**40))),
    graph_mode=st.none() | st.sampled_from(["full", "piecewise", "eager", ""]),
)


@settings(max_examples=times(25, 500))
@given(PLANS)
def test_a_plan_comes_back_as_it_was(plan: SchedulerOutput) -> None:
    assert decode_plan(encode_plan(plan)) == (plan, [])
    told = [(7, [[1], [], [2, 3]]), (8, [])]
    assert decode_plan(encode_plan(plan, told)) == (plan, told)


@settings(max_examples=times(25, 500))
@given(OUTPUTS)
def test_an_output_comes_back_as_it_was(output: ModelRunnerOutput) -> None:
    assert repr(decode_output(encode_output(output))) == repr(output)  # as text no number is equal to itself


@pytest.mark.parametrize("asked", KINDS.values(), ids=KINDS)
def test_every_parameter_comes_back_as_it_was(asked: dict[str, Any]) -> None:
    row = NewRow([1, 2], 2, SamplingParams(**asked), 0, 5, frozenset())
    plan = SchedulerOutput(0, [ScheduledRequest("a", 0, 2, [], True, 0, [5], row)])
    assert decode_plan(encode_plan(plan)) == (plan, [])


def test_what_stands_for_a_list_arrives_as_a_tuple() -> None:
    params = SamplingParams(allowed_token_ids=range(4), bad_words=("a", "b"))
    row = NewRow(array("q", [1, 2]), 2, params, 0, 2**64 - 1, frozenset())
    plan = SchedulerOutput(0, [ScheduledRequest("a", 0, 2, [], True, 0, [5], row)])
    new = decode_plan(encode_plan(plan))[0].scheduled[0].new_row
    assert new is not None and new.token_ids == [1, 2] and new.seed == 2**64 - 1
    assert new.sampling_params.allowed_token_ids == (0, 1, 2, 3)
    assert new.sampling_params.bad_words == ("a", "b")
