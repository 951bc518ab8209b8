"""The golden files are what transformers computes, of the checkpoints that the tests have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import ALL
from tests.engine.reference import GOLDEN, PROMPTS
from tests.golden import make, make_rounded_kv, make_teachlm
from tests.thorough import THOROUGH

DIGESTED = list(ALL) if THOROUGH else ["qwen3", "mixtral"]
thorough = pytest.mark.skipif(not THOROUGH, reason="transformers computes")


@pytest.mark.parametrize("name", DIGESTED)
def test_a_file_is_of_the_checkpoint_that_the_tests_have(name: str) -> None:
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        assert str(arrays["weights"]) == make.weights_digest(name)


def pieces(ids: Any, lens: Sequence[int]) -> list[list[int]]:
    ends = np.cumsum(np.asarray(lens, int))
    return [piece.tolist() for piece in np.split(ids, ends[:-1])] if len(ends) else []


def test_every_prompt_that_is_listed_is_in_the_file_of_its_family() -> None:
    listed = json.loads(PROMPTS.read_text())
    assert set(listed) <= set(ALL)
    for name in ALL:
        wanted = make.wanted_of(name)
        with np.load(GOLDEN / f"{name}.npz") as arrays:
            assert pieces(arrays["prompt_ids"], arrays["prompt_lens"]) == wanted["greedy"], name
            if wanted.get("forced"):
                lens = arrays["forced_lens"].sum(axis=1)
                assert pieces(arrays["forced_ids"], lens) == [p + o for p, o in wanted["forced"]], name


@thorough
@pytest.mark.parametrize("name", ALL)
def test_a_file_holds_what_transformers_computes(name: str) -> None:
    assert make.differences(name, make.compute(name, make.wanted_of(name))) == []


@thorough
def test_answers_of_the_embedded_model_are_transformers_own() -> None:
    assert make_teachlm.compute() == json.loads(make_teachlm.FILE.read_text())


@thorough
@pytest.mark.parametrize("family", make_rounded_kv.FAMILIES)
def test_answers_with_rounded_keys_and_values_are_transformers_own(family: str) -> None:
    for dtype in make_rounded_kv.DTYPES:
        known, found = json.loads(make_rounded_kv.FILE.read_text()), make_rounded_kv.compute(family, dtype)
        assert found["token_ids"] == known[f"{family}, {dtype}"]["token_ids"]
        assert found["logprobs"] == pytest.approx(known[f"{family}, {dtype}"]["logprobs"], abs=1e-7)
