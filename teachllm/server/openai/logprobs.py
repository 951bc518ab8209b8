"""Log-probabilities in the shapes of the two endpoints. JSON knows no infinity, so the least is -9999.

A long answer's are laid out piece by piece, each as JSON at once: other clients wait for one piece, and what it was
made of takes no memory any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from teachllm.engine.text.tokenizer import REPLACEMENT
from teachllm.outputs import Logprob
from teachllm.server.http.sse import encode

_LEAST = -9999.0
_PIECE = 1024  # entries that are laid out at a time: some milliseconds

Entry = dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class TokenStyle:
    """Describe how tokens are told.

    Attributes:
        as_ids: "token_id:17" in place of a token's text.
        hidden_ids: ids that are no part of the text.
    """

    as_ids: bool = False
    hidden_ids: frozenset[int] = frozenset()

    def name(self, token_id: int, text: str | None) -> str:
        return f"token_id:{token_id}" if self.as_ids or text is None else text

    def name_and_bytes(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        text = logprob.decoded_token
        data = None if text is None or token_id in self.hidden_ids else list(text.encode("utf-8"))
        return {"token": self.name(token_id, text), "logprob": finite(logprob.logprob), "bytes": data}


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[Entry], num_top: int, style: TokenStyle
) -> list[dict[str, Any]]:
    """Return the log-probabilities of some tokens as in a chat completion's `content`.

    Args:
        num_top: how many of the most likely tokens to list; -1 is all.
    """
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        listed = (each for each in entry.items() if num_top == -1 or each[1].rank <= num_top)
        top = [style.name_and_bytes(*each) for each in sorted(listed, key=lambda each: each[1].rank)]
        content.append(style.name_and_bytes(token_id, entry[token_id]) | {"top_logprobs": top})
    return content


class CompletionLogprobs:
    """Build log-probabilities as in a text completion: parallel lists, and where in the text each token begins.

    Args:
        text_of: a token's text alone, where there is no entry that tells it.
        prompt: the text that the answer begins with.
    """

    def __init__(self, text_of: Callable[[int], str], style: TokenStyle, prompt: str) -> None:
        self._text_of, self._style, self._prompt = text_of, style, prompt
        self._offset = 0

    def of(
        self, token_ids: Sequence[int], entries: Sequence[Entry | None], num_prompt_tokens: int
    ) -> dict[str, list[Any]]:
        """Those of the next tokens; what is known of none is null.

        An entry of None is the first token of all, which nothing predicts, or one that was not scored.

        Args:
            num_prompt_tokens: so many of them belong to the prompt, of whose text some may be no part.
        """
        found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for place, (token_id, entry) in enumerate(zip(token_ids, entries, strict=True)):
            # U+FFFD of a first token may be part of a character: the next token that is none shows it.
            text = self._text_of(token_id).rstrip(REPLACEMENT) if entry is None else entry[token_id].decoded_token
            if place < num_prompt_tokens:
                text, length = self._in_prompt(text, is_last=place == num_prompt_tokens - 1)
            else:
                length = 0 if text is None or token_id in self._style.hidden_ids else len(text)
            found["text_offset"].append(self._offset)
            found["tokens"].append(self._style.name(token_id, text))
            self._offset += length
            found["token_logprobs"].append(None if entry is None else finite(entry[token_id].logprob))
            found["top_logprobs"].append(None if entry is None else self._top(entry))
        return found

    def _in_prompt(self, text: str | None, is_last: bool) -> tuple[str | None, int]:
        """Return a prompt token's text as the prompt has it, and how many of the prompt's characters it covers."""
        left = len(self._prompt) - self._offset
        if text is None:
            return None, left if is_last else 0
        if is_last and not text:  # part of a character, and nothing before it
            text = self._prompt[self._offset :]
        if self._offset == 0 and not self._prompt.startswith(text) and self._prompt.startswith(text.removeprefix(" ")):
            text = text.removeprefix(" ")  # that the tokenizer puts in front of a text
        length = len(text) if self._prompt.startswith(text, self._offset) else 0  # 0: a token added to the text
        return text, left if is_last else length

    def _top(self, entry: Entry) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in sorted(entry.items(), key=lambda each: each[1].rank):
            # Of ids with one text the likelier is shown.
            top.setdefault(self._style.name(token_id, logprob.decoded_token), finite(logprob.logprob))
        return top


def prompt_logprobs(entries: Sequence[Entry | None]) -> list[dict[str, Any] | None]:
    """Return them as vLLM does: per prompt token, by token id."""
    return [
        None
        if entry is None
        else {
            str(token_id): {"logprob": finite(each.logprob), "rank": each.rank, "decoded_token": each.decoded_token}
            for token_id, each in entry.items()
        }
        for entry in entries
    ]


async def in_pieces(entries: Sequence[Entry | None], lay_out: Callable[[int, int], list[Any]]) -> msgspec.Raw:
    """A long list as JSON, while others have their turns.

    Args:
        entries: those that are laid out.
        lay_out: gives the list's items from one index to another.
    """
    pieces = []
    first = size = 0
    for last, entry in enumerate(entries, start=1):
        size += 1 if entry is None else len(entry)
        if size >= _PIECE or last == len(entries):
            pieces.append(encode(lay_out(first, last))[1:-1])
            first, size = last, 0
            await asyncio.sleep(0)
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")


async def whole_prompt_logprobs(entries: Sequence[Entry | None]) -> msgspec.Raw:
    """Those of a whole prompt as JSON, in pieces."""
    return await in_pieces(entries, lambda first, last: prompt_logprobs(entries[first:last]))


def finite(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST
