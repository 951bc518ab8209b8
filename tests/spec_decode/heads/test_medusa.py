"""Medusa heads in the engine draw from the logits that their tensors give, worked out by hand."""

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
from tests.thorough import THOROUGH, only_thorough


@cache
def embedded() -> tuple[naive.Naive, naive.States]:
    model = naive.transformers_model(str(find_folder("teachlm")))
    states = naive.States(model)
    return naive.medusa(*naive.read(find_folder("teachlm-medusa")), model, states), states


@only_thorough
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_embedded_heads_draft_what_naive_ones_draft(scenario: str) -> None:
    listening = play(scenario, {"method": "medusa", "model": "teachlm-medusa"})
    assert {num_accepted > 0 for _, num_accepted in listening.verified} == {True, False}
    assert_naive(listening.heard, *embedded())


@only_thorough
@pytest.mark.parametrize("scenario", ["several chunks", "preemption"])
def test_each_node_of_a_tree_is_drawn_from_what_follows_its_own_path(scenario: str) -> None:
    listening = play(scenario, {"method": "medusa", "model": "teachlm-medusa"} | TREE)
    assert listening.some_fell_and_some_held
    assert_naive(listening.heard, *embedded())


FORMS: dict[str, tuple[str, Callable[[], forms.Head], str]] = {
    "heads of their own": ("llama2", lambda: forms.medusa(shares_head=False), "model.safetensors"),
    "the model's head": ("qwen3", lambda: forms.medusa(num_layers=1, has_bias=False), "model.safetensors"),
    "more heads than are asked": ("llama2", lambda: forms.medusa(num_heads=5), "model.safetensors"),
    "one head of their own": ("llama2", lambda: forms.medusa(shared="lm_head.weight"), "model.safetensors"),
    "the first head of their own": ("llama2", lambda: forms.medusa(shared="lm_heads.0.weight"), "model.safetensors"),
    "the authors' pickle": ("llama2", forms.authors_medusa, "medusa_lm_head.pt"),
    "the authors' five heads, of which they count two": (
        "llama2",
        lambda: forms.authors_medusa(num_heads=5, num_layers=1),
        "medusa_lm_head.pt",
    ),
    "the authors' form": ("llama2", lambda: forms.authors_medusa(num_layers=1), "model.safetensors"),
    "the authors' form without output heads": (
        "llama2",
        lambda: forms.authors_medusa(num_layers=1, has_heads=False),
        "medusa_lm_head.safetensors",
    ),
    "the authors' form with a prefix": (
        "gemma2",  # hidden states and head of a model of transformers
        lambda: forms.authors_medusa(prefix="medusa_heads."),
        "model.safetensors",
    ),
}


@pytest.mark.parametrize("form", FORMS if THOROUGH else ["heads of their own", "the authors' pickle"])
def test_every_published_form_drafts_what_its_tensors_say(form: str, tmp_path: Path) -> None:
    family, make_head, file = FORMS[form]
    raw, tensors = make_head()
    judge = reference(family)
    speculation: dict[str, Any] = {"method": "medusa", "model": forms.write(tmp_path, (raw, tensors), file)}
    if file.endswith(".pt"):
        speculation["load_format"] = "pt"
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (19, 24, 33, 21)]
    listening = play("several chunks", speculation, prompts, model=judge.path, skip_tokenizer_init=True)
    states = naive.States(judge.model)
    assert_naive(listening.heard, naive.medusa(raw, tensors, judge.model, states), states)
