"""Track how far a draft model on a GPU has come with each request, without asking the device.

    in step    all but a request's newest two tokens are computed, whatever held. So it stays while any request asks:
    the
               drafter then follows every request that it has followed so far
    behind     a prompt, or a request of a time when none asked. To draft for it, all of it that was known before the
               step is computed first

The host plans ahead of what the device has verified, so it counts from below: some tokens are computed twice, none is
missed. Cached blocks may have been filled while nothing was drafted; those in which the drafter has K and V are noted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from teachllm.core.scheduler_output import ScheduledRequest


class Behind(NamedTuple):
    """Tokens of a request that its drafter has not computed: so many from `start` on, or from before it."""

    row: int
    start: int
    num_tokens: int


class DraftProgress:
    """By row of the batch.

    Args:
        max_drafts: of a request in a step.
    """

    def __init__(self, block_size: int, max_drafts: int) -> None:
        self._block_size, self._max_drafts = block_size, max_drafts
        self._in_step: dict[int, int] = {}  # row -> a bound below what was computed
        self._computed: dict[int, int] = {}  # of the others, as far as the drafter has come, at least
        self._blocks: dict[int, list[int]] = {}  # of each row
        self._num_kept: dict[int, int] = {}  # of these, which are among the next, at least
        self._drafted_blocks: set[int] = set()  # of which the drafter has K and V, whoever may find them

    def close_row(self, row: int) -> None:
        """Forget the request in `row`."""
        for each in (self._in_step, self._computed, self._blocks, self._num_kept):
            each.pop(row, None)

    def note(self, scheduled_requests: Sequence[ScheduledRequest], rows: Sequence[int]) -> list[Behind]:
        """Return what the drafter has to compute, beside a plan's step, to be in step after it."""
        behind: list[Behind] = []
        is_asked = any(scheduled.samples and scheduled.num_next_drafts for scheduled in scheduled_requests)
        for scheduled, row in zip(scheduled_requests, rows, strict=True):
            self._note_blocks(scheduled, row)
            end = scheduled.start + scheduled.num_tokens
            # `start` assumes that every draft in flight is accepted. One plan is; the second is slack.
            bound = max(end - len(scheduled.draft_token_ids) - 2 * self._max_drafts, 0)
            if row in self._in_step:
                if is_asked:
                    self._in_step[row] = bound
                else:
                    self._computed[row] = self._in_step.pop(row)
            elif scheduled.num_next_drafts:
                start = self._computed.pop(row)
                if end > start:
                    behind.append(Behind(row, start, end - start))
                if scheduled.samples:
                    self._in_step[row] = max(start, bound)
                else:
                    self._computed[row] = end
        return behind

    def _note_blocks(self, scheduled: ScheduledRequest, row: int) -> None:
        """Note the blocks that a request gets, or finds, and the blocks of which the drafter has all by now."""
        blocks, size = self._blocks.setdefault(row, []), self._block_size
        num_found = scheduled.first_new_block if scheduled.new_row is None else scheduled.start // size
        blocks[scheduled.first_new_block :] = scheduled.new_block_ids
        self._drafted_blocks.difference_update(blocks[num_found:])
        if scheduled.new_row is not None:
            missing = (index for index, block in enumerate(blocks[:num_found]) if block not in self._drafted_blocks)
            self._num_kept[row] = next(missing, num_found)
            self._computed[row] = self._num_kept[row] * size
        num_full = self._in_step.get(row, self._computed.get(row, 0)) // size
        if num_full > (kept := self._num_kept[row]):
            self._drafted_blocks.update(blocks[kept:num_full])
            self._num_kept[row] = num_full


def in_parts(behind: Sequence[Behind], room: int) -> Iterator[list[Behind]]:
    """Split the tokens into parts of at most `room` tokens."""
    part: list[Behind] = []
    left = room
    for row, start, missing in behind:
        while missing:
            now = min(missing, left)
            part.append(Behind(row, start, now))
            start, missing, left = start + now, missing - now, left - now
            if not left:
                yield part
                part, left = [], room
    if part:
        yield part
