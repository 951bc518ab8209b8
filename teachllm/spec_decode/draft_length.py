"""How many tokens to draft: as long as they pay.

A step that verifies k drafts takes longer than a plain one, and brings 1 + a + a^2 + ... + a^k tokens where each draft
holds with probability a. Which k brings the most tokens a second depends on the request (a) and on the load: a small
batch waits for weights, and more tokens cost it next to nothing; a large one computes at the limit already, and every
draft that falls has taken the time of somebody's token. So both are measured as the engine runs:

    a      of each request, from its last verifications; a new one starts with what the others have shown
    time   of a step, by the number of requests in it and the drafts of each

What was never tried is estimated from what was. Where no length pays, none is drafted, but for a few requests every
once in a while, to see whether that has changed.

Source: Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput", 2024.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from teachllm.core.request import Request
from teachllm.core.scheduler_output import SchedulerOutput
from teachllm.speculative_config import SpeculativeConfig

_MEMORY = 0.9  # of a request's last verifications, each counts so much less than the one after it
_STRANGER = (2.0, 0.7)  # how many drafts the others' experience, or at first this guess, counts as
_TIME_MEMORY = 0.8
_VERIFY_COST = 0.02  # of a plain step for one more draft of each request, while it has not been measured
_MARGIN = 1.02  # what a length must win, to be worth the change
_PROBE_EVERY = 256  # steps, and for two of them
_PATIENCE = 32  # steps to wait for a plain one to time, where prompts are in all of them
_SETTLES = 3  # steps of a kind before it is timed: the first ones compile, or are recorded
_PROBED_SHARE = 16  # one of so many requests


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step with drafts takes.

    Attributes:
        ratio: to a plain step of as many requests.
        num_plain, num_drafting: steps of each kind that were timed.
    """

    ratio: float
    num_plain: int
    num_drafting: int


