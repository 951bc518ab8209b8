"""A parameter that the vocabulary contradicts is refused in one clear line."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from teachllm.sampling import validation
from teachllm.sampling.validation import check_params, check_some_token_allowed
from teachllm.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {10: 1.0}}, "logit_bias: token id 10 is not in the vocabulary"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: token id -1"),
        ({"logit_bias": {1: float("nan")}}, "must be finite"),
        ({"allowed_token_ids": [1, 99]}, "allowed_token_ids: token id 99"),
        ({"stop_token_ids": [10]}, "stop_token_ids: token id 10"),
        ({"logprobs": 6}, "logprobs=6 is more than max_logprobs=5"),
        ({"prompt_logprobs": 6}, "prompt_logprobs=6"),
    ],
)
def test_what_the_vocabulary_contradicts_is_named(params: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_params(SamplingParams(**params), vocab_size=10, max_logprobs=5)
    assert "\n" not in str(caught.value)


def test_what_fits_passes() -> None:
    params = SamplingParams(logit_bias={9: -100.0}, allowed_token_ids=[0, 9], stop_token_ids=[9], logprobs=5)
    check_params(params, vocab_size=10, max_logprobs=5)
    check_params(SamplingParams(), vocab_size=10, max_logprobs=0)


@pytest.mark.parametrize(
    ("params", "stop_token_ids", "bad_words", "refused"),
    [
        ({"allowed_token_ids": [3]}, [3], [], False),
        ({"allowed_token_ids": [3], "min_tokens": 1}, [3], [], True),
        ({"allowed_token_ids": [3, 4], "min_tokens": 1}, [3], [], False),
        ({"allowed_token_ids": [3, 4]}, [], [(1, 3), (4,)], True),
        ({}, [], [(0,), (1,), (2, 2)], True),
        ({}, [], [(0,), (1,), (2, 2), (3,)], True),
        ({}, [], [(0,), (1, 1)], False),
    ],
)
def test_a_row_with_nothing_left_to_sample_is_refused(
    params: dict, stop_token_ids: list[int], bad_words: list[tuple[int, ...]], refused: bool
) -> None:
    vocab_size = 5 if params else 3
    if refused:
        with pytest.raises(ValueError, match="can forbid every token"):
            check_some_token_allowed(SamplingParams(**params), vocab_size, stop_token_ids, bad_words)
    else:
        check_some_token_allowed(SamplingParams(**params), vocab_size, stop_token_ids, bad_words)


def test_checking_needs_nothing_but_the_parameters() -> None:
    """The server's front imports it, without torch."""
    nodes = list(ast.walk(ast.parse(Path(validation.__file__).read_text())))
    found = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    found |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    ours = {name for name in found if name.split(".")[0] not in sys.stdlib_module_names}
    assert ours == {"teachllm.sampling_params"}
