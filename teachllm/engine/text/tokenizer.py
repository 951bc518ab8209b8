"""Tokenizer: text to token ids and back, and chat messages to a prompt.

A checkpoint's `tokenizer.json` is read with the `tokenizers` library itself: importing transformers costs over a
second, which a chat in the terminal would wait for. Where transformers would not take that file as it stands
(sentencepiece-style Llama, custom code, no such file), transformers builds the tokenizer, so that the ids are the
same as its own either way.

A special token written out in a user's text (`<|im_end|>`) becomes that special token, as in transformers and
vLLM: who serves strangers should filter such text first.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from teachllm.checkpoint.json_values import JsonObject
from teachllm.engine.text.chat_template import render_conversation
from teachllm.errors import ModelError

if TYPE_CHECKING:
    import tokenizers

# Class names for which transformers reads tokenizer.json unchanged, and those for which it does so if byte-level.
_READ_AS_IS = ("PreTrainedTokenizer", "TokenizersBackend")
_READ_AS_IS_IF_BYTE_LEVEL = ("LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Parts of tokenizer.json, each with a value that it may have in any file.
_PARTS: dict[str, Any] = {"version": "1.0", "added_tokens": []}
_PARTS |= dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding"))
MAX_TOKENS_PER_CHARACTER = 4  # a character has at most 4 bytes in UTF-8, and a token at least one
_LONG_TEXT = 4096  # characters, from which on other threads may run meanwhile: of one text `tokenizers` lets none
_HUB_FILES = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "config.json"]
_HUB_FILES += ["vocab*", "merges.txt", "*.model", "additional_chat_templates/*"]

_TERMINAL_UNSAFE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # ANSI control sequences: colours, cursor movement
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # operating system commands: titles, links, the clipboard
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"  # the other control characters, but not tab and newline
    r"|[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"  # marks that reorder the text around them
)


def sanitize_for_terminal(text: str) -> str:
    """Return model text that is safe to print: no control characters but newline and tab, no reordering marks."""
    return _TERMINAL_UNSAFE.sub("", text)


def check_encodable(name: str, text: str) -> None:
    """Refuse what is no text: half a surrogate pair has no bytes.

    Raises:
        ValueError: gives `name` and the place.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has half a surrogate pair at character {error.start}: send whole characters"
        ) from None


class _Backend(Protocol):
    """Define what both libraries' tokenizers are reduced to."""

    special_ids: frozenset[int]
    vocab_size: int

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...
    def token_to_id(self, token: str) -> int | None: ...
    def id_to_token(self, token_id: int) -> str | bytes | None: ...
    def longest_token(self) -> int: ...


class _TokenizersBackend:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.token_to_id, self.id_to_token = tokenizer.token_to_id, tokenizer.id_to_token

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            if len(text) < _LONG_TEXT:
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of the library, which is no Exception
                raise
            raise ValueError(f"a text of {len(text)} characters cannot be tokenized: {error}") from None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))  # of bytes a letter each, so never too short


