"""A draft model in the engine continues as it would by itself, however long it was not asked, and whoever computed
the blocks that it finds."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from teachllm.checkpoint.files import find_folder
from teachllm.core.request import Request
from teachllm.engine.llm_engine import Engine
from teachllm.sampling_params import SamplingParams
from tests.checkpoints import VOCAB_SIZE
from tests.engine.reference import reference
from tests.spec_decode import naive
from tests.spec_decode.drafters import draft_model
from tests.spec_decode.heads import forms
from tests.spec_decode.listening import Heard, assert_naive, listen
from tests.spec_decode.scenarios import SCENARIOS, TREE, answer, make, play
from tests.thorough import only_thorough

EMBEDDED = {"method": "draft_model", "model": "teachlm-draft"}
FAMILY = "llama2"  # of a tiny model and a tiny draft model, which are quick


@cache
def theirs(folder: str) -> naive.Naive:
    return naive.draft_model(naive.transformers_model(folder))


def tiny_draft_model() -> dict[str, Any]:
    return {"method": "draft_model", "model": draft_model(FAMILY)}


def tiny_model() -> dict[str, Any]:
    return {"model": reference(FAMILY).path, "skip_tokenizer_init": True}


def random_prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


PROMPTS = random_prompts(19, 24, 33, 21)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("prefix hits", {}),
    ("running ahead", {}),
    ("preemption", TREE),
]


@pytest.mark.parametrize(("scenario", "tree"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_draft_model_drafts_what_transformers_computes(scenario: str, tree: dict[str, Any]) -> None:
    speculation = tiny_draft_model()
    listening = play(scenario, speculation | tree, PROMPTS, **tiny_model())
    assert listening.some_fell_and_some_held
    assert_naive(listening.heard, theirs(speculation["model"]))


@only_thorough
@pytest.mark.parametrize("tree", [{}, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_embedded_draft_model_drafts_what_transformers_computes(scenario: str, tree: dict[str, Any]) -> None:
    listening = play(scenario, EMBEDDED | tree)
    assert listening.some_fell_and_some_held
    assert_naive(listening.heard, theirs(str(find_folder("teachlm-draft"))))


@only_thorough
def test_its_drafts_are_the_greedy_continuation_of_transformers() -> None:
    heard = play("one chunk", EMBEDDED).heard[::7]
    model = naive.transformers_model(str(find_folder("teachlm-draft")))
    for each in heard:
        made = model.generate(torch.tensor([each.known]), max_new_tokens=3, do_sample=False, eos_token_id=None)
        assert each.drafts == made[0, len(each.known) :].tolist()[: len(each.drafts)]


@only_thorough
@pytest.mark.parametrize("family", ["mistral", "gemma2", "llama_dynamic"])
def test_a_draft_model_of_another_family_has_its_own_layers_windows_and_code(family: str) -> None:
    folder = draft_model(family)
    prompts = random_prompts(19, 24, 33, 40)
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


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_after_a_while_without_being_asked_it_has_caught_up(method: str, tmp_path: Path) -> None:
    raw, tensors = forms.eagle_3()
    speculation = tiny_draft_model()
    if method == "eagle":
        speculation = {"method": "eagle", "model": forms.write(tmp_path, (raw, tensors))}
    engine = make(speculation, max_num_batched_tokens=20, **tiny_model())
    prompts = PROMPTS[::2]
    heard = heard_with(engine, [0] * 9 + [2] * 3 + [0] * 10 + [3], prompts, 36)
    lengths = [len(each.known) for each in heard if each.known[:18] == prompts[0][:18]]
    assert lengths[0] > len(prompts[0]) + 1  # not asked in the beginning
    assert any(b - a > 8 for a, b in pairwise(lengths))  # nor in the middle
    if method == "draft_model":
        assert_naive(heard, theirs(speculation["model"]))
        return
    model = reference(FAMILY).model
    states = naive.States(model)
    assert_naive(heard, naive.eagle(raw, tensors, model, states), states)


def test_of_requests_that_are_asked_for_more_or_less_or_nothing_each_gets_its_own() -> None:
    class Each(Pattern):
        def choose(self, requests: Sequence[Request], num_tokens: int) -> list[tuple[int, str]]:
            return [((len(request.token_ids) + int(request.request_id)) % 4, "in turn") for request in requests]

    engine = make(tiny_draft_model(), **tiny_model())
    engine.core.scheduler.draft_length = Each([])
    listening = listen(engine)
    answer(engine, PROMPTS, 24)
    assert {len(each.drafts) for each in listening.heard} == {1, 2, 3}
    assert_naive(listening.heard, theirs(draft_model(FAMILY)))


def test_while_others_ask_it_follows_whom_it_has_followed_and_nobody_else() -> None:
    class Some(Pattern):
        def choose(self, requests: Sequence[Request], num_tokens: int) -> list[tuple[int, str]]:
            numbers = {"0": 2, "1": super().choose(requests[:1], num_tokens)[0][0], "2": 0}
            return [(numbers[request.request_id], "by name") for request in requests]

    engine = make(tiny_draft_model(), **tiny_model())
    engine.core.scheduler.draft_length = Some([2, 2, 0])
    drafting: Any = engine.core.executor._runner._drafting  # type: ignore[attr-defined]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for name, prompt in zip("012", PROMPTS, strict=False):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    while len(engine.core.scheduler.requests["0"].token_ids) < 32:
        engine.step()
    known = [drafting._batch.num_known(row) for row in range(3)]
    computed = sorted(drafting._num_computed.values())
    assert computed[0] == 0 and len(computed) == 3 and computed[1] >= min(known) - 1 > 20
    engine.close()


def test_blocks_that_were_filled_while_nobody_drafted_are_computed_again() -> None:
    engine = make(tiny_draft_model(), **tiny_model())
    prompts = PROMPTS
    engine.core.scheduler.draft_length = Pattern([0])
    (first,) = answer(engine, prompts[:1], 20)
    whole = prompts[0] + first.outputs[0].token_ids
    engine.core.scheduler.draft_length = Pattern([3])
    listening = listen(engine)
    again = answer(engine, [whole[:-1], [*whole[:21], *prompts[3]]], 16)
    assert [each.num_cached_tokens for each in again] == [len(whole[:-2]) // 4 * 4, 20]
    assert_naive(listening.heard, theirs(draft_model(FAMILY)))


def test_blocks_of_which_it_has_only_the_first_are_computed_from_there_on() -> None:
    engine = make(tiny_draft_model(), **tiny_model())
    prompts = PROMPTS
    # While the answer grows it is asked once in the beginning, and never again.
    engine.core.scheduler.draft_length = Pattern([3, 0])
    (first,) = answer(engine, prompts[:1], 24)
    heard = heard_with(engine, [3], [prompts[0] + first.outputs[0].token_ids + [7, 8, 9]], 12)
    assert_naive(heard, theirs(draft_model(FAMILY)))


def test_a_block_that_was_evicted_is_not_taken_for_the_one_that_was_there() -> None:
    engine = make(tiny_draft_model(), num_gpu_blocks_override=24, **tiny_model())
    prompts = PROMPTS
    answer(engine, prompts[:1], 24)  # drafted for, in blocks that the next one takes over
    engine.core.scheduler.draft_length = Pattern([0])
    (second,) = answer(engine, [prompts[2] + prompts[3]], 30)
    whole = prompts[2] + prompts[3] + second.outputs[0].token_ids
    engine.core.scheduler.draft_length = Pattern([3])
    listening = listen(engine)
    (third,) = answer(engine, [whole[:-1]], 12)
    assert third.num_cached_tokens > 60
    assert_naive(listening.heard, theirs(draft_model(FAMILY)))
