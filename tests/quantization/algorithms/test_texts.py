"""Texts are read as the model will meet them, and those that will not do are refused in one line that says the fix."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from teachllm.checkpoint.files import EMBEDDED_MODEL, find_folder
from teachllm.errors import ModelError
from teachllm.quantization.algorithms.texts import (
    CALIBRATION_TEXT,
    HELD_OUT_TEXT,
    calibration_rows,
    read_tokenizer,
    scored_documents,
)

CONVERSATION = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}'


LONG = json.dumps({"messages": [{"role": "user", "content": "why " * 99}, {"role": "assistant", "content": "So."}]})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(find_folder(EMBEDDED_MODEL))


def test_what_a_model_says_last_is_scored_and_nothing_else(tokenizer: Any, tmp_path: Path) -> None:
    said = [("user", "What is a token?"), ("assistant", "A piece."), ("user", "Why?"), ("assistant", "It is short.")]
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in said]}) + "\n")
    (document,) = scored_documents(path, tokenizer, 512)
    assert tokenizer.decode(document.ids[document.first :]).startswith("It is short.")
    asked = tokenizer.decode(document.ids[: document.first])
    assert "A piece." in asked and "Why?" in asked and "short" not in asked


def test_plain_text_is_cut_up_and_scored_whole(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("Keys and values of a token are kept. " * 20)
    documents = scored_documents(path, tokenizer, 32)
    ids = tokenizer(path.read_text(), add_special_tokens=False).input_ids
    assert [each for document in documents for each in document.ids] == ids
    assert all(document.first == 1 for document in documents)
    rows = calibration_rows(path, tokenizer, 3, 32)
    assert torch.equal(rows, torch.tensor(ids[:96]).view(3, 32))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", '{"messages": []}\n', r"a.jsonl, line 1 is no conversation .*: write \{\"messages\": \["),
        ("a.jsonl", f"{CONVERSATION}\nnone\n", "a.jsonl, line 2 is no conversation"),
        ("a.jsonl", '{"messages": [{"text": "x"}]}', "a.jsonl, line 1 is no conversation .*role"),
        ("a.txt", "", "--text .*a.txt has nothing to score: it is too short"),
        ("a.jsonl", LONG, "a.jsonl has nothing to score: in 1 conversations the answer begins behind the 64 tokens"),
    ],
)
def test_a_text_that_will_not_do_is_named(name: str, text: str, says: str, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=says):
        scored_documents(tmp_path / name, tokenizer, 64)


def test_a_short_text_says_how_many_rows_it_has(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("Keys and values of a token are kept. " * 20)
    num_tokens = len(tokenizer(path.read_text(), add_special_tokens=False).input_ids)
    fix = f"{num_tokens} tokens, and 128 rows of 32 take 4,096: set --num-samples {num_tokens // 32}, or give a longer"
    with pytest.raises(ValueError, match=fix):
        calibration_rows(path, tokenizer, 128, 32)
    whole = calibration_rows(path, tokenizer, num_tokens // 32, 32)
    assert len(whole) == num_tokens // 32
    for num_rows in (len(whole) + 1, 4 * len(whole)):
        with pytest.warns(UserWarning, match=f"make {len(whole)} rows of 32 instead of {num_rows}: these are used"):
            assert torch.equal(calibration_rows(path, tokenizer, num_rows, 32), whole)
    with pytest.raises(ValueError, match="is too short"):
        calibration_rows(path, tokenizer, 4 * len(whole) + 1, 32)
    with pytest.raises(ValueError, match=f"set --num-samples 1 and --seq-len {num_tokens}, or give a longer text"):
        calibration_rows(path, tokenizer, 128, 1024)
    assert len(calibration_rows(path, tokenizer, 1, num_tokens)) == 1
    path.write_text("")
    with pytest.raises(ValueError, match="0 tokens, and 128 rows of 32 take 4,096: give a longer text"):
        calibration_rows(path, tokenizer, 128, 32)


def test_files_that_cannot_be_read_are_named_with_the_setting(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--calibration .*none.txt cannot be read: No such file"):
        calibration_rows(tmp_path / "none.txt", tokenizer, 1, 32)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ValueError, match=r"--text .*image.png is no text in UTF-8: give"):
        scored_documents(tmp_path / "image.png", tokenizer, 32)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    shutil.copy(find_folder(EMBEDDED_MODEL) / "config.json", tmp_path)
    with pytest.raises(ModelError, match="has no tokenizer"):
        read_tokenizer(tmp_path)


def test_lines_end_where_json_lines_do(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(f"\n{CONVERSATION.replace('Hello!', chr(0x2028) + 'x' + chr(0x85))}\n\n{CONVERSATION}\n", "utf-8")
    assert len(scored_documents(path, tokenizer, 64)) == 2


def test_conversations_that_are_too_long_are_left_out_with_a_warning(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(f"{LONG}\n{CONVERSATION}\n{LONG}\n")
    with pytest.warns(UserWarning, match="in 2 conversations the answer begins behind the 64 tokens .* left out"):
        assert len(scored_documents(path, tokenizer, 64)) == 1


@pytest.mark.parametrize("template", [None, "{{ '<|endoftext|>' }}{% for m in messages %}{{ m.content }} {% endfor %}"])
def test_a_text_begins_once(template: str | None, tokenizer: Any, tmp_path: Path) -> None:
    """Some chat templates write what the tokenizer puts before a text, too."""
    tokenizer = AutoTokenizer.from_pretrained(find_folder(EMBEDDED_MODEL))
    (start,) = tokenizer("<|endoftext|>", add_special_tokens=False).input_ids
    single = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", start)])
    tokenizer._tokenizer.post_processor = single
    tokenizer.chat_template = template
    assert tokenizer("a").input_ids[0] == start
    path = tmp_path / "text.jsonl"
    path.write_text(f"{CONVERSATION}\n" * 20)
    for document in scored_documents(path, tokenizer, 64):
        assert document.ids[0] == start and start not in document.ids[1:]
        assert tokenizer.decode(document.ids[document.first :]).strip() == "Hello!"
    rows = calibration_rows(path, tokenizer, 3, 16)
    assert (rows[:, 0] == start).all() and (rows[:, 1:] != start).all()


def answers(path: Path) -> list[str]:
    """What models say in a text."""
    conversations = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    return [each["content"] for messages in conversations for each in messages if each["role"] == "assistant"]


def test_nothing_that_is_measured_on_was_calibrated_on(tokenizer: Any) -> None:
    measured = {sentence.strip(" .") for text in answers(HELD_OUT_TEXT) for sentence in text.split(". ")}
    calibrated = " ".join(answers(CALIBRATION_TEXT))
    assert len(measured) > 100
    assert not [sentence for sentence in measured if len(sentence) > 20 and sentence in calibrated]
    assert calibration_rows(CALIBRATION_TEXT, tokenizer, 128, 256).shape == (128, 256)
