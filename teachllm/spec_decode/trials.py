"""Looking for something better, and what that may cost.

What was never tried is not known, and trying it costs time. So there is an account, in plain steps:

    it holds     a few plain steps at the start, and never more
    it earns     a percent of every step
    it pays      for every step with drafts what that took longer than its tokens are worth: at the speed of plain
                 decoding, or, while something else is tried, at the best speed known

and nothing is tried that could cost more than there is, should drafts turn out as badly as they still may. Where none
pays, decoding takes a percent longer than without any, and a few steps. What was tried in vain waits, twice as long
each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

_MOST, _INCOME = 4.0, 0.01  # plain steps: in the account, and earned by a step
_WORST = 4.0  # plain steps that a step may cost: a slow outlier says nothing of drafts
_TRIAL, _PROBE = 6, 4  # steps to time, of all requests and of a few
_WAITS = (32, 1024)  # steps until a length is tried again, at first and at most


class Option(NamedTuple):
    """Describe what so many levels of drafts would bring.

    Attributes:
        tokens: of a request in a step, in the mean.
        ratio: of a step's time, to a plain one.
        threshold: acceptance below which a request does not draft so deep.
    """

    tokens: float
    ratio: float
    threshold: float

    @property
    def gain(self) -> float:
        """Return the tokens per second, relative to plain decoding."""
        return self.tokens / self.ratio


@dataclass(slots=True)
class Trial:
    """Something else than what is best for all one knows.

    Attributes:
        levels: for all requests, or for those named.
        num_left: steps to time.
        load: size class of the batch, as it is weighed.
    """

    levels: int
    num_left: int
    load: int
    request_ids: frozenset[str] = frozenset()


class Trials:
    """One at a time.

    Attributes:
        account: plain steps that may be lost yet.
        current: under way.
    """

    def __init__(self) -> None:
        self.account = _MOST
        self.current: Trial | None = None
        self._num_steps = 0
        self._waits: dict[tuple[int, int], tuple[int, int]] = {}  # (size class, levels) -> not before, wait after it

    def count(self, lost: float) -> None:
        """Count a step that has passed, in which `lost` plain steps were lost."""
        self._num_steps += 1
        self.account = min(self.account + _INCOME - min(lost, _WORST), _MOST)

    def try_all(
        self, options: Sequence[Option], levels: int, load: int, gain: float, sure: float, catch_up: float = 0.0
    ) -> bool:
        """Let all requests draft so deep for a few steps, if that is due and can be paid.

        Args:
            load: size class of the batch.
            gain: of what is done now.
            sure: a draft's chance to hold may be so much of what is believed.
            catch_up: plain steps that a drafter takes for it until it has followed all requests.
        """
        more = [after.tokens - before.tokens for before, after in pairwise(options[: levels + 1])]
        tokens = 1.0 + sum(each * sure**level for level, each in enumerate(more, 1))
        risk = _TRIAL * max(options[levels].ratio - tokens / gain, 0.0) + catch_up
        return self._start(Trial(levels, _TRIAL, load), (load, levels), risk)

    def try_few(self, request_ids: frozenset[str], load: int, ratio: float, catch_up: float) -> bool:
        """Let a few requests draft one level; such a step takes as long as `ratio` plain ones.

        It may cost more than a full account holds: otherwise a drafter that is costly today would never be tried again.
        """
        risk = min(_PROBE * (ratio - 1.0) + catch_up, _MOST)
        return self._start(Trial(1, _PROBE, load, request_ids), (0, 0), risk)

    def is_due(self, load: int, levels: int) -> bool:
        """Return whether all have waited long enough for a length to be tried; (0, 0) are a few."""
        return self._num_steps >= self._waits.get((load, levels), (0, 0))[0]

    def wait(self, load: int, levels: int) -> None:
        """Note that a length is known by now: it is tried again only after the first wait."""
        self._waits.setdefault((load, levels), (self._num_steps + _WAITS[0], _WAITS[0]))

    def forget(self, load: int, levels: int) -> None:
        """Forget the wait of a length that was not tried in vain."""
        self._waits.pop((load, levels), None)

    def _start(self, trial: Trial, key: tuple[int, int], risk: float) -> bool:
        if risk > self.account or not self.is_due(*key):
            return False
        wait = self._waits.get(key, (0, _WAITS[0]))[1]
        self._waits[key] = self._num_steps + wait, min(2 * wait, _WAITS[1])
        self.current = trial
        return True
