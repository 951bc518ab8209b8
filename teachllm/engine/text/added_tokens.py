"""Tokens that a checkpoint adds to its tokenizer's vocabulary: which there are, what each does, and which have a name.

They are spread over several files, some of older formats, and transformers 5 decides which of them counts:

    tokenizer_config.json    `added_tokens_decoder`: tokens by id, with their flags. If it is there, the next two files
                             are not read, and its flags replace those in tokenizer.json
    special_tokens_map.json  tokens by name
    added_tokens.json        ids by token
    tokenizer.json           `added_tokens`; whatever the others lack stays as it is there
    tokenizer_config.json    `extra_special_tokens`, a list or an object, or else `additional_special_tokens`; those in
                             `model_specific_special_tokens`, and every token under a key that ends in "_token"

A token's flags: with `lstrip` and `rstrip` it takes the spaces before and after it, with `normalized` it is looked for
in the normalised text, and a special one can be left out of the decoded text.

GPT2Tokenizer and Qwen2Tokenizer are rebuilt by transformers from vocabulary and merges, without what tokenizer.json
alone knows: tokens that `added_tokens_decoder` leaves out, and flags that differ. Here that file counts.

Source: `PreTrainedTokenizerBase._from_pretrained` and `TokenizersBackend.__init__` of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from teachllm.checkpoint.files import read_json_if_any
from teachllm.checkpoint.json_values import JsonObject

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "single_word")
_BY_ID, _OF_MODEL = "added_tokens_decoder", "model_specific_special_tokens"
_EXTRA, _ADDITIONAL = "extra_special_tokens", "additional_special_tokens"
_CONFIG, _MAP, _IDS = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"


def add_tokens(tokenizer: Tokenizer, folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Add the tokens of the other files to a tokenizer that was read from tokenizer.json, and return the named ones.

    Args:
        config: tokenizer_config.json.

    Returns:
        {"eos_token": "</s>", ...}, with the names that only this model has.

    Raises:
        ModelError: a value is no token; names file and key.
    """
    own, is_new = tokenizer.get_added_tokens_decoder(), _BY_ID in config
    if is_new and config[_BY_ID] is None:
        raise JsonObject(config, _CONFIG).refusal(_BY_ID, "an object")
    older = {} if is_new else read_json_if_any(folder / _MAP)
    named, unnamed = _named(config, older), _unnamed(config, older)
    if is_new:
        values = JsonObject(config, _CONFIG).object(_BY_ID)
        by_id = {_id(values, key): _token(values, key, is_special=False) for key in values}
    else:
        special = {token.content for token in (*named.values(), *unnamed)}
        ids = JsonObject(read_json_if_any(folder / _IDS), _IDS)
        by_id = {ids.integer(text, least=0): AddedToken(text, special=text in special) for text in ids} | own
    flags = {token.content: token for token in by_id.values()}
    named = {name: flags.get(token.content, token) for name, token in named.items()}
    as_they_are = {repr(token) for token in own.values()}  # with their flags, some of which change now
    names = {token.content for token in named.values()}
    for token in (*by_id.values(), *named.values()):
        token.special = token.special or token.content in names
    added = [token for _, token in sorted(by_id.items()) if repr(token) not in as_they_are]
    known = {token.content for token in (*own.values(), *added)}
    unknown = {each.content: each for each in (*named.values(), *unnamed) if each.content not in known}
    tokenizer.add_tokens([*added, *unknown.values()])
    return {name: token.content for name, token in named.items()}


def _named(config: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, AddedToken]:
    found: dict[str, AddedToken] = {}
    for where, source in ((_CONFIG, config), (_MAP, older)):
        values = JsonObject(source, where)
        for key in values:
            if (
                source[key] != ""
                and values.has(key)
                and (key in _NAMES or (key.endswith("_token") and _is_token(source[key], where)))
            ):
                found[key] = _token(values, key)
        for group in (_OF_MODEL, _EXTRA):
            if values.is_object(group):
                of_model = values.object(group)
                found |= {key: _token(of_model, key) for key in of_model}
    return found


def _is_token(value: Any, where: str) -> bool:
    """Return whether a value under a name of the model's own is a token: text, or an object with the text.

    In tokenizer_config.json such an object also names its type.
    """
    if isinstance(value, dict):
        return "content" in value and (where == _MAP or value.get("__type") == "AddedToken")
    return isinstance(value, str)


def _unnamed(config: Mapping[str, Any], older: Mapping[str, Any]) -> list[AddedToken]:
    lists = [_tokens(config, _CONFIG, _EXTRA) or _tokens(config, _CONFIG, _ADDITIONAL), _tokens(older, _MAP, _EXTRA)]
    return [token for each in lists for token in each] or _tokens(older, _MAP, _ADDITIONAL)


def _tokens(source: Mapping[str, Any], where: str, key: str) -> list[AddedToken]:
    """Return the tokens of a list; none of an object under the newer key, which gives them names."""
    if key == _EXTRA and isinstance(source.get(key), dict):
        return []
    values = JsonObject(source, where).listed(key)
    return [_token(values, place) for place in values]


def _token(values: JsonObject, key: str, is_special: bool = True) -> AddedToken:
    """Return a token: a string, or an object with `content` and flags.

    Args:
        is_special: unless it says otherwise.
    """
    if not values.is_object(key):
        return AddedToken(values.text(key), special=is_special)
    token = values.object(key)
    is_special = token.flag("special", is_special)
    flags = {name: token.flag(name, False) for name in _FLAGS}
    return AddedToken(
        token.text("content"), special=is_special, normalized=token.flag("normalized", not is_special), **flags
    )


def _id(values: JsonObject, key: str) -> int:
    if not key.isdecimal() or not values.is_object(key):
        raise values.refusal(key, "a token with its flags, under its id")
    return int(key)
