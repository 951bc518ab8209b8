"""DeviceStep: what the host knows of a step whose tokens are on the device."""

from __future__ import annotations

from dataclasses import dataclass, field

from teachllm.speculative_config import MAX_NODES

LONGEST_DECODE = 1 + MAX_NODES  # tokens, of which all but one are drafts: what attention takes as one decode


@dataclass(slots=True, frozen=True)
class DeviceStep:
    """Describe what the host knows of a step.

    Attributes:
        rows: the request row of each scheduled request.
        query_lens: tokens that each computes.
        starts: index in its sequence of each one's first token.
        num_decodes: the first so many compute one token, with the drafts after it, and did not start in this step.
        sampling: positions in `rows` of those that sample.
        num_drafts: of each of those, how many drafts it verifies; empty: none does.
        num_next: of each of them, how many drafts it asks for; empty: none does.
        decode_len: tokens of a decode, its newest one and drafts, at most, with padding.
        most_next: drafts that one asks for, at most, with padding.
    """

    rows: list[int]
    query_lens: list[int]
    starts: list[int]
    num_decodes: int
    sampling: list[int]
    num_drafts: list[int] = field(default_factory=list)
    num_next: list[int] = field(default_factory=list)
    decode_len: int = 1
    most_next: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def num_logits(self) -> int:
        """Count the positions that are sampled from."""
        return len(self.sampling) + sum(self.num_drafts)

    @property
    def sampled_rows(self) -> list[int]:
        """Return the request row of each position that is sampled from."""
        rows = [self.rows[i] for i in self.sampling]
        if not self.num_drafts:
            return rows
        return [row for row, count in zip(rows, self.num_drafts, strict=True) for _ in range(1 + count)]

    @property
    def sampled_places(self) -> list[int]:
        """Return per such position how many of its request's positions stand before it in the step."""
        counts = self.num_drafts or [0] * len(self.sampling)
        return [place for count in counts for place in range(1 + count)]

    @property
    def is_decode(self) -> bool:
        """Return whether all requests are decodes that sample."""
        return self.num_decodes == len(self.rows) == len(self.sampling)

    @property
    def speculates(self) -> bool:
        """Return whether the step verifies drafts, or asks for some."""
        return bool(self.num_drafts or self.num_next)
