"""A drafter on the host at work: between two steps, on the tokens that have just become known."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from itertools import islice

from teachllm.core.in_flight import RequestUpdate
from teachllm.spec_decode.drafter import Drafter

_MAX_FAILURES = 3  # in a row


class HostDrafting:
    """Has a drafter propose for requests whose tokens are known.

    What goes wrong in it costs a step its drafts, and a warning says so. One that goes wrong again and again is asked
    no more, and the last warning says that.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._num_failures = 0  # since it last had something to offer, or nothing to say

    def propose(self, updates: Sequence[RequestUpdate]) -> None:
        """Put ids in the place of the proposals that the plan has asked for."""
        for request in (update.request for update in updates):
            if request.draft_token_ids and not request.finished:
                num_tokens, request.draft_token_ids = len(request.draft_token_ids), []
                if self._num_failures < _MAX_FAILURES:
                    token_ids = request.token_ids[:]  # a copy: the drafter may do with it what it likes
                    request.draft_token_ids = self._ask(token_ids, num_tokens)

    def _ask(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return proposals up to the first invalid one."""
        name = type(self._drafter).__name__
        ids: list[int] = []
        try:
            ids = [operator.index(each) for each in islice(self._drafter.propose(token_ids, num_tokens), num_tokens)]
            wrong = next((index for index, each in enumerate(ids) if not 0 <= each < self._vocab_size), None)
            if wrong is None:
                self._num_failures = 0
                return ids
            problem = f"proposed id {ids[wrong]}, not in the vocabulary of {self._vocab_size}: left out"
            ids = ids[:wrong]
        except Exception as error:
            problem = f"failed, and the step goes on without drafts: {error!r}"
        self._num_failures = 0 if ids else self._num_failures + 1
        if self._num_failures == _MAX_FAILURES:
            problem += f". This was failure {_MAX_FAILURES} in a row: it is asked no more"
        warnings.warn(f"{name} {problem}", stacklevel=3)
        return ids
