"""A drafter on the host at work: between two steps, on the tokens that have just become known."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from itertools import islice

from teachllm.core.in_flight import RequestUpdate
from teachllm.spec_decode.drafter import Drafter


class HostDrafting:
    """Has a drafter propose for requests whose tokens are known.

    What goes wrong in it costs a step its drafts, and a warning says so.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size

    def propose(self, updates: Sequence[RequestUpdate]) -> None:
        """Puts ids in the place of the proposals that the plan has asked for."""
        for request in (update.request for update in updates):
            if request.draft_token_ids and not request.finished:
                token_ids = request.token_ids[:]  # a copy: the drafter may do with it what it likes
                request.draft_token_ids = self._checked(token_ids, len(request.draft_token_ids))

    def _checked(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        name = type(self._drafter).__name__
        try:
            ids = [operator.index(each) for each in islice(self._drafter.propose(token_ids, num_tokens), num_tokens)]
        except Exception as error:
            warnings.warn(f"{name} failed, and the step goes on without drafts: {error!r}", stacklevel=2)
            return []
        for index, token_id in enumerate(ids):
            if not 0 <= token_id < self._vocab_size:
                message = f"{name} proposed id {token_id}, not in the vocabulary of {self._vocab_size}: left out"
                warnings.warn(message, stacklevel=2)
                return ids[:index]
        return ids
