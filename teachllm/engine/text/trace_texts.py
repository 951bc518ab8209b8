"""The text of each token in a trace: a character of several tokens is its last one's."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from teachllm.core.request import Request
from teachllm.engine.text.detokenizer import IncrementalDetokenizer
from teachllm.engine.text.token_texts import TokenTexts
from teachllm.engine.text.tokenizer import REPLACEMENT, Tokenizer
from teachllm.sampling_params import SamplingParams

_NUM_BEFORE = 24  # tokens that are looked at for the beginning of a character
_PARAMS = SamplingParams(skip_special_tokens=False)


class TraceTexts:
    """Token ids -> what each adds to the text of its request, special tokens included.

    Nearly every token is whole, and its text is known; the others are decoded with those before them. What is no
    character is U+FFFD of the next token that is one, or of the last token.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._alone = TokenTexts(tokenizer)
        # Of requests in the middle of a character.
        self._begun: WeakKeyDictionary[Request, IncrementalDetokenizer] = WeakKeyDictionary()

    def __call__(self, token_ids: Sequence[int], request: Request | None = None) -> list[str]:
        """Return the text of each token.

        Args:
            request: these ids are its newest; None: they are a whole prompt.
        """
        found: list[str] = []
        begun = None if request is None else self._begun.pop(request, None)
        for place, (token_id, text) in enumerate(zip(token_ids, self._alone(token_ids), strict=True)):
            if begun is None and REPLACEMENT in text and self._tokenizer is not None:
                begun = IncrementalDetokenizer(self._tokenizer, _before(token_ids, place, request), _PARAMS)
            if begun is None:
                found.append(text)
                continue
            begun.append([token_id])
            found.append(begun.added[0] or "")
            if begun.is_whole:
                begun = None
        if begun is not None and request is not None and request.finish_reason is None:
            self._begun[request] = begun
        elif begun is not None:
            found[-1] += begun.finish()
        return found


def _before(token_ids: Sequence[int], place: int, request: Request | None) -> list[int]:
    """Return the ids that precede `token_ids[place]` in the request, or in the prompt."""
    known = token_ids if request is None else request.token_ids
    end = len(known) - len(token_ids) + place
    return list(known[max(end - _NUM_BEFORE, 0) : end])
