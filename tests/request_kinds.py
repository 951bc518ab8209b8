"""What a request may ask for: an example of every parameter, and kinds of requests that are made of them.

Tests that are about all parameters take them from here, so that a new one is entered once. None of the token ids is
above 10: the smallest vocabulary in a test has 11.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

from teachllm.sampling_params import FILTERS, PENALTIES

# Every field of SamplingParams, with a value that is not its default. A filter's cuts some tokens of nearly any row.
EXAMPLES: dict[str, Any] = {
    "n": 2,
    "temperature": 0.75,
    "top_k": 5,
    "top_p": 0.7,
    "min_p": 0.2,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {3: 2.0, 10: -4.0},
    "seed": 11,
    "max_tokens": 9,
    "min_tokens": 3,
    "stop": ("x", "yz"),
    "stop_token_ids": (7, 8),
    "ignore_eos": True,
    "bad_words": ("y",),
    "allowed_token_ids": (2, 3, 5, 7),
    "logprobs": 2,
    "prompt_logprobs": 1,
    "detokenize": False,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
}

# Further values of filters, from one that leaves a single token on; 1e-30 is as good as 0. No top_p is a fraction that
# equal tokens add up to: on whose very edge the sum reaches p, rounding decides.
FILTER_VALUES: dict[str, tuple[float, ...]] = {
    "top_k": (1, 2, 5, 20),
    "top_p": (1e-30, 0.1037, 0.5071, 0.9013, 0.9991),
    "min_p": (0.001, 0.1, 0.7, 1.0),
}


def asking(*names: str, **more: Any) -> dict[str, Any]:
    """Return a request that asks for these parameters' examples, and for more."""
    return {name: EXAMPLES[name] for name in names} | more


# What changes which token a sampler takes, or what it tells of it: each parameter alone, and together.
SAMPLING_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.9},
    **{name: asking(name, temperature=1.2) for name in FILTERS},
    "all filters": asking(*FILTERS, temperature=2.0),
    "penalties": asking(*PENALTIES, temperature=0.0),
    **{name: asking(name, temperature=0.0) for name in (*PENALTIES, "logit_bias", "min_tokens", "logprobs")},
    "allowed_token_ids": asking("allowed_token_ids", temperature=1.0),
    "everything": asking(*FILTERS, *PENALTIES, "logit_bias", "logprobs", temperature=1.3),
}

# Few requests in which all of that occurs, for tests where a request takes long.
MIXTURES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    asking(*PENALTIES, temperature=0.0),
    *(
        asking(name, *beside, temperature=1.0)
        for name, beside in zip(FILTERS, cycle((("presence_penalty",), ("frequency_penalty", "n"), ("min_tokens",))))
    ),
    asking("logit_bias", "min_tokens", temperature=0.9, stop_token_ids=range(60)),
    asking("logprobs", temperature=1.0, stop_token_ids=range(100, 130)),
    asking("allowed_token_ids", "prompt_logprobs", temperature=1.0),
]

# What says when a request ends, how many completions it has, and what its text is.
OTHER_KINDS: dict[str, dict[str, Any]] = {
    "completions": asking("n", "seed", "temperature"),
    "length": asking("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos"),
    "text": asking("stop", "bad_words", "skip_special_tokens", "include_stop_str_in_output"),
    "ids": asking("detokenize", "prompt_logprobs"),
}

KINDS = SAMPLING_KINDS | OTHER_KINDS
