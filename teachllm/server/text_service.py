"""Work on the texts of requests, where other clients' streams do not wait for it.

A short text is tokenized where it came in. A long one, and any conversation, goes to a process that can be ended;
without such processes a thread does it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec

from teachllm.engine.text.text_jobs import MAX_INLINE, ChatText, run_text_job
from teachllm.engine.text.tokenizer import Tokenizer

_MAX_INLINE_TOKENS = 512  # that it decodes one by one


class Workers(Protocol):
    """Define what is used of `TextWorkers`."""

    async def run(self, name: str, arguments: bytes) -> Any: ...


@dataclass(frozen=True, slots=True)
class TextWork:
    """A job with the texts of a request.

    Attributes:
        is_short: `now` does it before others notice. Else `later` does it, and is waited for.
    """

    is_short: bool
    now: Callable[[], Any]
    later: Callable[[], Coroutine[Any, Any, Any]]


class TextService:
    """From texts to token ids and back. What each method returns is still to be done.

    Args:
        workers: None: there are no processes for this.
    """

    def __init__(self, tokenizer: Tokenizer, workers: Workers | None = None) -> None:
        self._tokenizer, self._workers = tokenizer, workers

    def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> TextWork:
        """Token ids of some texts."""
        arguments = {"texts": list(texts), "add_special_tokens": add_special_tokens}
        return self._work("encode", arguments, is_short=sum(map(len, texts)) <= MAX_INLINE)

    def chat(self, chat: ChatText) -> TextWork:
        """Token ids of a conversation."""
        return self._work("chat", vars(chat), is_short=False)

    def decode(self, prompts: Sequence[Sequence[int]]) -> TextWork:
        """The texts of some sequences of ids, special tokens included."""
        return self._work("decode", {"prompts": prompts}, is_short=sum(map(len, prompts)) <= MAX_INLINE)

    def token_texts(self, token_ids: Sequence[int]) -> TextWork:
        """The text of each id alone."""
        return self._work("token_texts", {"token_ids": token_ids}, is_short=len(token_ids) <= _MAX_INLINE_TOKENS)

    def _work(self, name: str, arguments: dict[str, Any], is_short: bool) -> TextWork:
        now = partial(run_text_job, self._tokenizer, name, arguments)

        async def later() -> Any:
            packed = msgspec.json.encode(arguments)  # its integers may have more than 64 bits
            if self._workers is not None:
                return await self._workers.run(name, packed)
            return now() if len(packed) <= MAX_INLINE else await asyncio.to_thread(now)

        return TextWork(is_short, now, later)
