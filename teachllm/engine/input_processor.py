"""From what a user asks to what the scheduler takes: text becomes token ids, `n` completions become `n` requests.

What cannot be done is refused here, with the one line that says why, before the scheduler has heard of it.
"""

from __future__ import annotations

import operator
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np

from teachllm.config import EngineConfig
from teachllm.core.request import Request, check_prompt_length
from teachllm.engine.text.tokenizer import Tokenizer, check_encodable
from teachllm.models.model_config import ModelConfig
from teachllm.sampling.validation import check_constraint_ids, check_ids, check_params, check_some_token_allowed
from teachllm.sampling_params import SamplingParams, fits_int64

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt with its parameters, checked, and all of their text as token ids: what takes long is done.

    Attributes:
        text: None of a prompt that was given as ids.
        packed_ids: `token_ids` as they lie in memory.
        bad_word_token_ids: id sequences that may not be produced.
    """

    text: str | None
    token_ids: list[int]
    packed_ids: array[int]
    params: SamplingParams
    bad_word_token_ids: tuple[tuple[int, ...], ...]
    cache_salt: str | None


class InputProcessor:
    """Makes requests.

    Args:
        config: resolved for the model.
        tokenizer: None takes prompts as token ids alone.

    Attributes:
        num_requests: that the engine has taken so far; those without a seed have noise by this number.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self._config, self._model_config, self._tokenizer = config, model_config, tokenizer
        self.num_requests = 0

    def prepare(self, prompt: Prompt, params: SamplingParams, cache_salt: str | None = None) -> PreparedPrompt:
        """Check a prompt and its parameters, and tokenize their texts. May run in any thread.

        Raises:
            ValueError: the prompt is none, can never fit, or a parameter does not suit the model.
        """
        if isinstance(prompt, Mapping):
            prompt, cache_salt = _content(prompt, cache_salt)
        if cache_salt is not None:
            if not isinstance(cache_salt, str):
                raise ValueError(f"cache_salt={cache_salt!r}: must be a string")
            check_encodable("cache_salt", cache_salt)
        text, token_ids, packed_ids = self._token_ids(prompt)
        bad_words = self._check(params)
        params = self._with_whole_vocabulary(params)
        return PreparedPrompt(text, token_ids, packed_ids, params, bad_words, cache_salt)

    def requests(
        self, request_id: str, prepared: PreparedPrompt, *, priority: int, arrival_time: float
    ) -> list[Request]:
        """Return the `n` completions of a request; they share the prompt's blocks.

        Raises:
            ValueError: the priority is none.
        """
        if not isinstance(priority, int) or isinstance(priority, bool) or not fits_int64(priority):
            raise ValueError(f"priority={priority!r}: must be a whole number of at most 64 bits")
        params, cache_salt = prepared.params, prepared.cache_salt
        seed = params.seed
        if seed is None:  # the same engine seed and order of requests give the same noise
            digest = sha256(f"{self._config.seed} {self.num_requests + 1}".encode()).digest()
            seed = int.from_bytes(digest[:8], "little")
        # The first child scores the prompt for all.
        others = params if params.prompt_logprobs is None else replace(params, prompt_logprobs=None)
        return [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}#{index}",
                prompt_token_ids=prepared.packed_ids,
                sampling_params=params if index == 0 else others,
                eos_token_ids=self._model_config.eos_token_ids,
                arrival_time=arrival_time,
                priority=priority,
                cache_keys=() if cache_salt is None else (f"salt {cache_salt}",),
                group=request_id if params.n > 1 else None,
                child_index=index,
                seed=seed,
                bad_word_token_ids=prepared.bad_word_token_ids,
            )
            for index in range(params.n)
        ]

    def _with_whole_vocabulary(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with -1 log-probabilities spelled out: as many as there are tokens."""
        everything = self._model_config.vocab_size
        if params.logprobs == -1:
            params = replace(params, logprobs=everything)
        return replace(params, prompt_logprobs=everything) if params.prompt_logprobs == -1 else params

    def bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the id sequences of a request's bad words; none without a tokenizer."""
        if self._tokenizer is None or not params.bad_words:
            return ()
        return tuple(map(tuple, self._tokenizer.encode_bad_words(params.bad_words)))

    def _token_ids(self, prompt: Prompt) -> tuple[str | None, list[int], array[int]]:
        """Return text, ids and packed ids of a prompt. Only C code looks at a long one's ids: its first token waits."""
        text: str | None = None
        given: Any = prompt
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError('skip_tokenizer_init=True: give prompts as {"prompt_token_ids": [...]}')
            check_encodable("a prompt", prompt)
            self._tokenizer.check_length("the prompt", prompt, self._config.max_model_len or len(prompt))
            text, given = prompt, self._tokenizer.encode(prompt)
        if not isinstance(given, Iterable) or isinstance(given, bytes | bytearray | Mapping):
            kind = type(given).__name__
            raise ValueError(f"a prompt is a text, token ids, or a dictionary with either, not {kind}")
        if self._config.max_model_len is not None and isinstance(given, Sized):
            check_prompt_length(len(given), self._config.max_model_len)
        ids, vocab_size = list(given), self._model_config.vocab_size
        try:
            packed = array("q", struct.pack(f"{len(ids)}q", *ids))  # faster than from the list
        except (struct.error, TypeError):
            packed = array("q")
        values = np.asarray(packed)
        if len(values) < len(ids) or (ids and (values.min() < 0 or values.max() >= vocab_size)):
            wrong = next(token_id for token_id in ids if not _is_below(token_id, vocab_size))
            raise ValueError(f"prompt token id {wrong!r} is not in the vocabulary of {vocab_size}")
        if text is None and (kinds := set(map(type, ids))) - {int}:
            if any(issubclass(kind, bool | np.bool_) for kind in kinds):
                raise ValueError("a prompt's token ids are whole numbers, not True or False")
            ids = packed.tolist()  # from NumPy or a tensor
        return text, ids, packed

    def _check(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Refuse what this model or engine cannot do; return the bad words as ids."""
        vocab_size = self._model_config.vocab_size
        check_params(params, vocab_size, self._config.max_logprobs)
        for name, words in (("stop strings", params.stop_strings), ("bad_words", params.bad_words)):
            if words and self._tokenizer is None:
                raise ValueError(f"{name} are text: drop them, or set skip_tokenizer_init=False")
        bad_words = self.bad_word_ids(params)
        check_ids("bad_words", (token_id for word in bad_words for token_id in word), vocab_size)
        check_constraint_ids(params, sum(map(len, bad_words)))
        stops = set(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._model_config.eos_token_ids)
        check_some_token_allowed(params, vocab_size, stops, bad_words)
        return bad_words


def num_characters(prompt: Prompt, params: SamplingParams) -> int:
    """Return how much text of a request is to be tokenized, in characters."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return (len(text) if isinstance(text, str) else 0) + sum(map(len, params.bad_words))


def _content(prompt: Mapping[str, Any], cache_salt: str | None) -> tuple[Prompt, str | None]:
    """Return the text or ids of a prompt dictionary, and the salt that goes with it."""
    given = {key: value for key, value in prompt.items() if value is not None}
    salt = given.pop("cache_salt", cache_salt)
    if cache_salt not in (None, salt):
        raise ValueError(f"cache_salt={cache_salt!r}, and the prompt dictionary says {salt!r}: give one of them")
    text, token_ids = given.pop("prompt", None), given.pop("prompt_token_ids", None)
    if given:
        raise ValueError(f"a prompt dictionary with {next(iter(given))!r} is not supported: it has {', '.join(_KEYS)}")
    if (text is None) == (token_ids is None):
        raise ValueError('a prompt dictionary has either "prompt" or "prompt_token_ids"')
    if not isinstance(text, str | None) or isinstance(token_ids, str):
        raise ValueError('in a prompt dictionary, "prompt" is a text and "prompt_token_ids" a list of token ids')
    return token_ids if text is None else text, salt


def _is_below(token_id: Any, vocab_size: int) -> bool:
    """Return whether this is an id of the model; a tokenizer may know more."""
    try:
        return 0 <= operator.index(token_id) < vocab_size
    except TypeError:
        return False
