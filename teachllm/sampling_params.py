"""Hold what a request asks of the sampler and when it wants to stop: the knobs of one generation.

The names and defaults are vLLM's, so that a script moves between the two unchanged. Everything here is
plain data: the arithmetic lives in `teachllm/sampling`, the stop rules in `core/request.py` (token ids)
and `engine/text/detokenizer.py` (strings).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_GREEDY_EPSILON = 1e-5  # a temperature below this is greedy: dividing by it would overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request.

    Attributes:
        n: completions of the same prompt; their prompt blocks are shared.
        temperature: 0 is greedy (the most likely token, ties to the lowest id).
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches p.
        min_p: keep tokens at least this fraction as likely as the most likely one.
        repetition_penalty: > 1 makes tokens of prompt and output less likely (divides or multiplies the logit).
        presence_penalty: subtracted once from the logit of every token already in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        logit_bias: added to the logits of these token ids.
        seed: fixes this request's noise; None draws one from the engine's own seed.
        max_tokens: output tokens at most; None runs to `max_model_len`.
        min_tokens: no stop token or stop string ends the output before this many tokens.
        stop: strings that end the output; not part of it unless `include_stop_str_in_output`.
        stop_token_ids: token ids that end the output, beside the model's own end-of-sequence ids.
        ignore_eos: the model's end-of-sequence ids do not end the output.
        bad_words: strings that must not be produced.
        allowed_token_ids: if given, only these may be sampled.
        logprobs: log-probabilities of this many most likely tokens per output token, of the sampled one besides
            (before penalties and temperature).
        prompt_logprobs: the same for each prompt token; such a request does not read the prefix cache.
        detokenize: False returns ids only; stop strings then have nothing to match.
        skip_special_tokens: leave special tokens out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self._check("n", self.n >= 1, "at least 1")
        self._check("temperature", 0.0 <= self.temperature < float("inf"), "0 (greedy) or more, and finite")
        self._check("top_k", self.top_k >= -1, "0 or -1 (all), or how many tokens to keep")
        self._check("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]")
        self._check("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]")
        self._check("repetition_penalty", 0.0 < self.repetition_penalty < float("inf"), "above 0 (1 is off)")
        for name in ("presence_penalty", "frequency_penalty"):
            self._check(name, -2.0 <= getattr(self, name) <= 2.0, "in [-2, 2]")
        self._check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        self._check("min_tokens", self.min_tokens >= 0, "0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}: lower it")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            self._check(name, value is None or value >= 0, "0 or more")
        self._check("stop", "" not in self.stop_strings, "strings of at least one character")
        self._check("bad_words", "" not in self.bad_words, "strings of at least one character")
        self._check("allowed_token_ids", self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "not empty")
        if self.stop_strings and not self.detokenize:
            raise ValueError("stop strings need text to match: drop stop=, or set detokenize=True")

    def _check(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ValueError(f"{name}={getattr(self, name)!r}: must be {wanted}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_EPSILON


def plain(value: Any) -> Any:
    """A list or a number, for whoever writes parameters down, of what a user may give in place of one: a range, a set,
    NumPy's."""
    return value.tolist() if hasattr(value, "tolist") else list(value)
