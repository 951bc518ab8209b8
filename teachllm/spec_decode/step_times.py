"""Predict what a step takes from timed ones: medians of what was done, and a straight line to what was not.

    medians   of the latest steps of each kind, by the number of requests and the levels of drafts. A slow step now and
              then (something compiles, the machine stutters) does not move them
    line      seconds = a + b x tokens + (c + d x requests) x rounds of drafting, fitted to every step, also to those
              that have prompts beside decodes. It is true of no machine, and near enough to say what to try

A kind that was never timed takes what the nearest that was has taken, in the proportion in which the line, or what is
known beforehand (`Prior`), has the two.

Source: Plackett, "Some Theorems in Least Squares", 1950 (the line takes in one step after the other).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

from teachllm.core.scheduler_output import SchedulerOutput

_SETTLES = 3  # steps of a kind before it counts as timed: the first ones compile, or are recorded
_LATEST = 7  # steps of a kind that are remembered
_NEEDED = 2  # of them, to be known; without, steps of other kinds at that length
_PATIENCE = 32  # steps to wait for a plain one without prompts
_NOISE, _DRIFT = 0.05, 0.002  # of a step's time; of the line's figures, from step to step
_PER_TOKEN, _PER_ROUND = 0.02, 0.3  # of a step's fixed part: how large the line's figures may well be


@dataclass(frozen=True, slots=True)
class Prior:
    """Describe what is known of a machine beforehand.

    Attributes:
        ratio: (number of requests, levels of drafts) -> what a step takes, to a plain one.
        per_token_behind: seconds that a drafter takes to catch up with a token.
    """

    ratio: Callable[[int, int], float]
    per_token_behind: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """Describe what a step with drafts takes.

    Attributes:
        ratio: to a plain step of as many requests.
        num_plain, num_drafting: steps of each kind that were timed.
    """

    ratio: float
    num_plain: int
    num_drafting: int


class Step(NamedTuple):
    """A plan's figures.

    Attributes:
        num_requests, num_tokens: in it, and computed.
        num_drafts: of those tokens, that are verified.
        num_asked, deepest: drafts asked for, in all and of one request at most.
        num_behind: tokens that a drafter has not followed, of the requests that ask.
        is_decode: no prompts beside.
    """

    num_requests: int
    num_tokens: int
    num_drafts: int
    num_asked: int
    deepest: int
    num_behind: int
    is_decode: bool

    @property
    def is_start(self) -> bool:
        """Tell whether drafting begins: the drafter has to catch up with the earlier tokens."""
        return bool(self.num_asked and not self.num_drafts)

    @staticmethod
    def of(plan: SchedulerOutput, followed: Mapping[str, int]) -> Step:
        num_tokens = num_drafts = num_asked = deepest = num_behind = 0
        is_decode = True
        for scheduled in plan.scheduled:
            drafts = len(scheduled.draft_token_ids)
            num_tokens += scheduled.num_tokens
            num_drafts += drafts
            is_decode &= scheduled.num_tokens == 1 + drafts
            if scheduled.samples:
                num_asked += scheduled.num_next_drafts
                deepest = max(deepest, scheduled.num_next_drafts)
                if scheduled.num_next_drafts:
                    num_behind += max(scheduled.start - followed.get(scheduled.request_id, 0), 0)
        return Step(len(plan.scheduled), num_tokens, num_drafts, num_asked, deepest, num_behind, is_decode)


class Line:
    """seconds = weights . x, by recursive least squares: each step moves the weights by what it knows better.

    Args:
        spread: of each weight, how large it may well be; where steps leave open which weight is to blame, the one
            with the larger spread is.
    """

    def __init__(self, spread: Sequence[float]) -> None:
        self.weights = [0.0] * len(spread)
        self._covariance = [[s * s * (i == j) for j in range(len(spread))] for i, s in enumerate(spread)]

    def fit(self, x: Sequence[float], seconds: float) -> None:
        """Take in a step. Errors are relative, so that a step that took 50 times too long counts 50 times less."""
        z = [each / seconds for each in x]
        gain = [_dot(row, z) for row in self._covariance]
        variance = _NOISE * _NOISE + _dot(gain, z)
        error = 1.0 - _dot(self.weights, z)
        self.weights = [w + g * error / variance for w, g in zip(self.weights, gain, strict=True)]
        for i, row in enumerate(self._covariance):
            for j, g in enumerate(gain):
                row[j] -= gain[i] * g / variance
            row[i] += (_DRIFT * self.weights[i]) ** 2


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


@dataclass(slots=True)
class _Kind:
    """The latest steps of a kind: of so many requests, about, and so many levels of drafts."""

    levels: int
    num_seen: int = 0
    latest: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=_LATEST))
    median: float = 0.0
    num_requests: float = 0.0  # in the mean
    num_drafts: float = 0.0

    def add(self, seconds: float, num_requests: int, num_drafts: int) -> None:
        self.num_seen += 1
        if self.num_seen > _SETTLES:
            self.latest.append((seconds, num_requests, num_drafts))
            all_seconds, *others = zip(*self.latest, strict=True)
            self.median = median_low(all_seconds)
            self.num_requests, self.num_drafts = (sum(each) / len(each) for each in others)


class StepTimes:
    """Times steps.

    Args:
        sizes: `sizes[k]` is the number of drafts of a tree k levels deep; of a chain, k.
        draft_cost: what drafting one token takes, in plain steps, while it has not been measured.
        prior: what is known of a machine beforehand, in the line's place.
    """

    def __init__(self, sizes: Sequence[int], draft_cost: float, prior: Prior | None = None) -> None:
        self._sizes, self._draft_cost, self._prior = sizes, draft_cost, prior
        self._line: Line | None = None
        self._num_plain = 0
        self._behind: deque[float] = deque(maxlen=_LATEST)
        self._kinds: dict[tuple[int, int], _Kind] = {}  # (size class of the batch, levels)
        self._nearest: dict[tuple[int, int], _Kind | None] = {}  # what stands in for a kind that was never timed
        self._num_mixed: Counter[tuple[int, int]] = Counter()  # steps at a length, those with prompts beside too

    def time(self, step: Step, seconds: float) -> None:
        """Take in how long a step took."""
        num_requests, num_tokens, num_drafts, num_asked, deepest, num_behind, is_decode = step
        levels = bisect_left(self._sizes, deepest)
        if step.is_start:
            if num_behind and is_decode and self.is_ready:
                beyond = seconds - self.seconds(num_requests, levels, 0)
                self._behind.append(max(beyond, 0.0) / num_behind)
            return
        if self._line is None:
            self._line = Line([10 * seconds * each for each in (1, _PER_TOKEN, _PER_ROUND, _PER_ROUND * _PER_TOKEN)])
        self._line.fit(self._features(num_requests, num_tokens, levels), seconds)
        self._num_plain += not levels
        if 4 * num_drafts < num_requests * self._sizes[levels]:
            return  # a few requests only
        key = num_requests.bit_length(), levels
        self._num_mixed[key] += 1
        # Where a length changes, what is verified is not what is drafted.
        if is_decode and 8 * abs(num_asked - num_drafts) <= num_drafts:
            kind = self._kinds.setdefault(key, _Kind(levels))
            kind.add(seconds, num_requests, num_drafts)
            if kind.num_seen == _SETTLES + 1:
                self._nearest.clear()

    @property
    def is_ready(self) -> bool:
        """Return whether a plain step was timed; where prompts are in all of them, it is enough to have seen many."""
        return self._num_plain > _PATIENCE or any(kind.latest and not kind.levels for kind in self._kinds.values())

    def is_known(self, num_requests: int, levels: int) -> bool:
        """Return whether enough such steps were timed."""
        key = num_requests.bit_length(), levels
        kind = self._kinds.get(key)
        return self._num_mixed[key] > 2 * _SETTLES or (kind is not None and len(kind.latest) >= _NEEDED)

    def seconds(self, num_requests: int, levels: int, num_drafts: float) -> float:
        """Return the seconds of a step that verifies `num_drafts` in all, and drafts `levels` levels."""
        key = num_requests.bit_length(), levels
        if key not in self._nearest:
            self._nearest[key] = self._find_nearest(*key)
        kind, shape = self._nearest[key], self._shape(num_requests, levels, num_drafts)
        if kind is None:
            return shape
        return kind.median * shape / self._shape(kind.num_requests, kind.levels, kind.num_drafts)

    @property
    def per_token_behind(self) -> float:
        """Return the seconds that a drafter takes to catch up with a token."""
        if self._prior is not None:  # an engine that runs ahead does not see it in the step that it was in
            return self._prior.per_token_behind
        return median_low([2 * self._draft_cost * self.per_token, *self._behind])

    @property
    def per_token(self) -> float:
        """Return the seconds that one more token takes."""
        return 0.0 if self._line is None else max(self._line.weights[1], 0.0)

    def step_cost(self) -> StepCost | None:
        """Return the mean cost over the timed steps; None if no load was timed both plain and drafting."""
        timed = {key: kind for key, kind in self._kinds.items() if kind.latest}
        plain = {load: kind for (load, levels), kind in timed.items() if not levels}
        drafting = [(kind, plain[load]) for (load, levels), kind in timed.items() if levels and load in plain]
        if not drafting:
            return None
        num_plain = sum(plain[load].num_seen - _SETTLES for load in {load for load, k in timed if k and load in plain})
        num_drafting = sum(kind.num_seen - _SETTLES for kind, _ in drafting)
        total = sum((kind.num_seen - _SETTLES) * kind.median / base.median for kind, base in drafting)
        return StepCost(total / num_drafting, num_plain, num_drafting)

    def _find_nearest(self, load: int, levels: int) -> _Kind | None:
        """Return the nearest kind that was timed: in the number of requests first, then in levels."""
        timed = [(abs(size - load), abs(k - levels), size, k) for (size, k), kind in self._kinds.items() if kind.latest]
        return self._kinds[min(timed)[2:]] if timed else None

    def _features(self, num_requests: int, num_tokens: int, levels: int) -> tuple[float, ...]:
        """Return the terms of the line. The last two are what rounds take beyond `draft_cost` of a plain step each."""
        cost = self._draft_cost * levels
        return 1.0 + cost, num_tokens + cost * num_requests, levels, levels * num_requests

    def _shape(self, num_requests: float, levels: int, num_drafts: float) -> float:
        """Return what the line says of a step, or what is known beforehand.

        After times that contradict each other the line may have a plain step take no time at all. It is of no use then:
        all steps count as equally long until further ones have corrected it.
        """
        fixed, _, round_of_all, round_of_each = (0.0,) * 4 if self._line is None else self._line.weights
        plain = max(fixed, 0.0) + self.per_token * num_requests
        if plain <= 0.0:
            return 1.0
        if self._prior is not None:
            return plain * self._prior.ratio(round(num_requests), levels)
        a_round = max(self._draft_cost * plain + round_of_all + round_of_each * num_requests, 0.0)
        return plain + self.per_token * num_drafts + a_round * levels
