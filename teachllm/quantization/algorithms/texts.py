"""Texts: what a quantizer looks at, and what the loss is measured on.

A file ends in .jsonl and has a conversation a line, {"messages": [{"role": "user", "content": ...}, ...]}, put into the
model's own chat template; of these, what the model would say last is scored. Or it is plain text, and all is scored.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from teachllm.errors import ModelError

_ASSETS = Path(__file__).parents[2] / "assets"
CALIBRATION_TEXT = _ASSETS / "calibration.jsonl"
HELD_OUT_TEXT = _ASSETS / "held_out.jsonl"
_ENOUGH = 0.25  # of the rows that were asked for


@dataclass(frozen=True)
class Document:
    """Token ids.

    Attributes:
        first: the first one that is scored, at least 1: nothing predicts a text's first token.
    """

    ids: list[int]
    first: int = 1


def read_tokenizer(folder: Path) -> Any:
    """Read transformers' tokenizer of a checkpoint.

    Raises:
        ModelError: it has none that reads text.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        reads, cause = bool(_encode(tokenizer, "a")), None
    except Exception as error:
        reads, cause = False, error
    if not reads:
        raise ModelError(
            f"{folder} has no tokenizer that transformers can load: put tokenizer.json and tokenizer_config.json there"
        ) from cause
    return tokenizer


def calibration_rows(path: Path, tokenizer: Any, num_rows: int, seq_len: int) -> torch.Tensor:
    """Return token ids, [num_rows, seq_len]: a text, cut up. Each row begins as the tokenizer begins a text.

    A text that is somewhat shorter gives fewer rows, with a warning.

    Args:
        tokenizer: transformers'.

    Raises:
        ValueError: the text is much too short, or its file is not what it should be.
    """
    start = _start(tokenizer, seq_len)
    length = seq_len - len(start)
    ids = [token_id for document in _read("--calibration", path, tokenizer, start) for token_id in document.ids]
    found = len(ids) // length
    if num_rows > found >= _ENOUGH * num_rows:
        warnings.warn(
            f"--calibration {path} has {len(ids):,} tokens, which make {found} rows of {seq_len} instead of {num_rows}"
            ": these are used",
            stacklevel=2,
        )
        num_rows = found
    if found < num_rows:
        rows, tokens = (found, seq_len) if found else (1, len(ids) + len(start))
        fix = f"set --num-samples {rows}" + ("" if found else f" and --seq-len {tokens}")
        raise ValueError(
            f"--calibration {path} is too short: {len(ids):,} tokens, and {num_rows} rows of {seq_len} take "
            f"{num_rows * length:,}: {f'{fix}, or ' if len(ids) > 1 else ''}give a longer text"
        )
    cut = torch.tensor(ids[: num_rows * length]).view(num_rows, length)
    return torch.cat([torch.tensor(start, dtype=torch.int64).expand(num_rows, len(start)), cut], dim=1)


def scored_documents(path: Path, tokenizer: Any, seq_len: int) -> list[Document]:
    """Return a text to score: conversations as they are, plain text cut into pieces of `seq_len` tokens.

    Conversations whose answer begins later than that are left out, with a warning.

    Raises:
        ValueError: there is nothing to score, or the file is not what it should be.
    """
    start = _start(tokenizer, seq_len)
    length, num_too_long = seq_len - len(start), 0
    found = []
    for document in _read("--text", path, tokenizer, start):
        if path.suffix == ".jsonl":
            pieces = [document.ids[:length]]
            num_too_long += document.first >= length
        else:
            pieces = [document.ids[i : i + length] for i in range(0, len(document.ids), length)]
        found += [Document(start + piece, max(1, len(start) + document.first)) for piece in pieces]
    found = [document for document in found if document.first < len(document.ids)]
    too_long = f"in {num_too_long} conversations the answer begins behind the {seq_len} tokens that are read"
    if not found:
        raise ValueError(f"--text {path} has nothing to score: {too_long if num_too_long else 'it is too short'}")
    if num_too_long:
        warnings.warn(f"--text {path}: {too_long}: these are left out", stacklevel=2)
    return found


def _start(tokenizer: Any, seq_len: int) -> list[int]:
    """Return what a tokenizer puts before a text."""
    start = list(tokenizer("").input_ids)
    if seq_len < len(start) + 2:
        raise ValueError(f"--seq-len {seq_len} is too short: at least {len(start) + 2}")
    return start


def _read(flag: str, path: Path, tokenizer: Any, start: list[int]) -> list[Document]:
    """Read documents without the start of a text, which chat templates write and plain texts lack. `first` may be 0."""
    from jinja2 import TemplateError

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{flag} {path} is no text in UTF-8: give a .txt or .jsonl file") from None
    if path.suffix != ".jsonl":
        return [Document(_encode(tokenizer, text), 0)]
    found = []
    for number, line in enumerate(text.split("\n"), start=1):  # JSON may hold what splitlines() takes for line ends
        if not line.strip():
            continue
        try:
            found.append(_conversation(json.loads(line)["messages"], tokenizer, start))
        except (ValueError, KeyError, TypeError, IndexError, TemplateError) as error:
            raise ValueError(
                f"{flag} {path}, line {number} is no conversation ({_first_line(error)}): write "
                '{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello!"}]}'
            ) from None
    return found


def _conversation(messages: list[dict[str, str]], tokenizer: Any, start: list[int]) -> Document:
    """Return the last turn, after the turns before it."""
    if getattr(tokenizer, "chat_template", None):
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        before = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        if not whole.startswith(before):  # a template that writes earlier turns in another way
            before = whole[: whole.rindex(messages[-1]["content"])]
    else:
        whole = "".join(message["content"] + "\n" for message in messages)
        before = "".join(message["content"] + "\n" for message in messages[:-1])
    # Apart, as when a model answers: no token reaches from the question into the answer.
    said = _encode(tokenizer, whole[len(before) :].rstrip())
    asked = _encode(tokenizer, before)
    if start and asked[: len(start)] == start:
        asked = asked[len(start) :]
    return Document(asked + said, len(asked))


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
