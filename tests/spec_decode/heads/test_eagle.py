"""An EAGLE head in the engine draws from the logits of one that computes everything again, in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from teachllm.checkpoint.files import find_folder
from tests.checkpoints import VOCAB_SIZE
from tests.engine.reference import reference
from tests.spec_decode import naive
from tests.spec_decode.heads import forms
from tests.spec_decode.listening import assert_naive
from tests.spec_decode.scenarios import SCENARIOS, TREE, play
from tests.thorough import THOROUGH, only_thorough, times


@cache
def embedded() -> tuple[naive.Naive, naive.States]:
    model = naive.transformers_model(str(find_folder("teachlm")))
    states = naive.States(model)
    return naive.eagle(*naive.read(find_folder("teachlm-eagle")), model, states), states


@only_thorough
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_embedded_head_drafts_what_a_naive_one_drafts(scenario: str) -> None:
    listening = play(scenario, {"method": "eagle", "model": "teachlm-eagle"})
    assert listening.some_fell_and_some_held
    assert_naive(listening.heard, *embedded())


@pytest.mark.parametrize("scenario", ["preemption", "several chunks"][: times(1, 2)])
def test_each_node_of_a_tree_is_drawn_from_what_follows_its_own_path(scenario: str) -> None:
    listening = play(scenario, {"method": "eagle", "model": "teachlm-eagle"} | TREE)
    assert listening.some_fell_and_some_held
    assert_naive(listening.heard, *embedded())


# What a checkpoint may have and lack, and in which file: each with a model of our own code.
FORMS: dict[str, tuple[str, Callable[[], forms.Head], str]] = {
    "eagle": ("llama2", forms.eagle_1, "model.safetensors"),
    "eagle, pickled": ("llama2", forms.eagle_1, "pytorch_model.bin"),
    "eagle without bias and embedding": (
        "qwen3",
        lambda: forms.eagle_1(has_bias=False, has_embedding=False),
        "model.safetensors",
    ),
    "eagle for Qwen2": ("llama2", lambda: forms.eagle_1(has_qkv_bias=True), "model.safetensors"),
    "eagle with a window": ("llama2", forms.eagle_1_with_a_window, "model.safetensors"),
    "eagle in vLLM's form": ("llama2", forms.nested_eagle_1, "model.safetensors"),
    "eagle 3": ("llama2", forms.eagle_3, "model.safetensors"),
    "eagle 3 that names outputs": ("llama2", lambda: forms.eagle_3(outputs=(1, 0, 1)), "model.safetensors"),
    "eagle 3 that names two layers": ("llama2", lambda: forms.eagle_3(outputs=(0, 1)), "model.safetensors"),
    "eagle 3 with fewer tokens": ("llama2", lambda: forms.eagle_3(draft_vocab_size=200), "model.safetensors"),
    "eagle 3 with fewer tokens, pickled": (
        "llama2",
        lambda: forms.eagle_3(draft_vocab_size=200),
        "pytorch_model.bin",
    ),
    "eagle 3 without a head": ("mistral", lambda: forms.eagle_3(has_head=False), "model.safetensors"),
    "eagle 3 with fewer tokens, without a head": (
        "llama2",
        lambda: forms.eagle_3(draft_vocab_size=200, has_head=False),
        "model.safetensors",
    ),
    "eagle 3 with an embedding": ("llama2", lambda: forms.eagle_3(has_embedding=True), "model.safetensors"),
    "eagle 3 whose stream is normalised": (
        "llama2",
        lambda: forms.eagle_3(norm_before_residual=True, inputs=(2, 0, 1)),
        "model.safetensors",
    ),
    "speculators": ("llama2", forms.speculators_eagle_3, "model.safetensors"),
    "speculators for Qwen3": (
        "llama2",
        lambda: forms.speculators_eagle_3(inputs=(2, 0, 1), has_qk_norm=True, norm_before_residual=True),
        "model.safetensors",
    ),
    "speculators with norms": (
        "llama2",
        lambda: forms.speculators_eagle_3(norm_before_fc=True, norm_output=True),
        "model.safetensors",
    ),
    "speculators with a norm a layer": (
        "llama2",
        lambda: forms.speculators_eagle_3(fc_norm=True),
        "model.safetensors",
    ),
}


# In the usual half one of each generation and one with a window, most in another scenario.
CASES = [
    ("eagle in vLLM's form", "several chunks"),
    ("eagle with a window", "one chunk"),
    ("eagle 3 with fewer tokens", "prefix hits"),
    ("speculators with norms", "one chunk"),
]


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (19, 24, 33, 21)]


@pytest.mark.parametrize(
    ("form", "scenario"), [*CASES, *(((form, "several chunks") for form in FORMS) if THOROUGH else ())]
)
def test_every_published_form_drafts_what_a_naive_head_of_its_tensors_drafts(
    form: str, scenario: str, tmp_path: Path
) -> None:
    family, make_head, file = FORMS[form]
    raw, tensors = make_head()
    judge = reference(family)
    speculation: dict[str, Any] = {"method": "eagle", "model": forms.write(tmp_path, (raw, tensors), file)}
    if file.endswith(".bin"):
        speculation["load_format"] = "pt"
    used = prompts() if THOROUGH or scenario == "prefix hits" else prompts()[:2]
    listening = play(scenario, speculation, used, model=judge.path, skip_tokenizer_init=True)
    states = naive.States(judge.model)
    assert_naive(listening.heard, naive.eagle(raw, tensors, judge.model, states), states)
