"""Check that two checkpoints mean the same by their token ids, as a draft model and its model must.

A size says little: two vocabularies of 32,000 ids may have nothing in common, and one family pads its vocabulary to
151,936 rows in a small model and to 152,064 in a large one. What counts is which token an id stands for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from teachllm.errors import ModelError


def check_vocabularies(draft: Path, model: Path, num_draft_ids: int, num_model_ids: int) -> None:
    """Compare the vocabularies of two folders. Where one has no tokenizer.json, their sizes alone decide.

    Args:
        num_draft_ids, num_model_ids: rows of their embeddings.

    Raises:
        ModelError: an id means different tokens.
    """
    advice = "take a draft model of the same family"
    ours, theirs = _tokens(model), _tokens(draft)
    if ours is None or theirs is None:
        if num_draft_ids != num_model_ids:
            raise ModelError(
                f"its vocabulary has {num_draft_ids} ids and the model's has {num_model_ids}: {advice}, or if they "
                "differ in padding alone, put tokenizer.json into both folders"
            )
        return
    if theirs == ours:
        return
    for index in sorted(ours.keys() & theirs.keys()):
        if ours[index] != theirs[index]:
            raise ModelError(
                f"its vocabulary is another one, in which id {index} is {theirs[index]!r} and not {ours[index]!r}: "
                f"{advice}"
            )


def _tokens(folder: Path) -> dict[int, str] | None:
    """Map each id to its token in a folder's tokenizer.json; return None without a file that has them."""
    try:
        raw = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocab: Any = raw["model"]["vocab"]
        if isinstance(vocab, dict):
            tokens = {int(index): str(token) for token, index in vocab.items()}
        else:  # of a unigram model: (token, score) by id
            tokens = {index: str(token) for index, (token, _) in enumerate(vocab)}
        return tokens | {int(added["id"]): str(added["content"]) for added in raw.get("added_tokens", [])}
    except (OSError, ValueError, KeyError, TypeError):
        return None
