"""The settings of speculation: vLLM's words mean here what they mean there, and none is taken that would do nothing."""

from __future__ import annotations

import ast
import json
from dataclasses import asdict
from typing import Any

import pytest

from teachllm import speculative_config
from teachllm.speculative_config import SpeculativeConfig

NGRAM, EAGLE = {"method": "ngram"}, {"method": "eagle", "model": "x"}
TREE = "[(0,), (1,), (2,), (0, 0), (1, 0)]"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (NGRAM | {"load_format": "dummy"}, "load_format='dummy' has an effect only with a model (method draft_model,"),
        ({"method": "custom", "load_format": "pt"}, "load_format='pt' has an effect only with a model"),
        (NGRAM | {"revision": "main"}, "revision='main' has an effect only with a model"),
        (EAGLE | {"prompt_lookup_max": 3}, "prompt_lookup_max=3 has an effect only with method='ngram': leave it out"),
        (EAGLE | {"prompt_lookup_min": 6}, "prompt_lookup_min=6 has an effect only with method='ngram'"),
        ({"method": "custom", "prompt_lookup_min": 2}, "prompt_lookup_min=2 has an effect only with method='ngram'"),
        (
            NGRAM | {"synthetic_acceptance_rate": 0.5},
            "synthetic_acceptance_rate=0.5 has an effect only with rejection_sample_method='synthetic': leave it out",
        ),
        (EAGLE | {"draft_tensor_parallel_size": 2}, "tensor parallelism of a drafter is not supported, set it to 1"),
        (NGRAM | {"rejection_sample_method": "strict"}, "'strict': choose standard or synthetic (a draft that was"),
        (
            NGRAM | {"rejection_sample_method": "block"},
            "'block': choose standard or synthetic (drafts are verified",
        ),
        (EAGLE | {"speculative_token_tree": TREE, "num_speculative_tokens": 3}, "(or to its number of nodes, 5)"),
        (NGRAM | {"prompt_lookup_max": 0}, "prompt_lookup_min=1, prompt_lookup_max=0: the first must be at least 1"),
    ],
)
def test_what_would_do_nothing_or_something_else_is_refused_in_one_line(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as error:
        SpeculativeConfig.of(given)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        EAGLE | {"prompt_lookup_max": 4, "prompt_lookup_min": 1, "draft_tensor_parallel_size": 1},
        NGRAM | {"synthetic_acceptance_rate": 0.8, "rejection_sample_method": "standard"},
        EAGLE | {"load_format": "dummy", "revision": "main"},
        NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 0.3},
        EAGLE | {"speculative_token_tree": TREE, "num_speculative_tokens": 5},
        NGRAM | {"prompt_lookup_min": 6},
    ],
)
def test_what_a_trace_says_of_them_is_taken_again(given: dict[str, Any]) -> None:
    config = SpeculativeConfig.of(given)
    assert SpeculativeConfig.of(json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize(
    ("given", "longest_and_shortest"),
    [
        ({}, (4, 1)),
        ({"prompt_lookup_min": 3}, (4, 3)),
        ({"prompt_lookup_min": 6}, (6, 6)),
        ({"prompt_lookup_max": 2}, (2, 1)),
        ({"prompt_lookup_max": 9, "prompt_lookup_min": 9}, (9, 9)),
    ],
)
def test_of_two_lookup_lengths_the_one_not_given_follows_the_other(
    given: dict[str, Any], longest_and_shortest: tuple[int, int]
) -> None:
    config = SpeculativeConfig.of(NGRAM | given)
    assert (config.prompt_lookup_max, config.prompt_lookup_min) == longest_and_shortest


def test_a_tree_takes_its_depth_or_its_number_of_nodes() -> None:
    by_depth, by_nodes = (
        SpeculativeConfig.of(EAGLE | {"speculative_token_tree": TREE, "num_speculative_tokens": number})
        for number in (2, 5)
    )
    assert by_depth == by_nodes
    assert (by_nodes.num_speculative_tokens, by_nodes.max_drafts) == (2, 5)
    wide = str([(i,) for i in range(speculative_config.MAX_NODES)])
    config = SpeculativeConfig.of(EAGLE | {"speculative_token_tree": wide, "num_speculative_tokens": 63})
    assert (config.num_speculative_tokens, config.max_drafts) == (1, 63)


def test_probabilistic_is_another_word_for_standard() -> None:
    given = EAGLE | {"rejection_sample_method": "probabilistic"}
    assert SpeculativeConfig.of(given) == SpeculativeConfig.of(EAGLE)


def test_a_tree_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    class Counting:
        @staticmethod
        def literal_eval(text: str) -> Any:
            read.append(text)
            return ast.literal_eval(text)

    monkeypatch.setattr(speculative_config, "ast", Counting)
    config = SpeculativeConfig.of(EAGLE | {"speculative_token_tree": TREE, "num_speculative_tokens": 2})
    assert [config.max_drafts, config.max_drafts, len(config.tree or ())] == [5, 5, 5]
    assert read == [TREE]
