"""Hold what a request returns: its prompt, and one or more completions that grow as the engine steps."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position, before penalties and temperature.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 for the most likely token.
        decoded_token: what it adds to the text: of a character's tokens the last one has it all, and bytes that are
            no character are U+FFFD of the token that shows it. None without a tokenizer, or where the request does
            not detokenize.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion so far.

    Attributes:
        index: which of the request's `n`.
        text: detokenized, never ending in half a character.
        token_ids: the sampled ids, the stop token included.
        cumulative_logprob: sum over the sampled ids; None unless logprobs were asked for.
        logprobs: per output token, {token id: Logprob}: the sampled one first, then the most likely ones, best first.
        finish_reason: "stop", "length", "abort", or None while it runs.
        stop_reason: the stop string or stop token id that ended it; None for end-of-sequence.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Hold a request's times, in seconds of the engine's clock (`time.perf_counter`); None until they are known.

    Attributes:
        arrival_time: it was added.
        first_scheduled_time: it left the queue, or the first of its `n` completions did.
        first_token_time, last_token_time: of any completion, when the reader of the engine's outputs got it.
        num_preemptions: how often its completions, all together, lost their blocks.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A request's result so far.

    Attributes:
        prompt: the text, or None when ids were given.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache when it was first scheduled.
        prompt_logprobs: per prompt token {token id: Logprob}; the first is None.
        outputs: `n` completions, by index.
        metrics: its times.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)
