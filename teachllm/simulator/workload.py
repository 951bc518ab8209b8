"""Generate requests as they come to a server, from a few numbers and a seed.

    rate    requests per second; the gaps between them are exponential, so that arrivals are a Poisson process
    burst   so many arrive together; the rate stays the same
    shared  the first tokens of every prompt, a system prompt: equal ids, so that the real prefix cache finds them

Times, lengths, tokens and priorities are drawn from generators of their own: another rate meets the same prompts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

Range = int | tuple[int, int]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Attributes:
        time: seconds from the beginning.
        max_tokens: that each completion samples; nothing ends it before.
        priority: lower goes first, with scheduling_policy="priority".
        n: completions of its prompt.
    """

    time: float
    prompt_token_ids: Sequence[int]
    max_tokens: int
    priority: int = 0
    n: int = 1


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests of one kind.

    Attributes:
        num_requests: how many.
        rate: of arrivals, requests per second; None is all at once.
        burst: requests that arrive together.
        start: seconds before the first may come.
        prompt_len: tokens of each prompt, those that are shared apart: a number, or (shortest, longest), uniform.
        output_len: tokens that each samples, likewise.
        shared_len: tokens in front of every prompt that others begin with too.
        num_prefixes: how many such beginnings there are; each request draws one.
        priorities: each request draws one.
        n: completions of each prompt.
        seed: of all that is drawn.

    Raises:
        ValueError: a number is out of its range.
    """

    num_requests: int = 100
    rate: float | None = None
    burst: int = 1
    start: float = 0.0
    prompt_len: Range = 128
    output_len: Range = 64
    shared_len: int = 0
    num_prefixes: int = 1
    priorities: Sequence[int] = (0,)
    n: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "burst", "num_prefixes", "n"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("start", "shared_len"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be 0 or more")
        if self.rate is not None and not 0.0 < self.rate < float("inf"):
            raise ValueError(f"rate={self.rate}: must be more than 0 requests per second, or None for all at once")
        if not self.priorities:
            raise ValueError("priorities is empty: give one or more numbers, 0 if all are equal")
        for name in ("prompt_len", "output_len"):
            shortest, longest = _range(getattr(self, name))
            if not 1 <= shortest <= longest:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: must be a number of at least 1, or (shortest, longest)"
                )

    def arrivals(self, vocab_size: int, part: int = 0) -> list[Arrival]:
        """The requests, in order of arrival.

        Args:
            vocab_size: of the model; token ids are below it.
            part: of a larger workload: parts draw different tokens though their seeds are equal.
        """

        def generator(what: str) -> random.Random:
            return random.Random(f"{what} {part} {self.seed}")

        times, inputs, outputs, tokens, others = map(generator, ("times", "inputs", "outputs", "tokens", "others"))
        ids = range(vocab_size)
        prefixes = [generator(f"prefix {i}").choices(ids, k=self.shared_len) for i in range(self.num_prefixes)]
        made = []
        time = self.start
        for index in range(self.num_requests):
            if self.rate is not None and index % self.burst == 0:
                time += times.expovariate(self.rate / self.burst)
            own = tokens.choices(ids, k=inputs.randint(*_range(self.prompt_len)))
            output_len = outputs.randint(*_range(self.output_len))
            prefix, priority = others.choice(prefixes), others.choice(self.priorities)
            made.append(Arrival(time, prefix + own, output_len, priority, self.n))
        return made


def arrivals_of(workload: Workload | Sequence[Workload | Arrival], vocab_size: int) -> list[Arrival]:
    """All requests of a workload and its parts, in order of arrival.

    Raises:
        ValueError: there are none.
    """
    parts = [workload] if isinstance(workload, Workload) else workload
    made: list[Arrival] = []
    for index, part in enumerate(parts):
        made += part.arrivals(vocab_size, index) if isinstance(part, Workload) else [part]
    if not made:
        raise ValueError("the workload is empty: give a Workload, or one or more of Workload and Arrival")
    return sorted(made, key=lambda arrival: arrival.time)


def _range(length: Range) -> tuple[int, int]:
    return (length, length) if isinstance(length, int) else length
