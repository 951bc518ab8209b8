"""The answer to a conversation, whole or in chunks.

Nearly every chunk of a busy server holds a few new characters and nothing else: that one is put together from bytes
laid out beforehand. All others take the long way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from teachllm.outputs import CompletionOutput, RequestOutput
from teachllm.server.http.sse import encode, event
from teachllm.server.openai.generation import usage
from teachllm.server.openai.logprobs import Entry, TokenStyle, chat_logprobs, in_pieces, whole_prompt_logprobs
from teachllm.server.openai.response_context import ResponseContext, StreamCursor
from teachllm.server.openai.tool_text import ToolText

if TYPE_CHECKING:
    from teachllm.server.openai.tool_parsers import ToolParser

_KIND = "chat.completion.chunk"


class ChatAnswer:
    """Build the answer of one request.

    Args:
        num_top: log-probabilities of so many tokens are told; None: of none.
        parser: makes what finds calls of tools in one completion; None: they are not looked for.
        parallel: all calls are told, not only the first.
        style: how tokens are told.
        prefix: what every message begins with.
    """

    def __init__(
        self,
        context: ResponseContext,
        num_top: int | None,
        parser: Callable[[], ToolParser] | None,
        parallel: bool = True,
        style: TokenStyle | None = None,
        prefix: str = "",
    ) -> None:
        self._context, self._num_top, self._parser, self._parallel = context, num_top, parser, parallel
        self._style, self._prefix = style or TokenStyle(), prefix
        self._tells_tokens = num_top is not None or context.return_token_ids
        self._is_plain = not self._tells_tokens and parser is None and not context.continuous_usage
        self._output: RequestOutput | None = None
        self._cursors = [self._new_cursor(index) for index in range(context.n)]
        self._tools = [self._tool_text() for _ in range(context.n)]

    async def whole(self, outputs: list[RequestOutput]) -> bytes:
        output = outputs[0]
        answer = self._context.head("chat.completion")
        answer["choices"] = [await self._choice(completion) for completion in output.outputs]
        answer["usage"] = usage(outputs)
        answer["prompt_logprobs"] = None
        if self._context.wants_prompt_logprobs:
            answer["prompt_logprobs"] = await whole_prompt_logprobs(output.prompt_logprobs or [])
        answer["prompt_token_ids"] = output.prompt_token_ids if self._context.return_token_ids else None
        return encode(answer)

    def chunk(self, index: int, output: RequestOutput) -> bytes:
        self._output = output
        pieces = []
        for cursor, completion in zip(self._cursors, output.outputs, strict=True):
            if cursor.has_ended:
                continue
            if not cursor.has_begun:
                cursor.has_begun = True
                pieces.append(self._first(cursor.index, output))
            if completion.finish_reason is not None or not self._is_plain:
                pieces += self._news(cursor, completion)
            elif len(completion.text) > cursor.num_chars:
                pieces += (cursor.before, encode(completion.text[cursor.num_chars :]), cursor.after)
                cursor.num_chars = len(completion.text)
        return b"".join(pieces)

    def last(self) -> bytes:
        if not self._context.include_usage or self._output is None:
            return b""
        return event(encode(self._context.head(_KIND) | {"choices": [], "usage": usage([self._output])}))

    async def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        reason, tools = completion.finish_reason, self._tools[completion.index]
        if tools is not None:
            deltas = tools.feed(completion.text, is_end=True)
            message |= tools.message(deltas)
            reason = tools.finish_reason(reason)
        if self._prefix:
            message["content"] = self._prefix + (message["content"] or "")
        choice = {"index": completion.index, "message": message, "logprobs": None}
        if self._num_top is not None and (entries := completion.logprobs) is not None:
            lay_out = partial(self._lay_out, completion.token_ids, entries)
            choice["logprobs"] = {"content": await in_pieces(entries, lay_out)}
        choice |= {"finish_reason": reason, "stop_reason": completion.stop_reason}
        choice["token_ids"] = completion.token_ids if self._context.return_token_ids else None
        return choice

    def _lay_out(self, token_ids: list[int], entries: list[Entry], first: int, last: int) -> list[Any]:
        return chat_logprobs(token_ids[first:last], entries[first:last], self._num_top or 0, self._style)

    def _news(self, cursor: StreamCursor, completion: CompletionOutput) -> list[bytes]:
        """The chunks that tell what is new."""
        text, first_token = cursor.news(completion)
        has_new_tokens = len(completion.token_ids) > first_token
        cursor.has_ended, reason = completion.finished, completion.finish_reason
        tools = self._tools[cursor.index]
        if tools is None:
            deltas: list[dict[str, Any]] = [{"content": text}] if text else []
        else:
            deltas = tools.feed(text, cursor.has_ended)
            reason = tools.finish_reason(reason)
        if cursor.has_ended and deltas and "tool_calls" in deltas[-1]:
            deltas.append({})  # the end has a chunk of its own: OpenAI's client overlooks a call that begins in it
        if not deltas and (cursor.has_ended or (self._tells_tokens and has_new_tokens)):
            deltas = [{"content": ""}]
        chunks = []
        for i, delta in enumerate(deltas):
            is_last = i == len(deltas) - 1
            choice: dict[str, Any] = {"index": cursor.index, "delta": delta}
            choice["logprobs"] = self._logprobs(completion, first_token) if is_last else None
            choice["finish_reason"] = reason if is_last else None
            if choice["finish_reason"] is not None:
                choice["stop_reason"] = completion.stop_reason
            if self._context.return_token_ids:
                choice["token_ids"] = completion.token_ids[first_token:] if is_last else []
            chunks.append(self._event(choice))
        return chunks

    def _first(self, index: int, output: RequestOutput) -> bytes:
        choice = {"index": index, "delta": {"role": "assistant", "content": self._prefix}}
        more: dict[str, Any] = {"prompt_token_ids": output.prompt_token_ids} if self._context.return_token_ids else {}
        if self._context.continuous_usage:  # of what has been told so far, and that is nothing
            found = usage([output])
            more["usage"] = found | {"completion_tokens": 0, "total_tokens": found["prompt_tokens"]}
        return self._event(choice | {"logprobs": None, "finish_reason": None}, **more)

    def _event(self, choice: dict[str, Any], **more: Any) -> bytes:
        chunk = self._context.head(_KIND) | {"choices": [choice]}
        if self._context.include_usage:
            chunk["usage"] = usage([self._output]) if self._context.continuous_usage and self._output else None
        return event(encode(chunk | more))

    def _logprobs(self, completion: CompletionOutput, first: int) -> dict[str, Any] | None:
        if self._num_top is None or completion.logprobs is None:
            return None
        last = len(completion.logprobs)
        return {"content": self._lay_out(completion.token_ids, completion.logprobs, first, last)}

    def _tool_text(self) -> ToolText | None:
        return None if self._parser is None else ToolText(self._parser(), self._parallel)

    def _new_cursor(self, index: int) -> StreamCursor:
        choice = {"index": index, "delta": {"content": ""}, "logprobs": None, "finish_reason": None}
        # Inside a JSON string, such as a model's name, its quotes would be escaped.
        before, after = self._event(choice).split(b'"delta":{"content":""', 1)
        return StreamCursor(index, before + b'"delta":{"content":', after)
