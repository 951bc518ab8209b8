"""Log-probabilities in the shapes of the two endpoints. JSON knows no infinity, so the least is -9999."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from teachllm.outputs import Logprob

_LEAST = -9999.0

Entry = dict[int, Logprob]


def chat_logprobs(token_ids: Sequence[int], entries: Sequence[Entry], num_top: int) -> dict[str, Any]:
    """Return log-probabilities as in a chat completion.

    Args:
        num_top: how many of the most likely tokens to list.
    """
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        top = sorted((each for each in entry.items() if each[1].rank <= num_top), key=lambda each: each[1].rank)
        listed = [_with_bytes(other, logprob) for other, logprob in top]
        content.append(_with_bytes(token_id, entry[token_id]) | {"top_logprobs": listed})
    return {"content": content}


class CompletionLogprobs:
    """Build log-probabilities as in a text completion: parallel lists, and where in the text each token begins.

    Args:
        text_of: a token's text, where there is no entry that tells it.
    """

    def __init__(self, text_of: Callable[[int], str]) -> None:
        self._text_of = text_of
        self._offset = 0

    def of(self, token_ids: Sequence[int], entries: Sequence[Entry | None]) -> dict[str, Any]:
        """Those of the next tokens; what is known of none is null.

        An entry of None is the first token of all, which nothing predicts, or one that was not scored.
        """
        found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, entry in zip(token_ids, entries, strict=True):
            text = self._text_of(token_id) if entry is None else token_text(token_id, entry[token_id])
            found["text_offset"].append(self._offset)
            found["tokens"].append(text)
            self._offset += len(text)
            if entry is None:
                found["token_logprobs"].append(None)
                found["top_logprobs"].append(None)
                continue
            found["token_logprobs"].append(finite(entry[token_id].logprob))
            top: dict[str, float] = {}
            by_rank = sorted(entry.items(), key=lambda each: each[1].rank)
            for other, logprob in by_rank:  # of ids with one text the likelier is shown
                top.setdefault(token_text(other, logprob), finite(logprob.logprob))
            found["top_logprobs"].append(top)
        return found


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


def token_text(token_id: int, logprob: Logprob) -> str:
    return f"token_id:{token_id}" if logprob.decoded_token is None else logprob.decoded_token


def finite(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST


def _with_bytes(token_id: int, logprob: Logprob) -> dict[str, Any]:
    text = token_text(token_id, logprob)
    return {"token": text, "logprob": finite(logprob.logprob), "bytes": list(text.encode("utf-8"))}
