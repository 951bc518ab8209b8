"""A drafter whose context is shorter than the model's drafts as far as it reaches; the model goes on without it."""

from __future__ import annotations

import json
import warnings
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from teachllm import SamplingParams
from teachllm.engine.llm_engine import Engine
from tests.checkpoints import make_checkpoint
from tests.engine.reference import reference
from tests.spec_decode import naive
from tests.spec_decode.heads import forms
from tests.spec_decode.listening import assert_naive, listen
from tests.spec_decode.refusals import edited, make
from tests.thorough import THOROUGH
from tests.worker.engines import drain, make_engine, random_ids

CONTEXT = 64  # of the drafters; the model's is 96
PROMPT_LENS = (30, 40, 70)


def shorter(method: str, folder: Path) -> str:
    if method == "eagle":
        return forms.write(folder, edited(forms.eagle_3(), max_position_embeddings=CONTEXT))
    make_checkpoint("llama2", folder, seed=1)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": CONTEXT}))
    return str(folder)


def answers(engine: Engine) -> list[list[int]]:
    """Up to the end of the model's context."""
    params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
    outputs = [engine.add_request(f"{length}", random_ids(length, seed=length), params) for length in PROMPT_LENS]
    drain(engine)
    engine.close()
    return [output.outputs[0].token_ids for output in outputs]


@cache
def plain() -> list[list[int]]:
    return answers(make_engine("llama2"))


METHODS: list[str] = ["draft_model", "eagle"]
SETTINGS: list[dict[str, Any]] = [{"max_num_batched_tokens": 9}, {"async_scheduling": True}, {}]


@pytest.mark.parametrize(
    ("method", "settings"),
    list(product(METHODS, SETTINGS)) if THOROUGH else [("eagle", {"async_scheduling": True})],
    ids=str,
)
def test_requests_go_on_without_drafts_beyond_the_drafters_context(
    method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = shorter(method, tmp_path)
    with pytest.warns(UserWarning) as warned:
        engine = make(method, folder, **settings)
    (message,) = (str(each.message) for each in warned if "speculative" in str(each.message))
    assert message == (
        f"the context of speculative model='{folder}' is 64 tokens of the model's 96: beyond them requests go on "
        "without drafts"
    )
    reasons: dict[str, set[str]] = {f"{length}": set() for length in PROMPT_LENS}
    schedule, listening = engine.core.scheduler.schedule, listen(engine)

    def heard_schedule() -> Any:
        plan = schedule()
        for scheduled in plan.scheduled:
            reasons[scheduled.request_id].add(scheduled.why)
            assert not (scheduled.request_id == "70" and scheduled.num_next_drafts)
        return plan

    engine.core.scheduler.schedule = heard_schedule  # type: ignore[method-assign]
    assert answers(engine) == plain()
    assert all(len(output) + length == 96 for output, length in zip(plain(), PROMPT_LENS, strict=True))
    why = "beyond the drafter's context of 64"
    assert all(why in each for each in reasons.values()) and len(reasons["30"]) > 1
    # Drafts under way count as if they held, so the last ones may not reach the end.
    assert CONTEXT - 3 <= max(len(each.known) + len(each.drafts) for each in listening.heard) <= CONTEXT
    judge = reference("llama2")
    if method == "draft_model":
        assert_naive(listening.heard, naive.draft_model(naive.transformers_model(folder)))
    else:
        states = naive.States(judge.model)
        assert_naive(listening.heard, naive.eagle(*naive.read(folder), judge.model, states), states)


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_one_that_reaches_as_far_as_the_model_is_asked_to_is_not_warned_of(method: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make(method, shorter(method, tmp_path), max_model_len=CONTEXT).close()
