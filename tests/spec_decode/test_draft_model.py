"""A draft model in the engine continues as it would by itself, however long it was not asked, and whoever computed
the blocks that it finds."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from teachllm.core.request import Request
from teachllm.engine.llm_engine import Engine
from teachllm.models.checkpoint import find_folder
from teachllm.sampling_params import SamplingParams
from tests.checkpoints import VOCAB_SIZE
from tests.engine.reference import reference
from tests.spec_decode import naive
from tests.spec_decode.drafters import draft_model
from tests.spec_decode.listening import Heard, assert_naive, listen
from tests.spec_decode.scenarios import SCENARIOS, TREE, answer, make, play, prompts_of

EMBEDDED = {"method": "draft_model", "model": "teachlm-draft"}


@cache
def theirs(folder: str) -> naive.Naive:
    return naive.draft_model(naive.transformers_model(folder))


def embedded() -> naive.Naive:
    return theirs(str(find_folder("teachlm-draft")))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_embedded_draft_model_drafts_what_transformers_computes(scenario: str) -> None:
    listening = play(scenario, EMBEDDED)
    assert listening.some_fell_and_some_held
    assert_naive(listening.heard, embedded())


@pytest.mark.parametrize("scenario", ["several chunks", "preemption"])
def test_each_node_of_a_tree_is_drawn_from_what_follows_its_own_path(scenario: str) -> None:
    listening = play(scenario, EMBEDDED | TREE)
    assert listening.some_fell_and_some_held
    assert_naive(listening.heard, embedded())


def test_its_drafts_are_the_greedy_continuation_of_transformers() -> None:
    heard = play("one chunk", EMBEDDED).heard[::7]
    model = naive.transformers_model(str(find_folder("teachlm-draft")))
    for each in heard:
        made = model.generate(torch.tensor([each.known]), max_new_tokens=3, do_sample=False, eos_token_id=None)
        assert each.drafts == made[0, len(each.known) :].tolist()[: len(each.drafts)]


@pytest.mark.parametrize("family", ["gemma2", "mistral", "llama_dynamic"])
def test_a_draft_model_of_another_family_has_its_own_layers_windows_and_code(family: str) -> None:
    folder = draft_model(family)
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (19, 24, 33, 40)]
    speculation = {"method": "draft_model", "model": folder}
    settings: dict[str, Any] = {"model": reference("qwen3").path, "skip_tokenizer_init": True}
    heard = play("several chunks", speculation, prompts, **settings).heard
    assert_naive(heard, theirs(folder))


# -- being asked now and then ----------------------------------------------------------------------------------


class Pattern:
    """A `DraftLength` that says these numbers, one a step, and from then on the last of them."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = list(numbers)

    def choose(self, requests: Sequence[Request], num_tokens: int) -> list[tuple[int, str]]:
        number = self._numbers.pop(0) if len(self._numbers) > 1 else self._numbers[0]
        return [(number, "so it goes")] * len(requests)

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None: ...


def heard_with(engine: Engine, numbers: Iterable[int], prompts: Sequence[list[int]], num_output: int) -> list[Heard]:
    """What is drafted for some prompts if so many are asked for, step by step."""
    engine.core.scheduler.draft_length = Pattern(numbers)
    listening = listen(engine)
    answer(engine, prompts, num_output)
    return listening.heard


@pytest.mark.parametrize(
    "speculation", [EMBEDDED, {"method": "eagle", "model": "teachlm-eagle"}], ids=["model", "eagle"]
)
def test_after_a_while_without_being_asked_it_has_caught_up(speculation: dict[str, Any]) -> None:
    engine = make(speculation, max_num_batched_tokens=20)
    prompts = prompts_of(engine)[::2]
    heard = heard_with(engine, [0] * 9 + [2] * 3 + [0] * 10 + [3], prompts, 36)
    lengths = [len(each.known) for each in heard if each.known[:18] == prompts[0][:18]]
    assert lengths[0] > len(prompts[0]) + 1  # not asked in the beginning
    assert any(b - a > 8 for a, b in pairwise(lengths))  # nor in the middle
    if speculation is EMBEDDED:
        assert_naive(heard, embedded())
        return
    model = naive.transformers_model(str(find_folder("teachlm")))
    states = naive.States(model)
    assert_naive(heard, naive.eagle(*naive.read(find_folder("teachlm-eagle")), model, states), states)


