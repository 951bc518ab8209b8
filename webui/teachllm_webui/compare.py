"""Two timelines from the step on where they part: what the same requests cost under two settings.

Times of a run that a person plays, pauses and steps say nothing, and two engines on one CPU disturb each other, so all
of this is counted in steps, tokens and blocks. Sums are kept, so that a look at a long timeline costs its new lines.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from teachllm.trace.reader import BAD_LINE, parse_line
from teachllm.trace.replay import Line, Replay
from teachllm_webui.trace_log import TraceLog


@dataclass(frozen=True)
class Side:
    """One timeline, as far as it has come.

    Attributes:
        steps: in all, those before a fork included.
        finished: requests that have ended, of `requests`.
        ttft_steps: from arrival, or from where the two parted, to the first token; mean of the requests that got it
            since then, None if none has.
        waste: mean share of the slots in used blocks that are empty, since then; None without blocks in use.
        preemptions: since then.
        most_tokens: that one step has computed since then, by which it lasts long.
    """

    steps: int
    requests: int
    finished: int
    ttft_steps: float | None
    waste: float | None
    preemptions: int
    most_tokens: int


class Tally:
    """Sums over a trace that may grow.

    Args:
        since: what came after this step counts.
    """

    def __init__(self, log: TraceLog, since: int = -1) -> None:
        self._log, self._since = log, since
        self._lock = threading.Lock()
        self._num_read = 0
        self._replay: Replay | None = None
        self._is_broken = False  # at a line that makes no sense, which the views name
        self._step = -1
        self._arrived = dict[str, int]()
        self._waits = list[int]()
        self._wasted = list[float]()
        self._preemptions = self._most_tokens = 0

    def side(self) -> Side | None:
        """All up to now; None of a trace without a step."""
        with self._lock:
            for text in self._log.upto(begin=self._num_read):
                self._num_read += 1
                self._read(text)
            if self._replay is None or self._replay.step < 0:
                return None
            requests = self._replay.requests.values()
            return Side(
                steps=self._replay.step + 1,
                requests=len(requests),
                finished=sum(not request.is_live for request in requests),
                ttft_steps=sum(self._waits) / len(self._waits) if self._waits else None,
                waste=sum(self._wasted) / len(self._wasted) if self._wasted else None,
                preemptions=self._preemptions,
                most_tokens=self._most_tokens,
            )

    def _read(self, text: str) -> None:
        if self._is_broken:
            return
        try:
            line = parse_line(text)
            if self._replay is None:
                self._replay = Replay(line)
                return
            self._replay.apply(line)
        except BAD_LINE:
            self._is_broken = True
            return
        if line["event"] == "arrival":
            self._arrived[line["request_id"]] = self._step
        elif line["event"] == "fork":
            for known in line["requests"]:
                if known["token_times"]:  # its first token came before
                    del self._arrived[known["request_id"]]
        elif line["event"] == "step":
            self._add(line, self._replay)

    def _add(self, line: Line, replay: Replay) -> None:
        self._step = line["step"]
        counts = self._step > self._since
        for scheduled in line["scheduled"]:
            if scheduled.get("num_sampled") and scheduled["request_id"] in self._arrived:
                wait = self._step - max(self._arrived.pop(scheduled["request_id"]), self._since)
                self._waits += [wait] if counts else []
        if not counts:
            return
        if used := line["blocks"]["used"] * replay.block_size:
            live = (request for request in replay.requests.values() if request.is_live)
            empty = sum(max(len(r.table) * replay.block_size - r.num_computed_tokens, 0) for r in live)
            self._wasted.append(empty / used)
        self._preemptions += len(line["preempted"])
        self._most_tokens = max(self._most_tokens, sum(scheduled["num_tokens"] for scheduled in line["scheduled"]))