class _PythonBackend:
    """A tokenizer that exists only as Python code in transformers or in the checkpoint."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.special_ids = frozenset(tokenizer.all_special_ids)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(token_ids), **options))

    def token_to_id(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.convert_tokens_to_ids(token)
        return token_id

    def id_to_token(self, token_id: int) -> str | bytes | None:
        token: str | bytes | None = self._tokenizer.convert_ids_to_tokens(token_id)
        return token

    def longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))


class Tokenizer:
    """Text to ids and back, for one checkpoint. Made by `load`.

    Attributes:
        eos_token_id: ends a sequence, as the tokenizer's files say; a generation config may name more.
        vocab_size: ids the tokenizer knows, added tokens included; the model may have more logits.
        special_ids: ids that are left out of the text on request.
        replacement_ids: of U+FFFD, behind another character.
    """

    def __init__(self, backend: _Backend, named_tokens: dict[str, str], chat_templates: dict[str, str]) -> None:
        self._backend = backend
        self._named_tokens = named_tokens
        self._chat_templates = chat_templates
        eos_token = named_tokens.get("eos_token")
        self.eos_token_id = None if eos_token is None else backend.token_to_id(eos_token)
        self.vocab_size = backend.vocab_size
        self.special_ids = backend.special_ids
        letter = self.encode("a", add_special_tokens=False)
        self._token_before = letter[-1:]
        self.replacement_ids = self.encode(f"a{REPLACEMENT}", add_special_tokens=False)[len(letter) :]
        self._len_before = len(self.decode(self._token_before, False))

    @classmethod
    def load(cls, path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
        """Load the tokenizer of a local folder or a hub id.

        Args:
            revision: branch, tag or commit on the hub.
            trust_remote_code: run a tokenizer that the checkpoint brings as Python code.

        Raises:
            ValueError: no tokenizer there, or one that cannot be read.
        """
        folder = Path(path) if Path(path).is_dir() else _download(path, revision, trust_remote_code)
        config = _read_json(folder / "tokenizer_config.json")
        loaded = None if trust_remote_code and "auto_map" in config else _load_with_tokenizers(folder, config)
        backend, named_tokens = loaded or _load_with_transformers(folder, trust_remote_code)
        return cls(backend, named_tokens, _read_chat_templates(folder, config))

    @property
    def has_chat_template(self) -> bool:
        """Return whether the checkpoint says what a conversation looks like."""
        return bool(self._chat_templates)

    @cached_property
    def max_characters_per_token(self) -> int:
        """Return the number of characters of the longest token, or more."""
        return self._backend.longest_token()

    def check_length(self, name: str, text: str, max_num_tokens: int) -> None:
        """Refuse a text that is longer than `max_num_tokens` tokens can be, without tokenizing it.

        Raises:
            ValueError: gives `name` and the numbers.
        """
        if len(text) <= max_num_tokens:
            return
        most = max_num_tokens * self.max_characters_per_token
        if len(text) > most:
            raise ValueError(
                f"{name} has {len(text)} characters, and {max_num_tokens} tokens (max_model_len) of at most "
                f"{self.max_characters_per_token} have no more than {most}: shorten it"
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return a text's token ids; `add_special_tokens` adds what the checkpoint puts around one (usually bos)."""
        return self._backend.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that are no character become U+FFFD, ids without a token nothing."""
        return self._backend.decode(token_ids, skip_special_tokens)

    def token_name(self, token_id: int) -> str | bytes | None:
        """Return the vocabulary's entry, in its own spelling."""
        return self._backend.id_to_token(token_id)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token alone, its leading space kept; U+FFFD where it is only part of a character."""
        # Some decoders drop the first token's space, so another one goes first.
        return self.decode([*self._token_before, token_id], False)[self._len_before :]

    def token_text_after(self, before: Sequence[int], token_id: int) -> str:
        """Return the text that a token adds to the tokens before it: of a character's tokens the last one has it all.

        Args:
            before: the ids in front of it; the last three are enough.
        """
        alone = self.token_text(token_id)
        if REPLACEMENT not in alone or [token_id] == self.replacement_ids:
            return alone
        for count in range(min(MAX_TOKENS_PER_CHARACTER - 1, len(before)), -1, -1):
            context = [*self._token_before, *before[len(before) - count :]]
            text = self.decode([*context, token_id], False).rstrip(REPLACEMENT)
            if REPLACEMENT not in text:  # else the context begins inside of a character
                return text[len(self.decode(context, False).rstrip(REPLACEMENT)) :]
        return alone

    def encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return id sequences of forbidden words, each as it stands at a text's start and after a space."""
        spellings = (spelling for word in words for spelling in (word.lstrip() or word, " " + word.lstrip()))
        found = dict.fromkeys(tuple(self.encode(spelling, add_special_tokens=False)) for spelling in spellings)
        return [list(ids) for ids in found if ids]

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Return the token ids of a conversation. Arguments and errors are as in `render_chat_template`."""
        text = self.render_chat_template(
            messages, tools=tools, chat_template=chat_template, add_generation_prompt=add_generation_prompt, **kwargs
        )
        return self.encode_rendered(text)

    def encode_rendered(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a conversation as `render_chat_template` renders it; most have special tokens.

        Raises:
            ValueError: it has half a character.
        """
        check_encodable("a conversation", text)
        return self.encode(text, add_special_tokens)

    def render_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Return the prompt that a conversation becomes.

        Args:
            messages: {"role": ..., "content": ...}, as in OpenAI's API; see `render_conversation`.
            tools: JSON schemas of functions the model may call.
            chat_template: a Jinja template, or the name of one of the checkpoint's, instead of its default.
            add_generation_prompt: end with the header of the assistant's answer.
            continue_final_message: end inside of the last message instead, for the answer to go on with it.
            kwargs: further variables of the template.

        Raises:
            ValueError: there is no template, or it fails or is refused by the sandbox.
        """
        template = self._chat_templates.get(chat_template or "", chat_template)
        if template is None and tools is not None:
            template = self._chat_templates.get("tool_use")
        template = template or self._chat_templates.get("default")
        if template is None:
            raise ValueError("the checkpoint has no chat template: give one with chat_template=, or use a plain prompt")
        header = add_generation_prompt and not continue_final_message
        variables = {"documents": None, **kwargs, "tools": tools, "add_generation_prompt": header}
        return render_conversation(template, messages, self._named_tokens, variables, continue_final_message)


def _load_with_tokenizers(folder: Path, config: dict[str, Any]) -> tuple[_Backend, dict[str, str]] | None:
    """Load tokenizer.json, finished as transformers would; return None where transformers would build another."""
    values = JsonObject(config, "tokenizer_config.json")
    class_name = values.text("tokenizer_class").removesuffix("Fast") if values.has("tokenizer_class") else ""
    if class_name not in _READ_AS_IS + _READ_AS_IS_IF_BYTE_LEVEL or not (folder / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders

    from teachllm.engine.text.added_tokens import add_tokens

    try:
        tokenizer = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        where = _unreadable_part(folder / "tokenizer.json")
        raise ModelError(f"{folder / 'tokenizer.json'}: {where}not a readable tokenizer: {error}") from error
    is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
    if class_name not in _READ_AS_IS and (not is_byte_level or values.flag("add_prefix_space", False)):
        return None

    named = add_tokens(tokenizer, folder, config)
    if values.flag("split_special_tokens", False):
        tokenizer.encode_special_tokens = True
    # `add_bos_token` in the configuration is not read: like transformers, the file's post-processor decides.
    return _TokenizersBackend(tokenizer), named


def _unreadable_part(file: Path) -> str:
    """Return the key of the part without which the file would be readable, with a colon; "": there is none."""
    from tokenizers import Tokenizer as RustTokenizer

    content = _read_json(file)
    for key, harmless in _PARTS.items():
        with contextlib.suppress(Exception):
            RustTokenizer.from_str(json.dumps(content | {key: harmless}))
            return f"{key}: "
    return "model: " if "model" in content else ""


def _load_with_transformers(folder: Path, trust_remote_code: bool) -> tuple[_Backend, dict[str, str]]:
    """Load the tokenizer that transformers builds from the folder."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # many kinds, with pages of advice: the first line says what is wrong
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{folder}: no tokenizer that can be loaded: {reason}") from error
    named = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.encode_special_tokens = tokenizer.split_special_tokens
    backend: _Backend = (
        _TokenizersBackend(tokenizer.backend_tokenizer) if tokenizer.is_fast else _PythonBackend(tokenizer)
    )
    if backend.vocab_size <= len(backend.special_ids):  # what transformers makes out of no files at all
        raise ValueError(f"{folder}: no tokenizer that can be loaded: there are no tokenizer files")
    return backend, named


def _read_chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Read the checkpoint's templates by name; "default" is the one used unasked."""
    values = JsonObject(config, "tokenizer_config.json")
    if isinstance(config.get("chat_template"), str):
        templates = {"default": values.text("chat_template")}
    else:
        listed = values.listed("chat_template")
        parts = [listed.object(place) for place in listed]
        templates = {each.text("name"): each.text("template") for each in parts}
    files = {named.stem: named for named in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    for name, file in files.items():
        try:
            templates[name] = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from None
    return templates


def _download(repo_id: str, revision: str | None, trust_remote_code: bool) -> Path:
    """Return the folder with the tokenizer's files of a hub id, from the cache if they are there."""
    from huggingface_hub import snapshot_download

    patterns = [*_HUB_FILES, "*.py"] if trust_remote_code else _HUB_FILES
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # offline, unknown, private, or no hub id at all
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{repo_id}: neither a local folder nor a model on the hub: {reason}") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: must hold an object")
    return content
