"""Choose how many tokens to draft: as many as pay.

A step that verifies k drafts takes longer than a plain one, and brings 1 + a + a^2 + ... + a^k tokens where each draft
holds with probability a. Which k brings the most tokens per second depends on the request (a) and on the load: a small
batch waits for weights, and more tokens cost it next to nothing; a large one computes at the limit already, and every
rejected draft has taken the time of another request's token. So both are measured as the engine runs:

    acceptance   of each request, from its last verifications; a new one starts with what the others have shown
    times        of steps, by the number of requests and the drafts of each: `step_times.py`

The batch goes as deep as pays for all together, among the lengths that were tried. Each further draft brings less than
the one before and costs no less, so speed has one peak over the length: where both neighbours are worse is the best,
and only neighbours are tried. Where plain is best, a few requests draft one token each, once in a while, to see whether
that has changed. What trying may cost: `trials.py`.

Each request goes as deep as pays for itself: a row more to verify costs little, but not nothing, and where a request's
next draft is not worth half of that, it drafts less than the others, or not at all.

Source: Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput", 2024.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from teachllm.core.request import Request
from teachllm.core.scheduler_output import ScheduledRequest, SchedulerOutput
from teachllm.spec_decode.step_times import Prior, Step, StepCost, StepTimes
from teachllm.spec_decode.tree import DraftTree
from teachllm.spec_decode.trials import Option, Trials
from teachllm.speculative_config import SpeculativeConfig

__all__ = ["AdaptiveLength", "FixedLength", "StepCost", "make_draft_length"]

_MEMORY = 0.97  # of a request's last verifications, each counts so much less than the one after it
_MEMORY_OF_ALL = 0.99
_PRIOR_ACCEPTANCE = (2.0, 0.7)  # how many drafts the others' experience, or at first this guess, counts as
_PRIOR_REJECTIONS = 4.0  # drafts that may as well have fallen, beside those that were seen

_START, _STOP = 1.03, 0.98  # x plain: drafting begins above, and ends below
_SWITCH = 1.02  # x what is done now: the length changes
_HORIZON = 64  # steps in which a drafter's catching up must have paid
_WORTH = 0.5  # of what it costs, a request's next draft must bring
_ASK_AGAIN = 16  # steps until a request without drafts gets one, to see whether they hold by now
_TRIAL_DIVISOR = 16  # one of so many requests
_SLOWNESS_STEP, _SLOW = 0.05, 8.0  # what a step counts for how slow the machine is now, and at most


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
        """Return None: a fixed length times nothing."""
        return None


class AdaptiveLength:
    """The length that brings the most tokens per second.

    Args:
        sizes: as of `FixedLength`.
        draft_cost: what drafting one token takes, in plain steps, while it has not been measured.
        prior: what is known of the machine before anything was measured; None: next to nothing.
    """

    def __init__(self, sizes: Sequence[int], draft_cost: float, prior: Prior | None = None) -> None:
        self._sizes = sizes
        self._times = StepTimes(sizes, draft_cost, prior)
        self._trials = Trials()
        self._num_held, self._num_tested = 0.0, 0.0  # drafts of all requests
        self._num_accepted = 0  # since a step was timed
        self._followed: dict[str, int] = {}  # request -> so many of its tokens a drafter has seen
        self._levels, self._gain = 0, 1.0  # what is best for all one knows, and its gain
        self._slowness = 1.0  # what steps take at the moment, slow ones and all, to their medians
        self._num_steps = 0
        self._num_requests, self._is_growing = 0, False

    def choose(self, requests: Sequence[Request], num_tokens: int) -> list[tuple[int, str]]:
        """Implement `core.drafts.DraftLength`."""
        self._num_steps += 1
        self._is_growing, self._num_requests = len(requests) > self._num_requests, len(requests)
        if not requests or not self._times.is_ready:
            return [(0, "to see how long a plain step takes")] * len(requests)
        rates = self._rates(requests)
        options = self._weigh(rates)
        self._settle(options, requests)
        if self._trials.current is None and not self._is_growing:
            self._look_further(options, requests)
        return self._lengths(options, requests, rates)

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Implement `core.drafts.DraftLength`."""
        depth = bisect_right(self._sizes, num_drafted) - 1
        num_tested = min(num_accepted + 1, max(depth, 1))
        request.draft_hits = request.draft_hits * _MEMORY + num_accepted
        request.draft_trials = request.draft_trials * _MEMORY + num_tested
        self._num_held = self._num_held * _MEMORY_OF_ALL + num_accepted
        self._num_tested = self._num_tested * _MEMORY_OF_ALL + num_tested
        self._num_accepted += num_accepted

    def time(self, plan: SchedulerOutput, seconds: float) -> None:
        """Take in how long a step took. What it verified has been observed before."""
        for request_id in plan.dropped:
            self._followed.pop(request_id, None)
        step = Step.of(plan, self._followed)
        if step.num_asked:  # who was followed so far is followed on
            ends = {each.request_id: each.start + each.num_tokens for each in plan.scheduled if self._follows(each)}
            self._followed |= ends
        self._times.time(step, seconds)
        lost = self._lost(step, seconds) if self._times.is_ready else 0.0
        self._trials.count(lost if step.num_drafts or step.num_asked or self._levels else 0.0)
        self._num_accepted = 0
        trial = self._trials.current
        if trial is not None and step.deepest == self._sizes[trial.levels] and not step.is_start:
            trial.num_left -= 1

    def acceptance(self, request: Request) -> float:
        """Return how likely a draft of a request holds, if those before it do."""
        return self._rates([request])[0]

    def step_cost(self) -> StepCost | None:
        """Implement `StepTimes.step_cost`."""
        return self._times.step_cost()

    def _follows(self, scheduled: ScheduledRequest) -> bool:
        return scheduled.num_next_drafts > 0 or self._followed.get(scheduled.request_id, -1) >= scheduled.start

    def _rates(self, requests: Sequence[Request]) -> list[float]:
        weight, guess = _PRIOR_ACCEPTANCE
        others = weight * (self._num_held + weight * guess) / (self._num_tested + weight)
        return [(request.draft_hits + others) / (request.draft_trials + weight) for request in requests]

    def _lost(self, step: Step, seconds: float) -> float:
        """Return how many plain steps longer a step took than its tokens are worth; negative if they are worth more."""
        times, levels = self._times, bisect_left(self._sizes, step.deepest)
        plain = times.seconds(step.num_requests, 0, 0)
        on_prompts = times.per_token * (step.num_tokens - step.num_drafts - step.num_requests)
        if step.is_start and 2 * step.num_asked > step.num_requests:
            return 0.0  # that a drafter catches up with all requests has been weighed before
        if times.is_known(step.num_requests, levels) and not step.is_start:
            usual = times.seconds(step.num_requests, levels, step.num_drafts) + on_prompts
            self._slowness += _SLOWNESS_STEP * (min(seconds / usual, _SLOW) - self._slowness)
        worth = plain * (1 + self._num_accepted / step.num_requests)
        if levels != self._levels:
            worth /= self._gain
        return (seconds / max(self._slowness, 1.0) - worth - on_prompts) / plain

    def _weigh(self, rates: Sequence[float]) -> list[Option]:
        """Weigh every number of levels, as far as any request drafts so deep."""
        num_requests, times = len(rates), self._times
        plain = times.seconds(num_requests, 0, 0)
        # A token more takes `per_token`; the batch makes so many in that time.
        bar = _WORTH * times.per_token * num_requests * self._gain / plain
        options = [Option(1.0, 1.0, 0.0)]
        num_tokens, num_drafts = float(num_requests), 0
        deep = held = rates  # of the requests that draft so deep: acceptance, and that of all drafts up to this level
        for levels in range(1, len(self._sizes)):
            size = self._sizes[levels] - self._sizes[levels - 1]
            if min(held) < bar * size:
                pairs = [(rate, each) for rate, each in zip(deep, held, strict=True) if each >= bar * size]
                if not pairs:
                    break
                deep, held = map(list, zip(*pairs, strict=True))
            num_tokens += sum(held)
            num_drafts += size * len(held)
            ratio = times.seconds(num_requests, levels, num_drafts) / plain
            options.append(Option(num_tokens / num_requests, ratio, (bar * size) ** (1 / levels)))
            held = [each * rate for each, rate in zip(held, deep, strict=True)]
        return options

    def _settle(self, options: Sequence[Option], requests: Sequence[Request]) -> None:
        """Choose among the lengths that are known, and end a trial."""
        num_requests, trials = len(requests), self._trials
        self._levels = min(self._levels, len(options) - 1)
        if options[self._levels].gain < (_STOP if trials.account >= 0 else _START):
            self._levels = 0
        known = [k for k in range(len(options)) if k in (0, self._levels) or self._times.is_known(num_requests, k)]
        best = max(known, key=lambda levels: options[levels].gain)
        if self._is_better(options, best, requests):
            self._levels = best
            trials.forget(num_requests.bit_length(), best)
        self._gain = max(options[self._levels].gain, 1.0)
        if (trial := trials.current) is not None:
            is_over = trial.num_left <= 0 or trial.levels == self._levels or trial.levels >= len(options)
            is_over |= num_requests.bit_length() > trial.load  # so many were not weighed
            is_gone = trial.request_ids and trial.request_ids.isdisjoint([each.request_id for each in requests])
            if is_over or is_gone or trials.account < 0:
                trials.current = None

    def _is_better(self, options: Sequence[Option], levels: int, requests: Sequence[Request]) -> bool:
        """Tell whether a length is better by enough than the current one. A drafter that begins must catch up first,
        and that must pay.

        While requests come, it does not begin: how many there will be is not known yet.
        """
        gain, now = options[levels].gain, options[self._levels].gain
        if self._levels:
            return gain > _SWITCH * now
        return (
            not self._is_growing
            and gain > _START
            and gain > _START * (1 + self._catch_up(requests, len(requests)) / _HORIZON)
        )

    def _catch_up(self, some: Sequence[Request], num_requests: int) -> float:
        """Return how long until a drafter has followed some of `num_requests` requests, in plain steps of all."""
        followed, num_behind = self._followed, 0
        for each in some:
            num_known = max(each.num_computed_tokens, each.num_prompt_tokens)  # a prompt is followed to its end
            num_behind += num_known - followed.get(each.request_id, 0)
        return self._times.per_token_behind * num_behind / self._times.seconds(num_requests, 0, 0)

    def _look_further(self, options: Sequence[Option], requests: Sequence[Request]) -> None:
        """Try another length, if one is worth it and due."""
        num_requests, now, trials = len(requests), self._levels, self._trials
        load = num_requests.bit_length()
        sure = self._num_tested / (self._num_tested + _PRIOR_REJECTIONS)
        for levels in sorted(range(1, len(options)), key=lambda levels: -options[levels].gain):
            if self._times.is_known(num_requests, levels):
                trials.wait(load, levels)
            elif self._is_better(options, levels, requests):
                catch_up = (
                    self._catch_up(requests, num_requests) if not now and sure < 0.5 else 0.0
                )  # later it will pay
                if trials.try_all(options, levels, load, self._gain, sure, catch_up):
                    return
        if now:
            for levels in (min(now + 1, len(options) - 1), now - 1):
                if trials.current is None and levels != now:
                    trials.try_all(options, levels, load, self._gain, sure)
            return
        if trials.is_due(0, 0):
            few = sorted(requests, key=lambda request: request.num_computed_tokens)  # the least to catch up with
            few = few[: max(num_requests // _TRIAL_DIVISOR, 2)]
            ratio = self._times.seconds(num_requests, 1, len(few)) / self._times.seconds(num_requests, 0, 0)
            request_ids = frozenset([each.request_id for each in few])
            if trials.try_few(request_ids, load, ratio, self._catch_up(few, num_requests)):
                return
        if len(options) > 1 and trials.is_due(load, 1):
            trials.try_all(options, 1, load, self._gain, sure, self._catch_up(requests, num_requests))

    def _lengths(
        self, options: Sequence[Option], requests: Sequence[Request], rates: Sequence[float]
    ) -> list[tuple[int, str]]:
        """Return the length of each request's draft, and why."""
        trial, mean = self._trials.current, sum(rates) / len(rates)
        levels = self._levels if trial is None else trial.levels
        if not levels and self._levels:
            return [(0, "to see how long a plain step takes")] * len(requests)
        plain = 0, f"at acceptance {mean:.2f} plain is faster for {len(requests)} at once"
        if not levels:
            return [plain] * len(requests)
        again = self._sizes[1], "to see whether it pays by now"
        if trial is not None and trial.request_ids:
            return [again if request.request_id in trial.request_ids else plain for request in requests]
        why = f"{options[levels].gain:.2f} x plain at acceptance {mean:.2f}"
        if trial is not None:
            why = f"on trial, perhaps {why}"
        thresholds = list(accumulate([option.threshold for option in options[1 : levels + 1]], max))
        by_level = [(size, why) for size in self._sizes[: levels + 1]]
        by_level[0] = 0, f"its acceptance is below {thresholds[0]:.2f}"
        chosen = [by_level[bisect_right(thresholds, rate)] for rate in rates]
        for index in range(self._num_steps % _ASK_AGAIN, len(requests), _ASK_AGAIN):
            if not chosen[index][0]:
                chosen[index] = again
        return chosen


def make_draft_length(
    speculation: SpeculativeConfig,
    draft_cost: float,
    prepare: Callable[[Sequence[int], bool], Prior | None] | None = None,
) -> FixedLength | AdaptiveLength:
    """Make the draft length of a configuration.

    Args:
        draft_cost: as in `AdaptiveLength`.
        prepare: as `Runner.prepare`, for `sizes` of `AdaptiveLength`, whose `prior` it returns.
    """
    sizes = [0, *accumulate(map(len, DraftTree.of_config(speculation).levels))]
    prior = None if prepare is None else prepare(sizes, speculation.adaptive)
    return AdaptiveLength(sizes, draft_cost, prior) if speculation.adaptive else FixedLength(sizes)
