"""Hold what the answers of both endpoints have in common: their head, their options, and the cursors of streams."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from teachllm.outputs import CompletionOutput
from teachllm.server.openai.protocol import Sampling


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """Hold what all chunks of an answer have in common.

    Attributes:
        id, created, model: of the answer, and of every chunk of a stream.
        n: completions of a prompt.
        include_usage: a stream ends with the usage.
        continuous_usage: every chunk tells it.
        return_token_ids: ids are told, too.
        wants_prompt_logprobs: so are the prompt's log-probabilities.
    """

    id: str
    model: str
    n: int
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    wants_prompt_logprobs: bool
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, id: str, model: str, request: Sampling, force_include_usage: bool = False) -> ResponseContext:
        options = request.stream_options
        return cls(
            id=id,
            model=model,
            n=request.n or 1,
            include_usage=force_include_usage or bool(options and options.include_usage),
            continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
            return_token_ids=bool(request.return_token_ids),
            wants_prompt_logprobs=request.prompt_logprobs is not None,
        )

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(slots=True)
class StreamCursor:
    """Describe how much of one completion a stream's client knows.

    Attributes:
        before, after: the bytes around the text of a chunk that holds nothing but text.
    """

    index: int
    before: bytes
    after: bytes
    num_chars: int = 0
    num_tokens: int = 0
    has_begun: bool = False
    has_ended: bool = False

    def news(self, completion: CompletionOutput) -> tuple[str, int]:
        """The new text, and the index of the first new token; all of it counts as told from now on."""
        text, first = completion.text[self.num_chars :], self.num_tokens
        self.num_chars, self.num_tokens = len(completion.text), len(completion.token_ids)
        return text, first