class FixedLength:
    """Always the same length.

    Args:
        sizes: `sizes[k]` is the number of drafts of a tree k levels deep; of a chain, k.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._size = sizes[-1]

    def choose(self, requests: Sequence[Request], num_tokens: int) -> list[tuple[int, str]]:
        return [(self._size, "always")] * len(requests)

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        pass

    def time(self, plan: SchedulerOutput, seconds: float) -> None:
        pass

    def step_cost(self) -> StepCost | None:
        """It times nothing."""
        return None


class AdaptiveLength:
    """The length that brings the most tokens a second.

    Args:
        sizes: as of `FixedLength`.
        draft_cost: what drafting one token takes, in plain steps, while it has not been measured.
    """

    def __init__(self, sizes: Sequence[int], draft_cost: float) -> None:
        self._sizes = sizes
        self._cost = _VERIFY_COST * max(b - a for a, b in pairwise(sizes)) + draft_cost
        self._seconds: dict[tuple[int, int], float] = {}  # (size class of the batch, levels) -> of a step
        self._seen: Counter[tuple[int, int]] = Counter()
        self._hits, self._trials = 0.0, 0.0  # of all requests
        self._levels = len(sizes) - 1  # chosen last
        self._num_steps = 0
        self._num_waited: Counter[int] = Counter()  # by size class, steps that were meant to be timed

    def choose(self, requests: Sequence[Request], num_tokens: int) -> list[tuple[int, str]]:
        """As `core.drafts.DraftLength`."""
        self._num_steps += 1
        rates = [self.acceptance(request) for request in requests]
        load = len(requests).bit_length()
        gains = [self._gain(rates, load, levels) for levels in range(len(self._sizes))]
        best = max(range(len(gains)), key=gains.__getitem__)
        if gains[best] > _MARGIN * gains[self._levels]:
            self._levels = best
        levels, mean = self._levels, sum(rates) / max(len(rates), 1)
        probes = self._num_steps % _PROBE_EVERY < 2
        is_timed = self._seen[load, 0] > _SETTLES or self._num_waited[load] > _PATIENCE
        if levels and (probes or not is_timed):
            self._num_waited[load] += 1
            return [(0, "to see how long a plain step takes")] * len(requests)
        if levels:
            return [(self._sizes[levels], f"{gains[levels]:.2f} x plain at acceptance {mean:.2f}")] * len(requests)
        why = f"at acceptance {mean:.2f} plain is faster for {len(requests)} at once"
        chosen = [(0, why)] * len(requests)
        if probes:
            for index in range(self._num_steps // _PROBE_EVERY % _PROBED_SHARE, len(requests), _PROBED_SHARE):
                chosen[index] = self._sizes[1], "to see whether it pays by now"
        return chosen

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """As `core.drafts.DraftLength`."""
        depth = max(levels for levels, size in enumerate(self._sizes) if size <= num_drafted)
        trials = min(num_accepted + 1, max(depth, 1))
        request.draft_hits = request.draft_hits * _MEMORY + num_accepted
        request.draft_trials = request.draft_trials * _MEMORY + trials
        self._hits, self._trials = self._hits * 0.99 + num_accepted, self._trials * 0.99 + trials

    def time(self, plan: SchedulerOutput, seconds: float) -> None:
        """A step took so long. It counts if all its requests were decoding, and drafted as many as they verified."""
        sizes = {(len(share.draft_token_ids), share.num_next_drafts) for share in plan.scheduled}
        is_decode = all(share.num_tokens == 1 + len(share.draft_token_ids) for share in plan.scheduled)
        if len(sizes) != 1 or not is_decode:
            return
        ((verified, drafted),) = sizes
        if verified == drafted and verified in self._sizes:
            key = len(plan.scheduled).bit_length(), self._sizes.index(verified)
            self._seen[key] += 1
            if self._seen[key] > _SETTLES:
                before = self._seconds.get(key, seconds)
                self._seconds[key] = before * _TIME_MEMORY + min(seconds, 2 * before) * (1 - _TIME_MEMORY)

    def acceptance(self, request: Request) -> float:
        """How likely a draft of a request holds, if those before it do."""
        weight, guess = _STRANGER
        others = (self._hits + weight * guess) / (self._trials + weight)
        return (request.draft_hits + weight * others) / (request.draft_trials + weight)

    def step_cost(self) -> StepCost | None:
        """In the mean over those that were timed; None: there is no number of requests for which both kinds were."""
        plain = {load: seconds for (load, levels), seconds in self._seconds.items() if not levels}
        timed = {key: seconds / plain[key[0]] for key, seconds in self._seconds.items() if key[1] and key[0] in plain}
        counts = {key: self._seen[key] - _SETTLES for key in self._seconds}
        if not timed:
            return None
        num_plain = sum(counts[load, 0] for load in {load for load, _ in timed})
        num_drafting = sum(counts[key] for key in timed)
        return StepCost(sum(counts[key] * cost for key, cost in timed.items()) / num_drafting, num_plain, num_drafting)

    def _gain(self, rates: Sequence[float], load: int, levels: int) -> float:
        """Tokens a second with so many levels of drafts, in those of a plain step."""
        num_tokens = sum(sum(rate**level for level in range(levels + 1)) for rate in rates)
        return num_tokens / max(len(rates), 1) / self._time(load, levels)

    def _time(self, load: int, levels: int) -> float:
        """Of a step with so many levels, in plain steps."""
        measured = {k: s for (size, k), s in self._seconds.items() if size == load}
        if levels in measured and 0 in measured:
            return measured[levels] / measured[0]
        if not levels:
            return 1.0
        known = [(seconds, k) for k, seconds in measured.items() if k]
        if 0 in measured and known:  # in proportion to a length that was measured
            seconds, k = min(known, key=lambda each: abs(each[1] - levels))
            return 1.0 + (seconds / measured[0] - 1.0) * levels / k
        return 1.0 + self._cost * levels


def make_draft_length(speculation: SpeculativeConfig, draft_cost: float) -> FixedLength | AdaptiveLength:
    """For a configuration; `draft_cost` as of `AdaptiveLength`."""
    tree = speculation.tree
    levels = range(speculation.num_speculative_tokens + 1)
    sizes = list(levels) if tree is None else [sum(len(path) <= level for path in tree) for level in levels]
    return AdaptiveLength(sizes, draft_cost) if speculation.adaptive else FixedLength(sizes)
