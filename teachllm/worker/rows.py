"""Rows: a request keeps one from admission to its end, whatever a worker remembers of it by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np

from teachllm.core.scheduler_output import NewRow, SchedulerOutput

OpenedRow: TypeAlias = tuple[int, int]  # and how many times it was opened


class KeptByRow(Protocol):
    """Something that remembers requests by row."""

    def open_rows(self, opened: Sequence[tuple[int, NewRow]]) -> None:
        """Take requests over, each into its row."""

    def close_row(self, row: int) -> None:
        """Forget the request in `row`."""


class Rows:
    """Which request has which row. Base of the batches, which fill them when they open or with the step's tensors."""

    def __init__(self, max_num_seqs: int) -> None:
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._openings = np.zeros(max_num_seqs, dtype=np.int64)

    def open(self, request_id: str, new_row: NewRow) -> int:
        """Take a row for a request and return it."""
        row = self._row_of[request_id] = self._free_rows.pop()
        self._openings[row] += 1
        return row

    def close(self, request_id: str) -> int | None:
        """Release a request's row and return it; None if it has none (the step that was to open it failed)."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)
        return row

    def opening(self, row: int) -> int:
        """Return how many requests a row has had."""
        return int(self._openings[row])

    def opened_rows(self, rows: Sequence[int]) -> list[OpenedRow]:
        """Return rows as they are now, to tell later whether they still belong to the same requests."""
        return [(row, self.opening(row)) for row in rows]

    def update(self, plan: SchedulerOutput, kept: Sequence[KeptByRow]) -> None:
        """Close the rows that a plan drops, then open the rows of new requests, here and in all that is kept by row."""
        for request_id in plan.dropped:
            row = self.close(request_id)
            if row is not None:
                for each in kept:
                    each.close_row(row)
        new = [
            (scheduled.request_id, scheduled.new_row) for scheduled in plan.scheduled if scheduled.new_row is not None
        ]
        if new:
            opened = [(self.open(request_id, new_row), new_row) for request_id, new_row in new]
            for each in kept:
                each.open_rows(opened)
