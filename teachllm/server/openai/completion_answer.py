"""The answer of /v1/completions, whole or in chunks. Choice `prompt * n + i` is completion i of that prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from teachllm.outputs import CompletionOutput, RequestOutput
from teachllm.server.http.sse import encode, event
from teachllm.server.openai.generation import usage
from teachllm.server.openai.logprobs import CompletionLogprobs, TokenStyle, in_pieces, whole_prompt_logprobs
from teachllm.server.openai.response_context import ResponseContext, StreamCursor
from teachllm.server.turns import Turns

_KIND = "text_completion"


@dataclass(frozen=True, slots=True)
class CompletionPrompt:
    """Hold a prompt of a completion request.

    Attributes:
        text: what `echo` repeats.
    """

    token_ids: list[int]
    text: str


class CompletionAnswer:
    """Build the answer of one request.

    Args:
        text_of: a token's text alone.
        style: how tokens are told.
        echo: every text begins with its prompt.
        wants_logprobs: tokens and their log-probabilities are told.
        is_scoring: nothing was asked for but the prompt; what was sampled is left out.
    """

    def __init__(
        self,
        context: ResponseContext,
        prompts: Sequence[CompletionPrompt],
        text_of: Callable[[int], str],
        style: TokenStyle,
        *,
        echo: bool = False,
        wants_logprobs: bool = False,
        is_scoring: bool = False,
    ) -> None:
        self._context, self._prompts = context, prompts
        self._echo, self._wants_logprobs, self._is_scoring = echo, wants_logprobs, is_scoring
        self._tells_tokens = wants_logprobs or context.return_token_ids
        self._is_plain = not self._tells_tokens and not context.continuous_usage and not is_scoring
        self._outputs: dict[int, RequestOutput] = {}
        self._cursors = [self._new_cursor(index) for index in range(context.n * len(prompts))]
        self._logprobs = [
            CompletionLogprobs(text_of, style, prompt.text) for prompt in prompts for _ in range(context.n)
        ]

    async def whole(self, outputs: list[RequestOutput]) -> bytes:
        choices = []
        turns = Turns()
        for index, output in enumerate(outputs):
            for cursor, completion in self._choices(index, output):
                cursor.has_ended = True
                await turns.pass_on()
                choices.append(await self._whole_choice(cursor, completion, output))
        return encode(self._context.head(_KIND) | {"choices": choices, "usage": self._usage(outputs)})

    async def _whole_choice(
        self, cursor: StreamCursor, completion: CompletionOutput, output: RequestOutput
    ) -> dict[str, Any]:
        """Return a choice whose log-probabilities, which may be many, are JSON already."""
        choice = dict.fromkeys(("prompt_logprobs", "token_ids", "prompt_token_ids"))
        choice |= self._choice(cursor, completion, output, with_logprobs=False)
        token_ids, entries = self._tokens(cursor, completion, output, 0, is_first=True)
        if self._wants_logprobs:
            lists: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": []}

            def top_logprobs(first: int, last: int) -> list[Any]:
                num_prompt = self._num_echoed(cursor) - first
                found = self._logprobs[cursor.index].of(token_ids[first:last], entries[first:last], num_prompt)
                for name, values in lists.items():
                    values += found[name]
                return found["top_logprobs"]

            top = await in_pieces(entries, top_logprobs)
            choice["logprobs"] = {**lists, "top_logprobs": top}
        if self._context.wants_prompt_logprobs:
            choice["prompt_logprobs"] = await whole_prompt_logprobs(output.prompt_logprobs or [])
        return choice

    def chunk(self, index: int, output: RequestOutput) -> bytes:
        self._outputs[index] = output
        pieces = []
        for cursor, completion in self._choices(index, output):
            if cursor.has_ended:
                continue
            has_news = len(completion.text) > cursor.num_chars
            if completion.finish_reason is not None or not cursor.has_begun or not self._is_plain:
                cursor.has_ended = completion.finished
                if self._tells_tokens:
                    has_news |= len(completion.token_ids) > cursor.num_tokens
                if cursor.has_ended or (has_news and self._knows_prompt(output)):
                    choice = self._choice(cursor, completion, output)
                    pieces.append(self._event({"choices": [choice]}))
            elif has_news:
                pieces += (cursor.before, encode(completion.text[cursor.num_chars :]), cursor.after)
                cursor.num_chars = len(completion.text)
        return b"".join(pieces)

    def last(self) -> bytes:
        if not self._context.include_usage:
            return b""
        return event(encode(self._context.head(_KIND) | {"choices": [], "usage": self._usage_so_far()}))

    def _choices(self, index: int, output: RequestOutput) -> list[tuple[StreamCursor, CompletionOutput]]:
        first = index * self._context.n
        return list(zip(self._cursors[first : first + self._context.n], output.outputs, strict=True))

    def _choice(
        self, cursor: StreamCursor, completion: CompletionOutput, output: RequestOutput, with_logprobs: bool = True
    ) -> dict[str, Any]:
        """Return what is new of one completion: of one that nothing was told of, everything."""
        is_first, cursor.has_begun = not cursor.has_begun, True
        prompt = self._prompts[cursor.index // self._context.n]
        text, first_token = cursor.news(completion)
        text = "" if self._is_scoring else text
        choice: dict[str, Any] = {"index": cursor.index, "text": text, "logprobs": None}
        if is_first and self._echo:
            choice["text"] = prompt.text + text
        if self._wants_logprobs and with_logprobs:
            token_ids, entries = self._tokens(cursor, completion, output, first_token, is_first)
            num_prompt = self._num_echoed(cursor) if is_first else 0
            choice["logprobs"] = self._logprobs[cursor.index].of(token_ids, entries, num_prompt)
        if cursor.has_ended:
            reason = "length" if self._is_scoring else completion.finish_reason
            choice |= {"finish_reason": reason, "stop_reason": None if self._is_scoring else completion.stop_reason}
        else:
            choice["finish_reason"] = None
        if self._context.return_token_ids:
            choice["token_ids"] = [] if self._is_scoring else completion.token_ids[first_token:]
            if is_first:
                choice["prompt_token_ids"] = prompt.token_ids
        return choice

    def _tokens(
        self, cursor: StreamCursor, completion: CompletionOutput, output: RequestOutput, first: int, is_first: bool
    ) -> tuple[list[int], list[Any]]:
        """Return the ids of a choice's tokens from `first` on, and the log-probabilities of each."""
        token_ids, entries = completion.token_ids[first:], (completion.logprobs or [])[first:]
        if self._is_scoring:
            token_ids, entries = [], []
        if not (is_first and self._echo):
            return token_ids, list(entries)
        prompt = self._prompts[cursor.index // self._context.n]
        scored = output.prompt_logprobs or []
        unscored = [None] * (len(prompt.token_ids) - len(scored))  # an abort comes at any time
        return [*prompt.token_ids, *token_ids], [*scored, *unscored, *entries]

    def _num_echoed(self, cursor: StreamCursor) -> int:
        return len(self._prompts[cursor.index // self._context.n].token_ids) if self._echo else 0

    def _knows_prompt(self, output: RequestOutput) -> bool:
        """Return whether the prompt's scores are known, if asked for: another completion may be ahead of them."""
        return not self._echo or len(output.prompt_logprobs or output.prompt_token_ids) == len(output.prompt_token_ids)

    def _event(self, content: dict[str, Any]) -> bytes:
        chunk = self._context.head(_KIND) | content
        if self._context.include_usage:
            chunk["usage"] = self._usage_so_far() if self._context.continuous_usage else None
        return event(encode(chunk))

    def _usage_so_far(self) -> dict[str, Any]:
        return self._usage(list(self._outputs.values()))

    def _usage(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        found = usage(outputs)
        if self._is_scoring:
            found |= {"completion_tokens": 0, "total_tokens": found["prompt_tokens"]}
        return found

    def _new_cursor(self, index: int) -> StreamCursor:
        chunk = self._event({"choices": [{"index": index, "text": "", "logprobs": None, "finish_reason": None}]})
        # Inside a JSON string, such as a model's name, its quotes would be escaped.
        before, after = chunk.split(b'"text":""', 1)
        return StreamCursor(index, before + b'"text":', after, has_begun=not self._echo and self._is_plain)
