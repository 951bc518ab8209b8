"""Any value in a tokenizer's files gives what transformers makes of it, or one line that names file and key."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from teachllm.checkpoint.files import EMBEDDED_MODEL, find_folder
from teachllm.engine.text.tokenizer import Tokenizer
from tests.checkpoint.mutations import ABSENT, Mutation, is_named, mutations, wrong_ones
from tests.thorough import times

FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json")
# Keys of no consequence here, and the contents of the vocabulary, which are many.
NOT_READ = (
    "vocab",
    "merges",
    "clean_up_tokenization_spaces",
    "model_max_length",
    "add_bos_token",
    "truncation",
    "padding",
)
TEXTS = ["Hi <|x|> there <|im_end|>  now", "a<|im_start|>user\nHello<tool>", "  plain text "]
CONVERSATION = [{"role": "user", "content": "Hello"}]


def flags(content: str, special: bool) -> dict[str, Any]:
    rest = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"content": content, "special": special} | rest


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two ways to lay out the same tokens, in which every file and key is there that is read."""
    found = {}
    for name in ("by id", "older"):
        folder = found[name] = tmp_path_factory.mktemp("tokenizer")
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(find_folder(EMBEDDED_MODEL) / file, folder)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config = {key: value for key, value in config.items() if value is not None}
        config["chat_template"] = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        map_file, ids = {"eos_token": "<|im_end|>"}, {"<tool>": 4096}
        if name == "by id":
            config["added_tokens_decoder"] = {"4096": flags("<tool>", False), "4097": flags("<|x|>", True)}
            config["extra_special_tokens"] = {"x_token": "<|x|>"}
        else:
            config["additional_special_tokens"] = ["<|x|>"]
            map_file["pad_token"] = "<|endoftext|>"
        for file, content in zip(FILES, (config, map_file, ids), strict=False):
            (folder / file).write_text(json.dumps(content))
    return found


def ours(folder: Path) -> list[Any]:
    tokenizer = Tokenizer.load(str(folder))
    ids = [tokenizer.encode(text) for text in TEXTS]
    texts = [tokenizer.decode(each, skip_special_tokens=skips) for each in ids for skips in (False, True)]
    return [*ids, *texts, tokenizer.eos_token_id, tokenizer.render_chat_template(CONVERSATION)]


def theirs(folder: Path, _: Mutation) -> list[Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.encode(text) for text in TEXTS]
    options = {"clean_up_tokenization_spaces": False}
    texts = [tokenizer.decode(each, skip_special_tokens=skips, **options) for each in ids for skips in (False, True)]
    rendered = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    return [*ids, *texts, tokenizer.eos_token_id, rendered]


def is_refusal(error: Exception, mutation: Mutation) -> bool:
    """Return whether an error says enough: of tokenizer.json, which another library reads, the part that is wrong."""
    words, is_nothing = str(error), not mutation.value or mutation.value == ABSENT
    is_gone = "has no chat template" in words and is_nothing and mutation.path == ("chat_template",)
    is_part = "tokenizer.json: " in words and str(mutation.path[0]) in words.lower() and "\n" not in words
    return is_gone or is_part or is_named(error, mutation)


def test_every_value_is_read_as_transformers_does_or_refused_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    drawn = mutations(folders, FILES, times(30, 400), NOT_READ)
    wrong = wrong_ones(drawn, folders, tmp_path, ours, theirs, is_refusal)
    assert not wrong, wrong
