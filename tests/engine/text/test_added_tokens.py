"""Added tokens, in every file that may define some, are read as transformers reads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from teachllm.checkpoint.files import EMBEDDED_MODEL, find_folder
from teachllm.engine.text.tokenizer import Tokenizer
from teachllm.errors import ModelError
from tests.thorough import times

BASE = find_folder(EMBEDDED_MODEL)
NEXT = 4096  # the first id that the vocabulary leaves free
TEXTS = [
    *("Hi <|x|> there <|y|>  now", "<|x|><|y|><|im_end|> a<|z|> b", " <|new|> <tool> a <tool>b</tool>"),
    *("a<|im_start|>user\nHello<|im_end|>\n", "plain text", "  <|x|>  ", "<|endoftext|>x <|q|>"),
]


def token(content: str, **flags: bool) -> dict[str, Any]:
    off = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"__type": "AddedToken", "content": content, "special": True} | off | flags


def changed(content: str, **flags: bool) -> Callable[[dict[str, Any]], None]:
    """Gives a token of tokenizer.json other flags."""

    def change(tokenizer: dict[str, Any]) -> None:
        next(each for each in tokenizer["added_tokens"] if each["content"] == content).update(flags)

    return change


def known(**flags: bool) -> dict[str, Any]:
    """tokenizer.json's own tokens by id, with other flags."""
    added = json.loads((BASE / "tokenizer.json").read_text())["added_tokens"]
    return {str(each["id"]): {key: each[key] for key in each if key != "id"} | flags for each in added}


LIST, BOTH = ["<|x|>", "<|y|>"], {"extra_special_tokens": ["<|x|>"], "additional_special_tokens": ["<|y|>", "<|z|>"]}
BY_ID = {str(NEXT): token("<|x|>", lstrip=True), str(NEXT + 1): token("<tool>", special=False)}
MAP = {"eos_token": "<|x|>", "additional_special_tokens": ["<|y|>"]}
# What is in tokenizer_config.json, in other files, and how tokenizer.json differs.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[dict[str, Any]], None] | None]] = {
    "nothing more": ({}, {}, None),
    "added_tokens.json": ({}, {"added_tokens.json": {"<|new|>": NEXT, "<tool>": NEXT + 1}}, None),
    "added_tokens.json, special": (
        {"additional_special_tokens": ["<|new|>"]},
        {"added_tokens.json": {"<|new|>": NEXT, "<tool>": NEXT + 1}},
        None,
    ),
    "added_tokens.json of known ones": ({}, {"added_tokens.json": {"<|im_end|>": 2, "<tool>": NEXT}}, None),
    "additional": ({"additional_special_tokens": LIST}, {}, None),
    "extra": ({"extra_special_tokens": LIST}, {}, None),
    "extra, by name": ({"extra_special_tokens": {"image_token": "<|x|>", "b": "<|y|>"}}, {}, None),
    "both lists": (BOTH, {}, None),
    "extra by name, and additional": (BOTH | {"extra_special_tokens": {"q": "<|x|>"}}, {}, None),
    "additional with flags": ({"additional_special_tokens": [token("<|x|>", lstrip=True)]}, {}, None),
    "additional in the vocabulary": ({"additional_special_tokens": ["the", " there"]}, {}, None),
    "names of this model": ({"image_token": "<|x|>", "boi_token": "<|y|>"}, {}, None),
    "names of this model, apart": ({"model_specific_special_tokens": {"image_token": "<|x|>"}}, {}, None),
    "names of this model, with flags": ({"image_token": token("<|x|>"), "boi_token": {"content": "<|y|>"}}, {}, None),
    "map, names of this model": (
        {},
        {"special_tokens_map.json": {"image_token": {"content": "<|x|>"}}, "added_tokens.json": {"<|x|>": NEXT}},
        None,
    ),
    "a new name that is not special": ({"unk_token": token("<|q|>", special=False)}, {}, None),
    "map": ({}, {"special_tokens_map.json": MAP}, None),
    "map with flags": ({}, {"special_tokens_map.json": {"pad_token": token("<|x|>", lstrip=True)}}, None),
    "map, by name": ({}, {"special_tokens_map.json": {"extra_special_tokens": {"a": "<|x|>"}}}, None),
    "extra in both": (
        {"extra_special_tokens": ["<|z|>"]},
        {"special_tokens_map.json": {"extra_special_tokens": ["<|x|>"]}},
        None,
    ),
    "additional in both": ({"additional_special_tokens": ["<|z|>"]}, {"special_tokens_map.json": MAP}, None),
    "by id": ({"added_tokens_decoder": BY_ID}, {}, None),
    "by id, and a map that does not count": (
        {"added_tokens_decoder": BY_ID},
        {"special_tokens_map.json": MAP, "added_tokens.json": {"<|new|>": NEXT + 2}},
        None,
    ),
    "by id, with other flags": ({"added_tokens_decoder": known(lstrip=True, rstrip=True)}, {}, None),
    "by id, no longer special": ({"added_tokens_decoder": known(special=False)}, {}, None),
    "a new end of sequence": ({"eos_token": token("<|x|>", lstrip=True)}, {}, None),
    "an end of sequence with flags": ({"eos_token": token("<|im_end|>", rstrip=True), "pad_token": "<|x|>"}, {}, None),
    "flags in tokenizer.json": ({}, {}, changed("<|im_end|>", lstrip=True, rstrip=True)),
    "not special there, but named": ({}, {}, changed("<|im_end|>", special=False, lstrip=True)),
    "not special there, but listed": (
        {"additional_special_tokens": ["<|im_start|>"]},
        {},
        changed("<|im_start|>", special=False),
    ),
}
SOME = [
    *("added_tokens.json, special", "both lists", "extra by name, and additional", "map with flags"),
    *("by id, and a map that does not count", "by id, with other flags", "flags in tokenizer.json"),
    *("not special there, but listed", "not special there, but named", "names of this model, apart"),
    *("names of this model, with flags", "map, names of this model", "a new name that is not special"),
]


