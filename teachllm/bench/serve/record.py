"""Record one request of a load, in the terms that serving is judged by.

TTFT = first token - sending
TPOT = (last token - first token) / (tokens - 1)
ITL  = between chunks, as the client sees them
E2EL = last token - sending
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Record:
    """Describe what became of one request. Times are seconds from the start of the load.

    Attributes:
        due_s: when it was to arrive.
        free_s: when `max_concurrency` let it go; `due_s` where that does not hold it.
        sent_s: when it was sent.
        chunk_s: when each chunk with tokens came.
        end_s: when the last of them came, or the request failed.
        output_len: tokens it asked for.
        num_prompt_tokens: by the server's count.
        num_output_tokens: by the server's count; without one (`has_usage` is False), the number of chunks.
        error: why it failed, in one line; empty if it did not.
    """

    due_s: float
    output_len: int
    free_s: float = 0.0
    sent_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    has_usage: bool = False
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Return the seconds from sending to the first token."""
        return self.chunk_s[0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        """Return the seconds from sending to the last token."""
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Return the seconds per token after the first; None if there is none."""
        if self.num_output_tokens < 2:
            return None
        return (self.end_s - self.chunk_s[0]) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Return the seconds between chunks."""
        return [after - before for before, after in zip(self.chunk_s, self.chunk_s[1:], strict=False)]

    @property
    def late_s(self) -> float:
        """Return how much later than it should it was sent; that is the client's doing."""
        return self.sent_s - max(self.due_s, self.free_s)
