"""Hold what a request asks of the sampler and when it wants to stop: the knobs of one generation.

The names and defaults are vLLM's, so that a script moves between the two unchanged. Everything here is
plain data: the arithmetic lives in `teachllm/sampling`, the stop rules in `core/request.py` (token ids)
and `engine/text/detokenizer.py` (strings).

The dataclass is the list of parameters. The table on the device, the options of commands, the fields of the server
and the trace are derived from it; `docs/extending/sampling-parameter.md` shows how to add one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, Literal, TypeVar

_MAX_COMPLETIONS = 16_384  # of one prompt; each is a request of its own
_GREEDY_EPSILON = 1e-5  # a temperature below this is greedy: dividing by it would overflow

Default = TypeVar("Default")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Describe the range of a number.

    Attributes:
        text: the range in words, for an error: a value "must be" this.
        ge, gt, le, lt: at least, more than, at most, less than.
    """

    text: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def hold(self, value: float) -> bool:
        """Return whether a value is in the range; what is not a number never is."""
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """Describe a parameter beyond its name, type and default.

    Attributes:
        bounds: the range of its values.
        stage: the stage of the sampler that reads it from the table on the device; None: it is not in the table.
        option: the help text of its command-line option; None: it has no option.
    """

    bounds: Bounds | None = None
    stage: Literal["constraint", "penalty", "temperature", "filter"] | None = None
    option: str | None = None


def _parameter(default: Default, **spec: Any) -> Default:
    """Return a field of `SamplingParams` with this default and `ParameterSpec`."""
    made: Any = field(default=default, metadata={"spec": ParameterSpec(**spec)})
    return made  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Hold the parameters of one request.

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
        include_stop_str_in_output: the stop string that ends the output is part of its text.

    Integers of NumPy and the like become Python's, and sequences tuples; of equal token ids one is kept.

    Raises:
        ValueError: a parameter is not of its type, or out of its range.
    """

    n: int = _parameter(1, bounds=Bounds(f"from 1 to {_MAX_COMPLETIONS}", ge=1, le=_MAX_COMPLETIONS))
    temperature: float = _parameter(
        1.0,
        bounds=Bounds("0 (greedy) or more, and finite", ge=0, lt=float("inf")),
        stage="temperature",
        option="0 is greedy; higher is more varied.",
    )
    top_k: int = _parameter(
        0,
        bounds=Bounds("0 or -1 (all), or how many tokens to keep", ge=-1),
        stage="filter",
        option="Sample from the k most likely tokens.",
    )
    top_p: float = _parameter(
        1.0,
        bounds=Bounds("in (0, 1]", gt=0, le=1),
        stage="filter",
        option="Sample from the fewest tokens that reach this probability.",
    )
    min_p: float = _parameter(
        0.0,
        bounds=Bounds("in [0, 1]", ge=0, le=1),
        stage="filter",
        option="Sample from tokens at least this fraction as likely as the likeliest.",
    )
    repetition_penalty: float = _parameter(
        1.0,
        bounds=Bounds("above 0 (1 is off)", gt=0, lt=float("inf")),
        stage="penalty",
        option="Above 1 makes tokens that were already there less likely.",
    )
    presence_penalty: float = _parameter(0.0, bounds=Bounds("in [-2, 2]", ge=-2, le=2), stage="penalty")
    frequency_penalty: float = _parameter(0.0, bounds=Bounds("in [-2, 2]", ge=-2, le=2), stage="penalty")
    logit_bias: dict[int, float] | None = None
    seed: int | None = _parameter(None, option="Fixes the noise: the same request gives the same tokens.")
    max_tokens: int | None = _parameter(16, bounds=Bounds("at least 1", ge=1), option="Output tokens at most.")
    min_tokens: int = _parameter(0, bounds=Bounds("0 or more", ge=0), stage="constraint")
    stop: str | Sequence[str] | None = _parameter(
        None, option="End the output at this text; may be given several times."
    )
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = _parameter(None, bounds=Bounds("0 or more, or -1 for the whole vocabulary", ge=-1))
    prompt_logprobs: int | None = _parameter(None, bounds=Bounds("0 or more, or -1 for the whole vocabulary", ge=-1))
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        for name, spec in PARAMETERS.items():
            value = getattr(self, name)
            if spec.bounds is not None and value is not None:
                self._check(name, spec.bounds.hold(value), spec.bounds.text)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}: lower it")
        self._check("stop", "" not in self.stop_strings, "strings of at least one character")
        self._check("bad_words", "" not in self.bad_words, "strings of at least one character")
        self._check("allowed_token_ids", self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "not empty")
        if self.stop_strings and not self.detokenize:
            raise ValueError("stop strings need text to match: drop stop=, or set detokenize=True")

    def _check_types(self) -> None:
        """Bring every parameter to its type, or refuse it: what a step would stumble over never gets there."""
        for name, (convert, wanted, may_be_none) in _CONVERSIONS.items():
            value = getattr(self, name)
            if value is None and may_be_none:
                continue
            if value is None and DEFAULTS[name] == ():  # as vLLM takes it
                value = ()
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

    def num_candidates(self, vocab_size: int) -> int:
        """Return how many tokens `top_k` leaves of a vocabulary: all of them where it is off."""
        return self.top_k if 0 < self.top_k < vocab_size else vocab_size

    def has_filter(self, vocab_size: int) -> bool:
        """Return whether a filter may leave out tokens of a draw. A greedy request draws nothing."""
        others = any(getattr(self, name) != DEFAULTS[name] for name in FILTERS if name != "top_k")
        return not self.greedy and (others or self.num_candidates(vocab_size) < vocab_size)

    @property
    def has_penalty(self) -> bool:
        """Return whether tokens that were already there become more or less likely."""
        return any(getattr(self, name) != DEFAULTS[name] for name in PENALTIES)


PARAMETERS: dict[str, ParameterSpec] = {
    each.name: each.metadata.get("spec", ParameterSpec()) for each in fields(SamplingParams)
}
DEFAULTS: dict[str, Any] = {each.name: each.default for each in fields(SamplingParams)}
FILTERS = tuple(name for name, spec in PARAMETERS.items() if spec.stage == "filter")
PENALTIES = tuple(name for name, spec in PARAMETERS.items() if spec.stage == "penalty")


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


def _conversion(name: str, annotation: str) -> tuple[Callable[[Any], Any], str, bool]:
    """Return what brings a parameter to its type, what an error asks for, and whether None is a value."""
    of_type: dict[str, tuple[Callable[[Any], Any], str]] = {
        "int": (_integer, "a whole number of at most 64 bits"),
        "float": (as_number, "a number that a float can hold"),
        "bool": (as_flag, "True or False"),
        "str | Sequence[str]": (_text_or_texts, "a string or a list of strings, of whole characters"),
        "Sequence[str]": (_texts, "a list of strings, of whole characters"),
        "Sequence[int]": (_ids, "a list of token ids"),
        "dict[int, float]": (_biases, "a dictionary of token ids and numbers"),
    }
    plain = annotation.removesuffix(" | None")
    convert, wanted = (as_whole, "a whole number") if name == "seed" else of_type[plain]  # a seed may be of any size
    return convert, wanted, plain != annotation


_CONVERSIONS = {each.name: _conversion(each.name, str(each.type)) for each in fields(SamplingParams)}
