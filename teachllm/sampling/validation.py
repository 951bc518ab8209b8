"""Check what can be wrong with a request's parameters once the vocabulary is known.

`SamplingParams` checks what it can alone; token ids need the vocabulary's size. Called when a request is added,
so that a bad one is refused in one line and nothing else is disturbed. No torch here: the API process imports it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from teachllm.sampling_params import SamplingParams

# What one request may put on a step, and on the text of its output.
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 16_384  # of all bad words together
MAX_STOP_STRINGS = 1024
MAX_STOP_CHARACTERS = 32_768  # of all stop strings together
MAX_STOP_TOKEN_IDS = 1024
MAX_CONSTRAINT_IDS = 1 << 18  # allowed ids, biases and ids of bad words, of all `n` completions together


def check_params(params: SamplingParams, vocab_size: int, max_logprobs: int) -> None:
    """Checks parameters against a model's vocabulary and the engine's limit.

    Args:
        vocab_size: number of logits the model produces.
        max_logprobs: the most log-probabilities per token that the engine hands out; -1 is no limit.

    Raises:
        ValueError: a token id outside the vocabulary, a bias that is not finite, too many log-probabilities, or more of
            anything than one request may ask for.
    """
    for name, texts, most, most_characters in (
        ("stop", params.stop_strings, MAX_STOP_STRINGS, MAX_STOP_CHARACTERS),
        ("bad_words", params.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS),
    ):
        _check_size(name, len(texts), most, "strings")
        _check_size(name, sum(map(len, texts)), most_characters, "characters")
    _check_size("stop_token_ids", len(params.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")
    check_constraint_ids(params, 0)
    check_ids("logit_bias", params.logit_bias or (), vocab_size)
    check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    for token_id, bias in (params.logit_bias or {}).items():
        if not math.isfinite(bias):
            raise ValueError(
                f"logit_bias={{{token_id}: {bias}}}: must be finite; -100 forbids a token for practical purposes"
            )
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is None or max_logprobs == -1:
            continue
        if wanted > max_logprobs:
            raise ValueError(f"{name}={wanted} is more than max_logprobs={max_logprobs}: ask for fewer, or raise it")
        if wanted == -1:
            raise ValueError(f"{name}=-1 asks for the whole vocabulary: ask for fewer, or set max_logprobs=-1")


def check_constraint_ids(params: SamplingParams, num_bad_word_ids: int) -> None:
    """Checks how many ids a step would have to look at for all completions of a request.

    Args:
        num_bad_word_ids: ids of its bad words, as far as they are known.

    Raises:
        ValueError: more than `MAX_CONSTRAINT_IDS`; names the parameter that has the most.
    """
    sizes = {
        "allowed_token_ids": len(params.allowed_token_ids or ()),
        "logit_bias": len(params.logit_bias or ()),
        "bad_words": num_bad_word_ids,
    }
    largest, total = max(sizes, key=lambda name: sizes[name]), params.n * sum(sizes.values())
    if total > MAX_CONSTRAINT_IDS:
        raise ValueError(
            f"{largest}: with n={params.n} a step would look at {total} ids of allowed_token_ids, logit_bias and bad "
            f"words, and {MAX_CONSTRAINT_IDS} is the most: give fewer, or lower n"
        )


def _check_size(name: str, size: int, most: int, unit: str) -> None:
    if size > most:
        raise ValueError(f"{name}: {size} {unit} are more than the {most} that one request may have: give fewer")


def check_some_token_allowed(
    params: SamplingParams,
    vocab_size: int,
    stop_token_ids: Iterable[int],
    bad_words: Iterable[tuple[int, ...]],
) -> None:
    """Refuses a request whose constraints could forbid every token at some step.

    Counted pessimistically, with every bad word one token short of complete: a row with nothing left to sample
    would otherwise produce an arbitrary token without a word.

    Raises:
        ValueError: nothing would be left to sample.
    """
    forbidden = {word[-1] for word in bad_words if word}
    if params.min_tokens > 0:
        forbidden.update(stop_token_ids)
    if params.allowed_token_ids is None:
        num_left = vocab_size - sum(1 for token_id in forbidden if 0 <= token_id < vocab_size)
    else:
        num_left = len(set(params.allowed_token_ids) - forbidden)
    if num_left <= 0:
        raise ValueError(
            "allowed_token_ids, bad_words and min_tokens together can forbid every token: allow at least one token "
            "that neither ends a bad word nor (with min_tokens) the output"
        )


def check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Refuses a token id outside the vocabulary; `name` is the parameter it came from."""
    ids = list(token_ids)
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise ValueError(f"{name}: token id {wrong} is not in the vocabulary (0 to {vocab_size - 1})")
