"""A machine that does nothing but take its time: what a `DraftLength` is told of an engine, without one.

Requests come, decode and go as in an engine: a prompt step first, drafts verified a step after they were asked for,
none beyond the last wanted token. Whether a draft holds is a seeded coin; how long a step takes is a function.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from teachllm.core.request import Request
from teachllm.core.scheduler_output import ScheduledRequest, SchedulerOutput
from teachllm.sampling_params import SamplingParams
from teachllm.spec_decode.draft_length import AdaptiveLength, FixedLength


class Work(NamedTuple):
    """What a step does.

    Attributes:
        num_requests: in it.
        num_tokens: that it computes: of prompts, one of each decode, and drafts.
        num_prompt_tokens, num_drafts: those of prompts, and those that are drafts.
        num_rounds: of drafting that follow.
    """

    num_requests: int
    num_tokens: int
    num_prompt_tokens: int
    num_drafts: int
    num_rounds: int


Machine = Callable[[Work], float]  # seconds of a step
OverTime = Callable[[int], float]


def roofline(per_token: float, per_draft: float) -> Machine:
    """A plain step of one takes 1: it waits for the weights until computing takes longer than that."""
    return lambda work: max(1.0, per_token * work.num_tokens) + per_draft * work.num_rounds


def straight(per_token: float, per_draft: float) -> Machine:
    """Every token costs the same, beside what a step costs anyway; a plain step of one takes 1."""
    return lambda work: 1.0 - per_token + per_token * work.num_tokens + per_draft * work.num_rounds


_ROUNDS_OF_64 = (0.0, 2.3, 3.9, 9.1, 9.7)  # ms; what a third one adds, more tokens to verify than a tile holds do


def h200(has_draft_model: bool) -> Machine:
    """An 8B model on an H200, as measured, in seconds; drafts are looked up, or a model of 0.6B makes them.

    A plain step takes 4.06 ms for 1 request and 5.87 for 64, each further draft of all 0.04 and 1.65, a round of
    drafting 0.66 and what the table says, a prompt's token 0.021.
    """

    def seconds(work: Work) -> float:
        def between(of_1: float, of_64: float) -> float:
            return of_1 + (of_64 - of_1) * (work.num_requests - 1) / 63

        verifying = between(0.04, 1.65) * work.num_drafts / work.num_requests
        rounds = work.num_rounds
        drafting = between(0.66 * rounds, _ROUNDS_OF_64[rounds]) if has_draft_model else 0.0
        return (between(4.06, 5.87) + verifying + drafting + 0.021 * work.num_prompt_tokens) / 1000

    return seconds


@dataclass(slots=True)
class _Sequence:
    request: Request
    random: Random  # its own: the same requests come whatever is drafted
    num_wanted: int
    talent: float
    num_asked: int = 0
    num_behind: int = 0  # tokens that the drafter has not seen
    is_prompt: bool = True


@dataclass(slots=True)
class Simulated:
    """A run.

    Attributes:
        num_requests, acceptance: by step; how many run at once, and how likely a draft holds if those before it do.
        num_output: tokens of a request in the mean; None: they never end.
        output_spread: how far a request's tokens are from the mean at most, relative.
        num_prompt: tokens of a prompt.
        num_total: requests that come in all; None: without end.
        max_starts: requests that may start in one step.
        talents: of the requests in turn, by how much more or less likely their drafts hold.
        catch_up: seconds a token for a drafter to catch up with what it has not followed.
        delay: steps by which what is learned of a step comes late; an engine that runs ahead has 2.
        noise: spread of a step's time, relative.
    """

    length: AdaptiveLength | FixedLength
    machine: Machine
    num_requests: OverTime
    acceptance: OverTime
    num_output: int | None = None
    output_spread: float = 1.0
    num_prompt: int = 32
    num_total: int | None = None
    max_starts: int = 1 << 30
    talents: Sequence[float] = (1.0,)
    catch_up: float = 0.0
    delay: int = 0
    noise: float = 0.02
    seed: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    asked: list[int] = field(default_factory=list)  # the most that a request was asked for, by step
    asked_of: dict[float, list[int]] = field(default_factory=dict)  # by talent, of each request in each step
    _running: list[_Sequence] = field(default_factory=list)
    _random: Random = field(default_factory=Random)
    _num_added: int = 0
    _gone: list[str] = field(default_factory=list)
    _unseen: deque[Callable[[], None]] = field(default_factory=deque)  # what is to be told, a call a step

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def run(self, num_steps: int) -> Simulated:
        for _ in range(num_steps):
            self._step(len(self.asked))
        return self

    def run_out(self) -> Simulated:
        """Until all `num_total` requests are done."""
        assert self.num_total is not None
        while self._running or self._num_added < self.num_total:
            self._step(len(self.asked))
        return self

    def speed_of(self, num_steps: int) -> float:
        """Tokens a second of the next so many steps."""
        tokens, seconds = self.num_tokens, self.seconds
        self.run(num_steps)
        return (self.num_tokens - tokens) / (self.seconds - seconds)

    def _step(self, step: int) -> None:
        self._come_and_go(int(self.num_requests(step)))
        verified = [each.num_asked for each in self._running]
        computed = [self.num_prompt if each.is_prompt else 1 + each.num_asked for each in self._running]
        chosen = self.length.choose([each.request for each in self._running], sum(computed))
        scheduled_requests, num_behind = [], 0
        for each, num_tokens, (num_drafts, why) in zip(self._running, computed, chosen, strict=True):
            start = each.request.num_computed_tokens
            scheduled = ScheduledRequest(each.request.request_id, start, num_tokens, [0] * each.num_asked, True, 0, [])
            each.num_asked = max(min(num_drafts, each.num_wanted - 2 - each.num_asked), 0)
            scheduled.num_next_drafts, scheduled.why = each.num_asked, why
            scheduled_requests.append(scheduled)
            self.asked_of.setdefault(each.talent, []).append(each.num_asked)
            each.num_behind += self.num_prompt if each.is_prompt else 0
            if each.num_asked:
                num_behind, each.num_behind = num_behind + each.num_behind, 0
        self.asked.append(max(each.num_asked for each in self._running))
        num_prompt_tokens = self.num_prompt * sum(each.is_prompt for each in self._running)
        seconds = self.machine(Work(len(verified), sum(computed), num_prompt_tokens, sum(verified), self.asked[-1]))
        seconds = seconds * self._random.lognormvariate(0.0, self.noise) + self.catch_up * num_behind
        accepted = self._verify(verified, self.acceptance(step))
        dropped, self._gone = self._gone, []
        observed = [(each.request, *d) for each, *d in zip(self._running, verified, accepted, strict=True) if d[0]]
        self._unseen.append(lambda: self._tell(observed, SchedulerOutput(step, scheduled_requests, dropped), seconds))
        if len(self._unseen) > self.delay:
            self._unseen.popleft()()
        self._gone = [each.request.request_id for each in self._running if each.num_wanted <= 0]
        self._running = [each for each in self._running if each.num_wanted > 0]
        self.seconds += seconds

    def _verify(self, verified: Sequence[int], acceptance: float) -> list[int]:
        """How many drafts of each request hold; it has as many tokens more, and one."""
        accepted = []
        for each, num_drafts in zip(self._running, verified, strict=True):
            num_accepted = 0
            while num_accepted < num_drafts and each.random.random() < acceptance * each.talent:
                num_accepted += 1
            accepted.append(num_accepted)
            each.request.num_computed_tokens += self.num_prompt if each.is_prompt else 1 + num_accepted
            each.is_prompt = False
            goes_on = each.num_asked or (self.asked[-1] and not each.num_behind)
            each.num_behind += 0 if goes_on else 1 + num_accepted
            each.num_wanted -= 1 + num_accepted
            self.num_tokens += 1 + num_accepted
        return accepted

    def _tell(self, observed: list[tuple[Request, int, int]], plan: SchedulerOutput, seconds: float) -> None:
        for request, num_drafted, num_accepted in observed:
            self.length.observe(request, num_drafted, num_accepted)
        self.length.time(plan, seconds)

    def _come_and_go(self, num_wanted: int) -> None:
        del self._running[num_wanted:]
        num_left = num_wanted if self.num_total is None else self.num_total - self._num_added
        for _ in range(min(num_wanted - len(self._running), num_left, self.max_starts)):
            self._num_added += 1
            request = Request(str(self._num_added), [1] * self.num_prompt, SamplingParams())
            random, num_output = Random(self.seed << 32 | self._num_added), 1 << 60
            if self.num_output is not None:
                spread = int(self.output_spread * self.num_output)
                num_output = random.randint(max(self.num_output - spread, 1), self.num_output + spread)
            talent = self.talents[self._num_added % len(self.talents)]
            self._running.append(_Sequence(request, random, num_output, talent))
