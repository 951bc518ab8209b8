"""Define what crosses between the scheduler and a worker: a plan goes down, sampled token ids come back.

Plain integers both ways, so that the same plan can be executed in this process, sent to another one, or
replayed from a trace. The worker keeps a row per request (its tokens, its block table); a plan therefore
carries only what changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from teachllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from teachllm.core.request import Wait


@dataclass(slots=True, frozen=True)
class NewRow:
    """Hold what a worker needs to open a row: for a new request, or again after a preemption.

    Attributes:
        token_ids: prompt and outputs known so far.
        child_index: which of the request's `n` completions; part of its noise.
        seed: the 64-bit seed of its noise.
        stop_token_ids: ids that may not be sampled before `min_tokens` (end of sequence and the request's own).
        bad_word_token_ids: id sequences that may not be produced: the request's `bad_words`, tokenized.
    """

    token_ids: Sequence[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    child_index: int
    seed: int
    stop_token_ids: frozenset[int]
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True)
class ScheduledRequest:
    """Schedule one request in a step: compute its tokens [start, start + num_tokens).

    Attributes:
        start: index in the sequence of the first token to compute. While a plan that samples for this request
            is still in flight, `start` assumes that all its drafts were accepted; the worker knows better.
        num_tokens: tokens to compute, drafts included.
        draft_token_ids: proposals to verify, the last `len(draft_token_ids)` of the computed tokens.
        samples: whether the last known token is among them, so that a next one is sampled.
        new_block_ids: entries to write into the block table from index `first_new_block` on.
        new_row: set when the worker has no row for this request (new, or resumed).
        num_next_drafts, why: how many drafts the worker is to propose for the step after this one, and the reason; for
            a request that does not sample yet, whether its drafter is to follow at all.
    """

    request_id: str
    start: int
    num_tokens: int
    draft_token_ids: list[int]
    samples: bool
    first_new_block: int
    new_block_ids: list[int]
    new_row: NewRow | None = None
    num_next_drafts: int = 0
    why: str | None = None


@dataclass(slots=True)
class SchedulerOutput:
    """Plan one step.

    Attributes:
        step: counts from 0.
        scheduled: what each request computes; a request appears at most once.
        dropped: request ids whose rows the worker must close, if open, before it opens new ones (finished, aborted,
            or preempted since the plan before). After a failed step an id may be named again.
        preempted: the dropped ones that were preempted.
        held: running requests that got nothing, and why; for the trace, not for workers.
    """

    step: int
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    held: dict[str, Wait] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)


@dataclass(slots=True)
class TokenLogprobs:
    """Hold log-probabilities at one position, before penalties and temperature.

    Attributes:
        token_id, logprob, rank: of the sampled (or, for a prompt, the given) token; rank 1 is the most likely.
        top_ids, top_logprobs: as many of the most likely tokens as were asked for, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class ModelRunnerOutput:
    """Hold what a step produced, aligned with `SchedulerOutput.scheduled`.

    Attributes:
        sampled_token_ids: per request the accepted drafts and the one token after them; empty if it did not sample.
        logprobs: per request one entry for each sampled id; None where not asked for.
        prompt_logprobs: per request, entries for prompt tokens [start + 1, start + num_tokens + 1) that exist.
        num_drafted: per request, how many of its drafts the drafter really proposed; None: all.
        draft_token_ids: proposals for the next steps, -1 where they stay on the device; None without a drafter.
        seconds: device time of the step, on a device with its own queue, where asked for.
        expert_load: per layer with experts, how many of the step's tokens each expert got; None: not counted.
        graph_mode: "full", "piecewise" or "eager" on a GPU: how much of the step was replayed from CUDA graphs.
        ranks: what each rank did, in a trace's form; None: there is one rank, or no trace.
    """

    sampled_token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None] | None = None
    prompt_logprobs: list[list[TokenLogprobs] | None] | None = None
    num_drafted: list[int] | None = None
    draft_token_ids: list[list[int]] | None = None
    seconds: float | None = field(default=None, compare=False)
    expert_load: list[list[int]] | None = field(default=None, compare=False)
    graph_mode: str | None = field(default=None, compare=False)
    ranks: list[dict[str, Any]] | None = field(default=None, compare=False)
