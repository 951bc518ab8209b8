"""Tokenizer: text to token ids and back, and chat messages to a prompt.

A checkpoint's `tokenizer.json` is read with the `tokenizers` library itself: importing transformers costs over a
second, which a chat in the terminal would wait for. Where transformers would not take that file as it stands
(sentencepiece-style Llama, custom code, no such file), transformers builds the tokenizer, so that the ids are the
same as its own either way.

A special token written out in a user's text (`<|im_end|>`) becomes that special token, as in transformers and
vLLM: who serves strangers should filter such text first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from teachllm.engine.text.chat_template import render_template

if TYPE_CHECKING:
    import tokenizers

# Class names for which transformers reads tokenizer.json unchanged, and those for which it does so if byte-level.
_READ_AS_IS = ("PreTrainedTokenizer", "TokenizersBackend")
_READ_AS_IS_IF_BYTE_LEVEL = ("LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer")
_LONG_TEXT = 4096  # characters, from which on other threads may run meanwhile: of one text `tokenizers` lets none
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_HUB_FILES = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "config.json"]
_HUB_FILES += ["vocab*", "merges.txt", "*.model", "additional_chat_templates/*"]

_TERMINAL_UNSAFE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # ANSI control sequences: colours, cursor movement
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # operating system commands: titles, links, the clipboard
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"  # the other control characters, but not tab and newline
    r"|[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"  # marks that reorder the text around them
)


def sanitize_for_terminal(text: str) -> str:
    """Model text that is safe to print: no control characters but newline and tab, no reordering marks."""
    return _TERMINAL_UNSAFE.sub("", text)


class _Backend(Protocol):
    """Define what both libraries' tokenizers are reduced to."""

    special_ids: frozenset[int]
    vocab_size: int

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...
    def token_to_id(self, token: str) -> int | None: ...


class _TokenizersBackend:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.token_to_id = tokenizer.token_to_id

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < _LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


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


class Tokenizer:
    """Text to ids and back, for one checkpoint. Made by `load`.

    Attributes:
        eos_token_id: ends a sequence, as the tokenizer's files say; a generation config may name more.
        vocab_size: ids the tokenizer knows, added tokens included; the model may have more logits.
        special_ids: ids that are left out of the text on request.
    """

    def __init__(self, backend: _Backend, named_tokens: dict[str, str], chat_templates: dict[str, str]) -> None:
        self._backend = backend
        self._named_tokens = named_tokens
        self._chat_templates = chat_templates
        eos_token = named_tokens.get("eos_token")
        self.eos_token_id = None if eos_token is None else backend.token_to_id(eos_token)
        self.vocab_size = backend.vocab_size
        self.special_ids = backend.special_ids
        self._token_before = self.encode("a", add_special_tokens=False)[-1:]
        self._len_before = len(self.decode(self._token_before, False))

    @classmethod
    def load(cls, path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
        """Loads the tokenizer of a local folder or a hub id.

        Args:
            revision: branch, tag or commit on the hub.
            trust_remote_code: run a tokenizer that the checkpoint brings as Python code.

        Raises:
            ValueError: no tokenizer there, or one that cannot be read.
        """
        folder = Path(path) if Path(path).is_dir() else _download(path, revision, trust_remote_code)
        config = _read_json(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # transformers' older format spreads over two files
            config |= _read_json(folder / "special_tokens_map.json")
        loaded = None if trust_remote_code and "auto_map" in config else _load_with_tokenizers(folder, config)
        backend, named_tokens = loaded or _load_with_transformers(folder, trust_remote_code)
        return cls(backend, named_tokens, _read_chat_templates(folder, config))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` adds what the checkpoint puts around one (usually bos)."""
        return self._backend.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no character become U+FFFD, ids without a token nothing."""
        return self._backend.decode(token_ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token alone, its leading space kept; U+FFFD where it is only part of a character."""
        # Some decoders drop the first token's space, so another one goes first.
        return self.decode([*self._token_before, token_id], False)[self._len_before :]

    def encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Id sequences of words that must not be produced, each as it stands at a text's start and after a space."""
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
        """Token ids of a conversation. Arguments and errors as in `render_chat_template`."""
        text = self.render_chat_template(
            messages, tools=tools, chat_template=chat_template, add_generation_prompt=add_generation_prompt, **kwargs
        )
        return self.encode(text, add_special_tokens=False)  # the template has written them

    def render_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt that a conversation becomes.

        Args:
            messages: {"role": ..., "content": ...}, as in OpenAI's API.
            tools: JSON schemas of functions the model may call.
            chat_template: a Jinja template, or the name of one of the checkpoint's, instead of its default.
            add_generation_prompt: end with the header of the assistant's answer.
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
        return render_template(
            template,
            {
                **self._named_tokens,
                "documents": None,
                **kwargs,
                "messages": [{k: v for k, v in message.items() if v is not None} for message in messages],
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
            },
        )


def _load_with_tokenizers(folder: Path, config: dict[str, Any]) -> tuple[_Backend, dict[str, str]] | None:
    """tokenizer.json, finished as transformers would; None where transformers would build something else."""
    class_name = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    if class_name not in _READ_AS_IS + _READ_AS_IS_IF_BYTE_LEVEL or not (folder / "tokenizer.json").is_file():
        return None
    from tokenizers import AddedToken, decoders
    from tokenizers import Tokenizer as RustTokenizer

    try:
        tokenizer = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{folder / 'tokenizer.json'}: not a readable tokenizer: {error}") from error
    if class_name not in _READ_AS_IS and not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return None

    by_id = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_tokens([AddedToken(**token) for _, token in by_id if token["content"] not in known])
    named = {name: _content(config[name]) for name in _NAMED_TOKENS if config.get(name)}
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = [_content(token) for token in (more.values() if isinstance(more, dict) else more)]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (*named.values(), *extra)]
    )
    # `add_bos_token` in the configuration is not read: like transformers, the file's post-processor decides.
    return _TokenizersBackend(tokenizer), named


def _load_with_transformers(folder: Path, trust_remote_code: bool) -> tuple[_Backend, dict[str, str]]:
    """Whatever transformers makes of the folder."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # many kinds, with pages of advice: the first line says what is wrong
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{folder}: no tokenizer that can be loaded: {reason}") from error
    named = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name in _NAMED_TOKENS}
    backend: _Backend = (
        _TokenizersBackend(tokenizer.backend_tokenizer) if tokenizer.is_fast else _PythonBackend(tokenizer)
    )
    if backend.vocab_size <= len(backend.special_ids):  # what transformers makes out of no files at all
        raise ValueError(f"{folder}: no tokenizer that can be loaded: there are no tokenizer files")
    return backend, named


def _read_chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The checkpoint's templates by name; "default" is the one used unasked."""
    declared = config.get("chat_template")
    templates = (
        {"default": declared} if isinstance(declared, str) else {t["name"]: t["template"] for t in declared or ()}
    )
    file = folder / "chat_template.jinja"
    if file.is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    for named in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[named.stem] = named.read_text(encoding="utf-8")
    return templates


def _download(repo_id: str, revision: str | None, trust_remote_code: bool) -> Path:
    """The tokenizer's files of a hub id, from the cache if they are there."""
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
    except ValueError as error:
        raise ValueError(f"{file}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: must hold an object")
    return content


def _content(token: str | dict[str, Any]) -> str:
    """A special token is declared as its text, or as an object with the text in it."""
    return token if isinstance(token, str) else token["content"]
