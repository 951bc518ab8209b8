"""Lesson 00: the engine's own choice keeps the contract, wrong ones are told why, and what the pictures say is so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from teachllm.engine.text.tokenizer import Tokenizer
from teachllm_lessons.faults import ROOT
from teachllm_lessons.helpers.lesson_00 import CHOOSE, a_stream, life_of_a_request, look_inside, streamed
from teachllm_lessons.watch import Watch
from tests.lessons.wrong_answers import keeps_contract, rejected
from tests.thorough import only_thorough


def of_all_rows(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax().expand(len(logits))


def down_the_columns(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=0)


def the_number_itself(logits: torch.Tensor) -> torch.Tensor:
    return logits.max(dim=-1).values


def of_probabilities(logits: torch.Tensor) -> torch.Tensor:
    return (logits.exp() / logits.exp().sum(dim=-1, keepdim=True)).argmax(dim=-1)


def the_last_of_equals(logits: torch.Tensor) -> torch.Tensor:
    return logits.shape[-1] - 1 - logits.flip(-1).argmax(dim=-1)


def as_a_list(logits: torch.Tensor) -> list[int]:
    return [row.index(max(row)) for row in logits.tolist()]


def farthest_from_zero(logits: torch.Tensor) -> torch.Tensor:
    return logits.abs().argmax(dim=-1)


def with_a_column(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1, keepdim=True)


def test_the_engines_own_is_right() -> None:
    keeps_contract(CHOOSE, "each of 92 tokens")


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (
            of_all_rows,
            r"row 0 of choose\(\[\[0.0, 1.0\], \[3.0, 2.0\]\]\) is 2, .* 1: each row is a request of its own",
        ),
        (down_the_columns, r"shape \[2\]: give \[1\], one id a row"),
        (the_number_itself, r"ids are integers"),
        (of_probabilities, r"exp\(1000.0\) is more than a float holds"),
        (the_last_of_equals, r"of equals the lowest id"),
        (as_a_list, r"is \[0\]: give a tensor of ids"),
        (farthest_from_zero, r"is \[2\], and should be \[1\]: logits may all be negative"),
        (with_a_column, r"shape \[1, 1\]: give \[1\]"),
    ],
)
def test_wrong_ones_are_told_why(piece: object, words: str) -> None:
    rejected(CHOOSE, piece, words)


@pytest.fixture(scope="module")
def watch() -> Iterator[Watch]:
    with Watch(num_gpu_blocks_override=16, max_model_len=128) as watch:
        yield watch


def test_the_next_token_is_what_the_last_position_predicts(watch: Watch) -> None:
    for name, question in (("A", "What is a KV cache?"), ("B", "What is a block table?")):
        watch.add(name, question, max_tokens=1)
        watch.run()
        assert watch.tokens(name) == look_inside(watch, watch.ids(question)).predictions()[-1:]


@only_thorough
def test_one_pass_predicts_every_token_of_an_answer(watch: Watch) -> None:
    prompt = watch.ids("What is a KV cache?")
    watch.add("C", prompt, max_tokens=16)
    watch.run()
    inside = look_inside(watch, prompt + watch.tokens("C"))
    assert inside.predictions()[len(prompt) - 1 : -1] == watch.tokens("C")
    assert inside.residuals.shape == (7, len(prompt) + 16, 256)
    assert "predict" in inside.lens().says


def test_half_a_character_is_held_back(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer.load(str(ROOT / "teachllm/assets/teachlm"))
    for text in ("naïve café 😀", "模型"):
        shown = [each for _, _, each in streamed(tokenizer, text)]
        assert shown[-1] == text and not any("\N{REPLACEMENT CHARACTER}" in each for each in shown)


def test_the_stream_of_the_scenario_ends_in_its_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    a_stream()
    assert capsys.readouterr().out.splitlines()[-1] == "'naïve café'"


def test_a_request_passes_files_that_are_there() -> None:
    says = life_of_a_request().says
    for place in (
        "server/openai/chat.py",
        "engine/input_processor.py",
        "core/scheduler.py",
        "worker/cpu/model_runner.py",
    ):
        assert place in says
    for part in says.split("(")[1:]:
        assert (ROOT / "teachllm" / part.split(")")[0].split(":")[0]).exists()
