"""Bytes of tokens, and characters out of bytes that arrive a few at a time; a byte of none is shown as ⟨f0⟩."""

from __future__ import annotations

import codecs
import re

from teachllm.engine.text.tokenizer import REPLACEMENT, Tokenizer

_FALLBACK = re.compile("<0x([0-9A-F]{2})>")  # how sentencepiece spells a byte
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# How byte-level vocabularies spell each byte (GPT-2's table).
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


def token_bytes(tokenizer: Tokenizer, token_id: int, text: str) -> bytes:
    """Return what a token stands for; `text` is its text alone."""
    name = tokenizer.token_name(token_id) if REPLACEMENT in text else None
    if name is None:
        return text.encode()
    if isinstance(name, bytes):
        return name
    if fallback := _FALLBACK.fullmatch(name):
        return bytes.fromhex(fallback[1])
    found = [_BYTE_OF.get(letter) for letter in name]
    return text.encode() if None in found else bytes(byte for byte in found if byte is not None)


def bracketed(data: bytes) -> str:
    """Return bytes that are no character as they are shown."""
    return "".join(f"⟨{byte:02x}⟩" for byte in data)


def _bracket_error(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return bracketed(error.object[error.start : error.end]), error.end


codecs.register_error("teachllm.bracket", _bracket_error)


class CharacterDecoder:
    """Characters out of bytes, each with its last byte.

    Args:
        before: bytes in front, which have been shown; the first ones may complete a character of theirs.
    """

    def __init__(self, before: bytes) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("teachllm.bracket")
        self._decoder.decode(before)
        self._shown = bracketed(self._decoder.getstate()[0])

    @property
    def is_whole(self) -> bool:
        """Return whether no character has begun."""
        return not self._decoder.getstate()[0]

    def decode(self, data: bytes, is_last: bool = False) -> str:
        """Return the text of these bytes and of the bytes held back; with the last ones, nothing is held back."""
        text = self._decoder.decode(data, is_last)
        if text:
            text, self._shown = text.removeprefix(self._shown), ""
        return text