def test_of_requests_that_are_asked_for_more_or_less_or_nothing_each_gets_its_own() -> None:
    class Each(Pattern):
        def choose(self, requests: Sequence[Request], num_tokens: int) -> list[tuple[int, str]]:
            return [((len(request.token_ids) + int(request.request_id)) % 4, "in turn") for request in requests]

    engine = make(EMBEDDED)
    engine.core.scheduler.draft_length = Each([])
    listening = listen(engine)
    answer(engine, prompts_of(engine), 24)
    assert {len(each.drafts) for each in listening.heard} == {1, 2, 3}
    assert_naive(listening.heard, embedded())


def test_while_others_ask_it_follows_whom_it_has_followed_and_nobody_else() -> None:
    class Some(Pattern):
        def choose(self, requests: Sequence[Request], num_tokens: int) -> list[tuple[int, str]]:
            numbers = {"0": 2, "1": super().choose(requests[:1], num_tokens)[0][0], "2": 0}
            return [(numbers[request.request_id], "by name") for request in requests]

    engine = make(EMBEDDED)
    engine.core.scheduler.draft_length = Some([2, 2, 0])
    drafting: Any = engine.core.executor._runner._drafting  # type: ignore[attr-defined]
    for name, prompt in zip("012", prompts_of(engine), strict=False):
        engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=30))
    while len(engine.core.scheduler.requests["0"].token_ids) < 32:
        engine.step()
    known = [drafting._batch.num_known(row) for row in range(3)]
    computed = sorted(drafting._num_computed.values())
    assert computed[0] == 0 and len(computed) == 3 and computed[1] >= min(known) - 1 > 20
    engine.close()


def test_blocks_that_were_filled_while_nobody_drafted_are_computed_again() -> None:
    engine = make(EMBEDDED)
    prompts = prompts_of(engine)
    engine.core.scheduler.draft_length = Pattern([0])
    (first,) = answer(engine, prompts[:1], 20)
    whole = prompts[0] + first.outputs[0].token_ids
    engine.core.scheduler.draft_length = Pattern([3])
    listening = listen(engine)
    again = answer(engine, [whole[:-1], [*whole[:21], *prompts[3]]], 16)
    assert [each.num_cached_tokens for each in again] == [len(whole[:-2]) // 4 * 4, 20]
    assert_naive(listening.heard, embedded())


def test_blocks_of_which_it_has_only_the_first_are_computed_from_there_on() -> None:
    engine = make(EMBEDDED)
    prompts = prompts_of(engine)
    # While the answer grows it is asked once in the beginning, and never again.
    engine.core.scheduler.draft_length = Pattern([3, 0])
    (first,) = answer(engine, prompts[:1], 24)
    heard = heard_with(engine, [3], [prompts[0] + first.outputs[0].token_ids + [7, 8, 9]], 12)
    assert_naive(heard, embedded())


def test_a_block_that_was_evicted_is_not_taken_for_the_one_that_was_there() -> None:
    engine = make(EMBEDDED, num_gpu_blocks_override=24)
    prompts = prompts_of(engine)
    answer(engine, prompts[:1], 24)  # drafted for, in blocks that the next one takes over
    engine.core.scheduler.draft_length = Pattern([0])
    (second,) = answer(engine, [prompts[2] + prompts[3]], 30)
    whole = prompts[2] + prompts[3] + second.outputs[0].token_ids
    engine.core.scheduler.draft_length = Pattern([3])
    listening = listen(engine)
    (third,) = answer(engine, [whole[:-1]], 12)
    assert third.num_cached_tokens > 60
    assert_naive(listening.heard, embedded())
