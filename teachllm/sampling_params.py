"""Hold what a request asks of the sampler and when it wants to stop: the knobs of one generation.

The names and defaults are vLLM's, so that a script moves between the two unchanged. Everything here is
plain data: the arithmetic lives in `teachllm/sampling`, the stop rules in `core/request.py` (token ids)
and `engine/text/detokenizer.py` (strings).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

_MAX_COMPLETIONS = 16_384  # of one prompt; each is a request of its own
_GREEDY_EPSILON = 1e-5  # a temperature below this is greedy: dividing by it would overflow

# What each parameter is; those of the second kind may also be None.
_INTEGERS = ("n", "top_k", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs")
_NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_FLAGS = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")
_ID_LISTS = ("stop_token_ids", "allowed_token_ids")
_MAY_BE_NONE = ("seed", "max_tokens", "logprobs", "prompt_logprobs", "stop", "allowed_token_ids", "logit_bias")
_NONE_IS_EMPTY = ("stop_token_ids", "bad_words")  # as vLLM takes it


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
        seed: fixes this request's noise; None, or -1, draws one from the engine's own seed.
        max_tokens: output tokens at most; None runs to `max_model_len`.
        min_tokens: no stop token or stop string ends the output before this many tokens.
        stop: strings that end the output; not part of it unless `include_stop_str_in_output`.
        stop_token_ids: token ids that end the output, beside the model's own end-of-sequence ids.
        ignore_eos: the model's end-of-sequence ids do not end the output.
        bad_words: strings that must not be produced.
        allowed_token_ids: if given, only these may be sampled.
        logprobs: log-probabilities of this many most likely tokens per output token, of the sampled one besides
            (before penalties and temperature). -1 is the whole vocabulary, if the engine's `max_logprobs` is -1.
        prompt_logprobs: the same for each prompt token; such a request does not read the prefix cache.
        detokenize: False returns ids only; stop strings then have nothing to match.
        skip_special_tokens: leave special tokens out of the text.

    Integers of NumPy and the like become Python's, and sequences tuples; of equal token ids one is kept.

    Raises:
        ValueError: a parameter is not of its type, or out of its range.
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
        self._check_types()
        self._check("n", 1 <= self.n <= _MAX_COMPLETIONS, f"from 1 to {_MAX_COMPLETIONS}")
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
            self._check(name, value is None or value >= -1, "0 or more, or -1 for the whole vocabulary")
        self._check("stop", "" not in self.stop_strings, "strings of at least one character")
        self._check("bad_words", "" not in self.bad_words, "strings of at least one character")
        self._check("allowed_token_ids", self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "not empty")
        if self.stop_strings and not self.detokenize:
            raise ValueError("stop strings need text to match: drop stop=, or set detokenize=True")

    def _check_types(self) -> None:
        """Bring every parameter to its type, or refuse it: what a step would stumble over never gets there."""
        for name in _NONE_IS_EMPTY:
            if getattr(self, name) is None:
                object.__setattr__(self, name, ())
        kinds: tuple[tuple[tuple[str, ...], Callable[[Any], Any], str], ...] = (
            (_INTEGERS, _integer, "a whole number of at most 64 bits"),
            (("seed",), as_whole, "a whole number"),
            (_NUMBERS, as_number, "a number that a float can hold"),
            (_FLAGS, as_flag, "True or False"),
            (("stop",), _text_or_texts, "a string or a list of strings, of whole characters"),
            (("bad_words",), _texts, "a list of strings, of whole characters"),
            (_ID_LISTS, _ids, "a list of token ids"),
            (("logit_bias",), _biases, "a dictionary of token ids and numbers"),
        )
        for names, convert, wanted in kinds:
            for name in names:
                value = getattr(self, name)
                if value is None and name in _MAY_BE_NONE:
                    continue
                try:
                    object.__setattr__(self, name, convert(value))
                except (TypeError, ValueError, OverflowError, RuntimeError):  # PyTorch's, of a tensor with several
                    self._check(name, False, wanted)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)

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


def fits_int64(value: int) -> bool:
    """Return whether an integer has a place in an array of 64-bit numbers."""
    return -(1 << 63) <= value < 1 << 63


def as_whole(value: Any) -> int:
    """Return a whole number of any library as Python's.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _integer(value: Any) -> int:
    found = as_whole(value)
    if not fits_int64(found):
        raise OverflowError
    return found


def as_number(value: Any) -> float:
    """Return a number of any library as Python's.

    Raises:
        TypeError: it is none.
        OverflowError: no float is as large.
    """
    plain = value.item() if hasattr(value, "item") else value  # of NumPy or PyTorch
    if isinstance(plain, bool) or not isinstance(plain, Real):
        raise TypeError
    as_float = float(plain)  # an integer may be too large
    return plain if isinstance(plain, int) else as_float


def as_flag(value: Any) -> bool:
    """Return True or False.

    Raises:
        TypeError: it is neither; what Python takes for either, such as "no", is a slip.
    """
    if not isinstance(value, bool):
        raise TypeError
    return value


def _text_or_texts(value: Any) -> str | tuple[str, ...]:
    return _texts([value])[0] if isinstance(value, str) else _texts(value)


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str | bytes | Mapping):
        raise TypeError
    texts = tuple(value)
    if not all(isinstance(each, str) for each in texts):
        raise TypeError
    for each in texts:
        each.encode()  # half a surrogate pair is no text
    return texts


def _ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes | Mapping):
        raise TypeError
    return tuple(dict.fromkeys(map(_integer, value)))  # each once


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError
    return {_integer(token_id): as_number(bias) for token_id, bias in value.items()}