def write(
    folder: Path,
    config: dict[str, Any],
    files: dict[str, Any],
    change: Callable[[dict[str, Any]], None] | None = None,
    tokenizer_class: str = "PreTrainedTokenizerFast",
) -> Path:
    shutil.copy(BASE / "config.json", folder)
    usual = json.loads((BASE / "tokenizer_config.json").read_text()) | {"tokenizer_class": tokenizer_class}
    tokenizer = json.loads((BASE / "tokenizer.json").read_text())
    if change is not None:
        change(tokenizer)
    for name, content in {"tokenizer_config.json": usual | config, "tokenizer.json": tokenizer, **files}.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "tokenizer_class",
    ["PreTrainedTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizerFast"][:: times(2, 1)],
)
@pytest.mark.parametrize(
    "setting", [{"split_special_tokens": True}, {"add_prefix_space": True}, {"pad_token": ""}], ids=str
)
def test_settings_of_the_tokenizer_mean_what_they_do_in_transformers(
    setting: dict[str, Any], tokenizer_class: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, setting, {}, tokenizer_class=tokenizer_class)
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(str(folder))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize("case", [*CASES][:: times(3, 1)] + SOME)
def test_ids_and_text_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    folder = write(tmp_path, *CASES[case])
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(str(folder))
    assert (ours.vocab_size, ours.eos_token_id) == (len(theirs), theirs.eos_token_id)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        for skips in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skips) == expected


def test_tokenizer_json_counts_where_transformers_rebuilds_the_tokenizer_without_its_flags(tmp_path: Path) -> None:
    folder = write(tmp_path, {}, {}, changed("<|im_end|>", lstrip=True, rstrip=True), "Qwen2TokenizerFast")
    ours = Tokenizer.load(str(folder))
    ids = ours.encode("a <|im_end|> b")
    assert ours.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"
    assert AutoTokenizer.from_pretrained(folder).encode("a <|im_end|> b") != ids


@pytest.mark.parametrize(
    ("config", "files", "said"),
    [
        ({"eos_token": 7}, {}, "tokenizer_config.json: eos_token=7: must be a string"),
        ({"eos_token": {"content": None}}, {}, "tokenizer_config.json: eos_token: content=None: must be a string"),
        ({"pad_token": ["x"]}, {}, r"tokenizer_config.json: pad_token=\['x'\]"),
        ({"additional_special_tokens": "<x>"}, {}, "tokenizer_config.json: additional_special_tokens='<x>': must be a"),
        ({"extra_special_tokens": [3.5]}, {}, r"extra_special_tokens: \[0\]=3.5"),
        ({"extra_special_tokens": {"a": None}}, {}, "extra_special_tokens: a=None"),
        ({"added_tokens_decoder": [1]}, {}, r"added_tokens_decoder=\[1\]: must be an object"),
        ({"added_tokens_decoder": {"x": token("a")}}, {}, "added_tokens_decoder: x="),
        ({"added_tokens_decoder": {"7": None}}, {}, "added_tokens_decoder: 7=None"),
        (
            {"added_tokens_decoder": {"7": {"content": "a", "lstrip": "yes"}}},
            {},
            "added_tokens_decoder: 7: lstrip='yes'",
        ),
        ({}, {"special_tokens_map.json": {"eos_token": 1}}, "special_tokens_map.json: eos_token=1"),
        ({}, {"added_tokens.json": {"<x>": "7"}}, "added_tokens.json: <x>='7': must be a whole number"),
        ({}, {"added_tokens.json": [1]}, "added_tokens.json is not a JSON object"),
    ],
)
def test_what_is_no_token_is_named_with_file_and_key(
    config: dict[str, Any], files: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=said):
        Tokenizer.load(str(write(tmp_path, config, files)))
