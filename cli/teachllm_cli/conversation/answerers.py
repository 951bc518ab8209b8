"""Answer in a chat, by an engine in this process or a running server. The conversation is the same with both."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from teachllm.sampling_params import SamplingParams
from teachllm_cli.conversation.history import Message
from teachllm_cli.conversation.openai_client import OpenAIClient, TooLongError
from teachllm_cli.speculation_line import speculation_line

if TYPE_CHECKING:
    from teachllm import LLM
    from teachllm.engine.observability.speculation_stats import Speculation


@dataclass
class StreamedAnswer:
    """One answer as it streams in. Times are seconds from the question; None: not known."""

    text: str = ""
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    first_token_s: float = 0.0
    total_s: float = 0.0
    speculation: Speculation | None = None

    def stats(self) -> str:
        """Speed counts the tokens after the first: the wait for that one is another figure."""
        parts = []
        if self.num_prompt_tokens is not None:
            cached = "" if self.num_cached_tokens is None else f", {self.num_cached_tokens} from the prefix cache"
            parts.append(f"{self.num_prompt_tokens} prompt tokens{cached}")
        if self.num_output_tokens is not None:
            parts.append(f"{self.num_output_tokens} output tokens")
        parts.append(f"first after {self.first_token_s * 1000:.0f} ms")
        if (self.num_output_tokens or 0) > 1 and self.total_s > self.first_token_s:
            parts.append(f"{(self.num_output_tokens - 1) / (self.total_s - self.first_token_s):.0f} tokens/s")  # type: ignore[operator]
        line = "; ".join(parts)
        return line if self.speculation is None else f"{line}\n{speculation_line(self.speculation)}"


class Answerer(Protocol):
    """Define a client that answers a conversation.

    Attributes:
        name: of the model.
        where: it runs, to be read after its name.
        length_flags: what may be raised if an answer is cut off.
        stops_between_steps: an answer must not be interrupted but between two steps.
        max_model_len: the most tokens of prompt and answer together; None where they cannot be counted.
    """

    @property
    def name(self) -> str: ...
    @property
    def where(self) -> str: ...
    @property
    def length_flags(self) -> str: ...
    @property
    def stops_between_steps(self) -> bool: ...
    @property
    def max_model_len(self) -> int | None: ...

    def count_tokens(self, messages: list[Message]) -> int:
        """Tokens of a prompt. Asked only where there is a `max_model_len`."""

    def stream(self, messages: list[Message]) -> Generator[StreamedAnswer, None, None]:
        """One answer, whenever it has grown. Closing the generator ends the request.

        Raises:
            TooLongError: it does not fit, which could not be counted before.
        """


class EngineAnswerer:
    """An engine in this process."""

    length_flags = "--max-tokens or --max-model-len"
    stops_between_steps = True

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm, self._params = llm, params

    @property
    def name(self) -> str:
        return self._llm.config.model

    @property
    def where(self) -> str:
        device = self._llm.config.device
        place = "the CPU" if device.startswith("cpu") else f"the GPU ({device})"
        return f"on {place}, with a context of {self.max_model_len} tokens"

    @property
    def max_model_len(self) -> int:
        length = self._llm.config.max_model_len
        assert length is not None  # resolved
        return length

    def count_tokens(self, messages: list[Message]) -> int:
        tokenizer = self._llm.tokenizer
        assert tokenizer is not None  # chat has no flag to skip it
        return len(tokenizer.apply_chat_template(messages))

    def stream(self, messages: list[Message]) -> Generator[StreamedAnswer, None, None]:
        answer = StreamedAnswer()
        self._llm.speculation()  # what was before it is not this answer's
        stream = self._llm.stream_chat(messages, self._params)
        with contextlib.closing(stream):
            try:
                for result in stream:
                    output, num_prompt = result.outputs[0], len(result.prompt_token_ids)
                    answer.text, answer.finish_reason = output.text, output.finish_reason
                    answer.num_prompt_tokens, answer.num_cached_tokens = num_prompt, result.num_cached_tokens
                    answer.num_output_tokens = len(output.token_ids)
                    yield answer
            finally:
                answer.speculation = self._llm.speculation()


class ServerAnswerer:
    """A running server.

    Args:
        fields: of the body, beside the messages.

    Raises:
        ServerError: no server answers.
    """

    length_flags = "--max-tokens"
    stops_between_steps = False

    def __init__(self, client: OpenAIClient, fields: Mapping[str, Any]) -> None:
        self._client, self._fields = client, fields
        count = client.count_tokens([{"role": "user", "content": "Hi"}])
        self.max_model_len = None if count is None else count.max_model_len

    @property
    def name(self) -> str:
        return self._client.model

    @property
    def where(self) -> str:
        context = "" if self.max_model_len is None else f", with a context of {self.max_model_len} tokens"
        return f"at {self._client.root}{context}"

    def count_tokens(self, messages: list[Message]) -> int:
        count = self._client.count_tokens(messages)
        return 0 if count is None else count.num_tokens

    def stream(self, messages: list[Message]) -> Generator[StreamedAnswer, None, None]:
        try:
            yield from self._stream({"messages": messages, **self._fields})
        except TooLongError:
            # An engine cuts an answer off where its context ends; servers refuse what might not fit. Without a limit
            # they give what is left, which is less. But where turns could be forgotten in its place, that goes first.
            if self.max_model_len is None and any(message["role"] == "assistant" for message in messages):
                raise
            yield from self._stream({"messages": messages, **self._fields, "max_tokens": None})

    def _stream(self, body: Mapping[str, Any]) -> Generator[StreamedAnswer, None, None]:
        answer = StreamedAnswer()
        for chunk in self._client.stream("/v1/chat/completions", body):
            has_text = False
            for choice in chunk.get("choices") or ():
                text = (choice.get("delta") or {}).get("content") or ""
                has_text = has_text or bool(text)
                answer.text += text
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            _read_usage(answer, chunk.get("usage"))
            if has_text:
                yield answer
        yield answer


def _read_usage(answer: StreamedAnswer, usage: Mapping[str, Any] | None) -> None:
    if usage:
        answer.num_prompt_tokens, answer.num_output_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        answer.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
