"""Schedule speculation (lesson 10): the tokens still to compute end in guesses.

A step that samples may carry drafts, proposals for the tokens after the newest one. They are computed with it, and
the accepted ones come back as tokens: one step, several tokens. `settle` rolls back the rejected ones.

    step n      ... newest | d1 d2 d3      `add_drafts`: what was proposed after step n - 1 is computed now
    after it               | d1' d2'       `ask_for_drafts`: so many may be proposed now, for step n + 1

How many to ask for is a `DraftLength`'s decision; here it is cut to what fits: the drafter's context, the end of the
request and the free blocks. Drafts never take anything away from a request: they get the remaining budget and blocks.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from teachllm.core.kv_cache_manager import KVCacheManager
from teachllm.core.request import Request
from teachllm.core.scheduler_output import SchedulerOutput


class DraftLength(Protocol):
    def choose(self, requests: Sequence[Request], num_tokens: int) -> Sequence[tuple[int, str]]:
        """Return how many tokens to draft for each request of a step of `num_tokens`, and why; it may be too many."""

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Learn how many of a request's drafts were verified, and how many of them were accepted."""


def add_drafts(
    plan: SchedulerOutput, requests: Mapping[str, Request], kv: KVCacheManager, budget: int, has_blocks: bool
) -> None:
    """Add to a plan what was proposed for its requests, as far as budget and free blocks go."""
    for scheduled in plan.scheduled:
        request = requests[scheduled.request_id]
        drafts = request.draft_token_ids
        request.draft_token_ids = []
        if not (has_blocks and drafts and scheduled.samples and scheduled.num_tokens == 1):
            continue
        # The step yields one token more than its drafts: no draft may lie beyond the last wanted token.
        num_drafts = min(len(drafts), budget, request.max_len - request.num_expected_tokens)
        while (new_blocks := kv.allocate(request, request.num_computed_tokens + num_drafts)) is None:
            num_drafts -= 1
        scheduled.new_block_ids += new_blocks
        scheduled.draft_token_ids = drafts[:num_drafts]
        scheduled.num_tokens += num_drafts
        request.num_computed_tokens += num_drafts
        request.num_in_flight_tokens += num_drafts
        budget -= num_drafts


def ask_for_drafts(
    plan: SchedulerOutput,
    requests: Mapping[str, Request],
    kv: KVCacheManager,
    length: DraftLength,
    drafter_len: int | None,
    has_blocks: bool,
) -> None:
    """Set how many drafts to propose after a plan, within the drafter's context, and reserve blocks for them."""
    planned = [requests[scheduled.request_id] for scheduled in plan.scheduled]
    chosen = length.choose(planned, plan.num_tokens)
    for scheduled, request, (num_drafts, why) in zip(plan.scheduled, planned, chosen, strict=True):
        scheduled.why = why
        known = request.num_expected_tokens
        if drafter_len is not None:
            drafter_room = max(drafter_len - known, 0)
            if num_drafts > drafter_room:
                num_drafts = drafter_room
                scheduled.why = f"beyond the drafter's context of {drafter_len}"
        if not scheduled.samples:
            scheduled.num_next_drafts = num_drafts
            continue
        room = max(request.max_len - known - 1, 0)
        if num_drafts > room:
            num_drafts = room
            scheduled.why = "its end is near"
        if num_drafts and not has_blocks:
            num_drafts = 0
            scheduled.why = "a running request is short of blocks"
        new_blocks: list[int] | None = []
        # A model that drafts writes K and V of all drafts but the last.
        while num_drafts and (new_blocks := kv.allocate(request, known + num_drafts - 1)) is None:
            num_drafts -= 1
            scheduled.why = "no more free blocks"
        scheduled.new_block_ids += new_blocks or []
        scheduled.num_next_drafts = num_drafts
        request.draft_token_ids = [-1] * num_drafts  # until the worker tells them
