"""A machine that does nothing but take its time: what a `DraftLength` is told of an engine, without one.

Requests come, decode and go as in an engine: a prompt step first, drafts verified a step after they were asked for,
none beyond the last wanted token. Whether a draft holds is a seeded coin; how long a step takes is a function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from teachllm.core.request import Request
from teachllm.core.scheduler_output import ScheduledRequest, SchedulerOutput
from teachllm.sampling_params import SamplingParams
from teachllm.spec_decode.draft_length import AdaptiveLength, FixedLength

# Seconds of a step, given the tokens it computes and the rounds of drafting that follow.
Machine = Callable[[int, int], float]
OverTime = Callable[[int], float]


def roofline(per_token: float, per_draft: float) -> Machine:
    """A plain step of one takes 1: it waits for the weights until computing takes longer than that."""
    return lambda num_tokens, num_rounds: max(1.0, per_token * num_tokens) + per_draft * num_rounds


def straight(per_token: float, per_draft: float) -> Machine:
    """Every token costs the same, beside what a step costs anyway; a plain step of one takes 1."""
    return lambda num_tokens, num_rounds: 1.0 - per_token + per_token * num_tokens + per_draft * num_rounds


@dataclass(slots=True)
class _Sequence:
    request: Request
    num_wanted: int
    num_asked: int = 0
    is_prompt: bool = True


@dataclass(slots=True)
class Simulated:
    """A run.

    Attributes:
        num_requests, acceptance: by step; how many run at once, and how likely a draft holds if those before it do.
        num_output: tokens of a request in the mean; None: they never end.
        num_prompt: tokens of a prompt.
        noise: spread of a step's time, relative.
    """

    length: AdaptiveLength | FixedLength
    machine: Machine
    num_requests: OverTime
    acceptance: OverTime
    num_output: int | None = None
    num_prompt: int = 32
    noise: float = 0.02
    seed: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    asked: list[int] = field(default_factory=list)  # the most that a request was asked for, by step
    _running: list[_Sequence] = field(default_factory=list)
    _random: Random = field(default_factory=Random)
    _num_added: int = 0

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def run(self, num_steps: int) -> Simulated:
        for _ in range(num_steps):
            self._step(len(self.asked))
        return self

    def speed_of(self, num_steps: int) -> float:
        """Tokens a second of the next so many steps."""
        tokens, seconds = self.num_tokens, self.seconds
        self.run(num_steps)
        return (self.num_tokens - tokens) / (self.seconds - seconds)

    def _step(self, step: int) -> None:
        wanted = int(self.num_requests(step))
        del self._running[wanted:]
        while len(self._running) < wanted:
            self._running.append(self._arrival())
        verified = [each.num_asked for each in self._running]
        computed = [self.num_prompt if each.is_prompt else 1 + each.num_asked for each in self._running]
        chosen = self.length.choose([each.request for each in self._running], sum(computed))
        shares = []
        for each, num_tokens, (num_drafts, why) in zip(self._running, computed, chosen, strict=True):
            share = ScheduledRequest(each.request.request_id, 0, num_tokens, [0] * each.num_asked, True, 0, [])
            each.num_asked = max(min(num_drafts, each.num_wanted - 2 - each.num_asked), 0)
            share.num_next_drafts, share.why = each.num_asked, why
            shares.append(share)
        self.asked.append(max(each.num_asked for each in self._running))
        seconds = self.machine(sum(computed), self.asked[-1]) * self._random.lognormvariate(0.0, self.noise)
        acceptance = self.acceptance(step)
        for each, num_drafts in zip(self._running, verified, strict=True):
            num_accepted = 0
            while num_accepted < num_drafts and self._random.random() < acceptance:
                num_accepted += 1
            if num_drafts:
                self.length.observe(each.request, num_drafts, num_accepted)
            each.is_prompt = False
            each.num_wanted -= 1 + num_accepted
            self.num_tokens += 1 + num_accepted
        self._running = [each for each in self._running if each.num_wanted > 0]
        self.length.time(SchedulerOutput(step, shares), seconds)
        self.seconds += seconds

    def _arrival(self) -> _Sequence:
        self._num_added += 1
        num_wanted = 1 << 60 if self.num_output is None else self._random.randint(1, 2 * self.num_output)
        return _Sequence(Request(str(self._num_added), [1], SamplingParams()), num_wanted)


def speeds(max_drafts: int, num_steps: int, machine: Machine, num_requests: float, acceptance: float) -> list[float]:
    """Tokens a second of every fixed length from 0 to `max_drafts`, of requests that never end."""
    found = []
    for num_drafts in range(max_drafts + 1):
        length = FixedLength(range(num_drafts + 1))
        run = Simulated(length, machine, lambda _: num_requests, lambda _: acceptance, noise=0.0)
        run.run(2)  # the prompts
        found.append(run.speed_of(num_steps))
    return found
