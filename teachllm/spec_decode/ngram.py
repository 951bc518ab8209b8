"""A drafter that searches instead of computing (lesson 10): what followed the same words before will follow them again.

It pays where answers repeat their prompts (code edited, texts summed up, questions about a document) and costs a search
elsewhere. This is the host's form, for which a request waits until its tokens are known there; a GPU searches its own
rows (`prompt_lookup_triton`), and nothing waits.

Source: Saxena, "Prompt Lookup Decoding", 2023; the rule is `prompt_lookup.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from teachllm_kernels.speculation.prompt_lookup import find_match


class NgramDrafter:
    """Prompt lookup: proposes what followed the longest earlier occurrence of the sequence's last tokens."""

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        """An occurrence counts from `min_ngram` tokens on; more than `max_ngram` are not looked at.

        Raises:
            ValueError: unless 1 <= min_ngram <= max_ngram.
        """
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram ({min_ngram}) must be at least 1 and at most max_ngram ({max_ngram})")
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram

    def propose(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return up to `num_tokens` proposals for what follows `token_ids`; fewer, or none, where nothing matches.

        Args:
            token_ids: all known tokens of one request. An `array('q')` is read where it lies; a list is copied.
        """
        tokens = np.asarray(token_ids, dtype=np.int64)
        begin = find_match(tokens, self._max_ngram, self._min_ngram, num_tokens)
        return tokens[begin : begin + num_tokens].tolist()
