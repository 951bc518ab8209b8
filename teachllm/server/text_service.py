"""Work on the texts of requests, where other clients' streams do not wait for it.

A short text is tokenized where it came in. A long one, and any conversation, goes to a process that can be ended;
without such processes a thread does it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from teachllm.engine.text.text_jobs import run_text_job
from teachllm.engine.text.tokenizer import Tokenizer

MAX_INLINE = 4096  # characters of a request, or bytes of one, that the event loop tokenizes: about three milliseconds
_MAX_INLINE_TOKENS = 512  # that it decodes one by one


class Workers(Protocol):
    """Define what is used of `TextWorkers`."""

    async def run(self, name: str, arguments: bytes) -> Any: ...


class TextService:
    """From texts to token ids and back.

    Args:
        workers: None: there are no processes for this.
    """

    def __init__(self, tokenizer: Tokenizer, workers: Workers | None = None) -> None:
        self._tokenizer, self._workers = tokenizer, workers

    async def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of some texts.

        Raises:
            ValueError: one cannot be tokenized.
        """
        arguments = {"texts": list(texts), "add_special_tokens": add_special_tokens}
        return await self._run("encode", arguments, is_short=sum(map(len, texts)) <= MAX_INLINE)

    async def chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        chat_template: str | None,
        variables: dict[str, Any],
        add_special_tokens: bool,
        max_num_tokens: int,
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            chat_template: None: the checkpoint's.
            variables: of the template, or options of `render_chat_template`.
            max_num_tokens: a text that cannot have so few is refused without being tokenized.

        Raises:
            ValueError: there is no template, it fails or takes too long, or its text is refused.
        """
        arguments = {
            "messages": messages,
            "tools": tools,
            "chat_template": chat_template,
            "variables": variables,
            "add_special_tokens": add_special_tokens,
            "max_num_tokens": max_num_tokens,
        }
        return await self._run("chat", arguments, is_short=False)

    async def decode(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """The texts of some sequences of ids, special tokens included."""
        return await self._run("decode", {"prompts": prompts}, is_short=sum(map(len, prompts)) <= MAX_INLINE)

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each id alone."""
        return await self._run("token_texts", {"token_ids": token_ids}, is_short=len(token_ids) <= _MAX_INLINE_TOKENS)

    async def _run(self, name: str, arguments: dict[str, Any], is_short: bool) -> Any:
        if is_short:
            return run_text_job(self._tokenizer, name, arguments)
        packed = msgspec.msgpack.encode(arguments)
        if self._workers is not None:
            return await self._workers.run(name, packed)
        if len(packed) <= MAX_INLINE:
            return run_text_job(self._tokenizer, name, arguments)
        return await asyncio.to_thread(run_text_job, self._tokenizer, name, arguments)
