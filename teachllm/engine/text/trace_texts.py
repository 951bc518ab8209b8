"""The text of each token in a trace: a character of several tokens is its last one's."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from teachllm.core.request import Request
from teachllm.engine.text.token_bytes import CharacterDecoder, token_bytes
from teachllm.engine.text.token_texts import TokenTexts
from teachllm.engine.text.tokenizer import MAX_TOKENS_PER_CHARACTER, REPLACEMENT, Tokenizer


class TraceTexts:
    """Token ids -> what each adds to the text of its request, special tokens included.

    Nearly every token is whole, and its text is known; the others are decoded with those before them. A byte of no
    character is shown as ⟨f0⟩, with the token that makes this certain: the next one that cannot go on from it, or the
    last one of all.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._alone = TokenTexts(tokenizer)
        # Of requests in the middle of a character.
        self._begun: WeakKeyDictionary[Request, CharacterDecoder] = WeakKeyDictionary()

    def __call__(self, token_ids: Sequence[int], request: Request | None = None) -> list[str]:
        """Return the text of each token.

        Args:
            request: these ids are its newest; None: they are a whole prompt.
        """
        found: list[str] = []
        begun = None if request is None else self._begun.pop(request, None)
        for place, (token_id, text) in enumerate(zip(token_ids, self._alone(token_ids), strict=True)):
            if begun is None and REPLACEMENT in text and self._tokenizer is not None:
                begun = CharacterDecoder(self._bytes(_before(token_ids, place, request)))
            if begun is None:
                found.append(text)
                continue
            found.append(begun.decode(self._bytes([token_id])))
            if begun.is_whole:
                begun = None
        if begun is not None and request is not None and request.finish_reason is None:
            self._begun[request] = begun
        elif begun is not None:
            found[-1] += begun.decode(b"", is_last=True)
        return found

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        assert self._tokenizer is not None
        pairs = zip(token_ids, self._alone(token_ids), strict=True)
        return b"".join(token_bytes(self._tokenizer, token_id, text) for token_id, text in pairs)


def _before(token_ids: Sequence[int], place: int, request: Request | None) -> list[int]:
    """Return the ids that precede `token_ids[place]` in the request, or in the prompt, as far as a character goes."""
    known = token_ids if request is None else request.token_ids
    end = len(known) - len(token_ids) + place
    return list(known[max(end - MAX_TOKENS_PER_CHARACTER + 1, 0) : end])
