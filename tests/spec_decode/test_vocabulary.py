"""A draft model must mean by its ids what the model means; how many rows of padding follow does not matter."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from teachllm import EngineConfig
from teachllm.engine.llm_engine import Engine
from teachllm.errors import ModelError
from teachllm.spec_decode.draft_model import DraftModel
from tests.checkpoints import VOCAB_SIZE, build_model, make_checkpoint
from tests.spec_decode import naive
from tests.spec_decode.listening import assert_naive
from tests.spec_decode.refusals import refusal
from tests.spec_decode.scenarios import play
from tests.thorough import times
from tests.worker.engines import tiny

TOKENS = {f"token {index}": index for index in range(VOCAB_SIZE - 20)}


def write_tokenizer(folder: Path, vocab: Any, added: Sequence[tuple[int, str]] = ()) -> None:
    tokens = [{"id": index, "content": token} for index, token in added]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens, "model": {"vocab": vocab}}))


def sized(folder: Path, num_ids: int) -> str:
    """A draft model whose embedding has so many rows."""
    model = build_model("llama2", seed=1)
    torch.manual_seed(0)
    model.resize_token_embeddings(num_ids, mean_resizing=False)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One with a tokenizer."""
    folder = tmp_path / "model"
    make_checkpoint("llama2", folder)
    write_tokenizer(folder, TOKENS, [(VOCAB_SIZE - 20, "<end>")])
    return folder


def refused(draft: str, model: Path) -> str:
    given: Any = {"method": "draft_model", "model": draft}
    with pytest.raises(ModelError) as error:
        Engine(EngineConfig(**tiny(model=str(model)), speculative_config=given))
    return str(error.value)


def test_without_tokenizers_their_sizes_alone_decide(tmp_path: Path) -> None:
    message = refusal("draft_model", "teachlm-draft")
    assert message == (
        "speculative model='teachlm-draft': its vocabulary has 4096 ids and the model's has 512: take a draft model "
        "of the same family, or if they differ in padding alone, put tokenizer.json into both folders"
    )


@pytest.mark.parametrize(
    ("vocab", "added", "says"),
    [
        (TOKENS | {"token 7": 8, "token 8": 7}, [], "in which id 7 is 'token 8' and not 'token 7'"),
        ([[f"token {i}" if i < 9 else "other", 0.0] for i in range(20)], [], "id 9 is 'other' and not 'token 9'"),
        (TOKENS, [(VOCAB_SIZE - 20, "<stop>")], "id 492 is '<stop>' and not '<end>'"),
    ],
    ids=["two swapped", "a unigram model's", "an added one"],
)
def test_the_first_id_that_means_something_else_is_named(
    vocab: Any, added: list[tuple[int, str]], says: str, model: Path, tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    make_checkpoint("llama2", draft, seed=1)
    write_tokenizer(draft, vocab, added)
    message = refused(str(draft), model)
    assert says in message and message.endswith("take a draft model of the same family")


def test_a_tokenizer_that_says_nothing_counts_as_none(model: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    sized(draft, VOCAB_SIZE + 8)
    for text in ("{}", "no JSON", '{"model": {"vocab": 3}}'):
        (draft / "tokenizer.json").write_text(text)
        assert "its vocabulary has 520 ids and the model's has 512" in refused(str(draft), model)


@pytest.mark.parametrize("num_ids", [VOCAB_SIZE - 12, VOCAB_SIZE, VOCAB_SIZE + 8][: times(1, 3)])
def test_with_more_or_fewer_rows_of_padding_it_drafts_what_it_would_without(
    num_ids: int, model: Path, tmp_path: Path
) -> None:
    draft = sized(tmp_path / "draft", num_ids)
    write_tokenizer(tmp_path / "draft", TOKENS)  # it need not know every added token
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (19, 24, 33, 21)[: times(2, 4)]]
    prompts[0][3] = VOCAB_SIZE - 1  # which the smallest of them does not have
    speculation = {"method": "draft_model", "model": draft}
    heard = play("several chunks", speculation, prompts, model=str(model), skip_tokenizer_init=True).heard
    whole = naive.draft_model(naive.transformers_model(draft))

    def theirs(known: Sequence[int], drafts: Sequence[int]) -> torch.Tensor:
        logits = torch.full((VOCAB_SIZE,), -torch.inf, dtype=torch.float64)
        num_common = min(num_ids, VOCAB_SIZE)
        known, drafts = ([min(index, num_ids - 1) for index in ids] for ids in (known, drafts))
        logits[:num_common] = whole(known, drafts)[:num_common]
        return logits

    assert_naive(heard, theirs)


def test_ids_and_positions_that_it_does_not_have_are_never_looked_up() -> None:
    seen: list[list[int]] = []

    class Model:
        def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, *_: Any) -> torch.Tensor:
            seen.extend((input_ids.tolist(), positions.tolist()))
            return torch.zeros(2, 3)

        def logits(self, hidden: torch.Tensor, **form: bool) -> torch.Tensor:
            return torch.ones(2, 5)

    class Batch:
        num_levels, last = 1, torch.tensor([0, 1])

        def behind(self) -> tuple[torch.Tensor, torch.Tensor, None]:
            return torch.tensor([4, 7]), torch.tensor([3, 9]), None

        def push(self, level: int, logits: torch.Tensor) -> None:
            seen.append(logits[0].tolist())

    batch: Any = Batch()
    DraftModel(Model(), [], num_ids=5, vocab_size=8, max_len=6).propose(batch)
    assert seen == [[4, 4], [3, 5], [1.0] * 5 + [-torch.inf] * 3]
