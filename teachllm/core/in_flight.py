"""Run ahead (lesson 09): keep the plans that were handed out and whose sampled tokens the host has not seen yet.

With asynchronous scheduling one plan is in flight while the next is made, with pipeline parallelism as many as
there are stages. Each assumes the best of those before it: that every draft was accepted and nothing stopped.
`settle` compares with what happened. Three things can differ:

    a draft was rejected     the tokens after it were not computed: `num_computed_tokens` goes back by that many
    the request has ended    its tokens come too late and are dropped
    it was preempted         the same: they will be sampled again, with the same noise
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from teachllm.core.request import Request
from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput, TokenLogprobs


@dataclass(slots=True)
class RequestUpdate:
    """Describe what a step changed for one request.

    Attributes:
        new_token_ids: ids appended to it, the stop token included.
        num_drafted, num_accepted: drafts that were verified, and drafts that were accepted.
        logprobs: one entry for each new id, if asked for.
        prompt_logprobs: entries for the prompt tokens from index `start` + 1 on, if asked for.
        start: the index of the first token that the step computed for it.
        num_planned: drafts that it was to verify; a drafter may have found fewer.
    """

    request: Request
    new_token_ids: list[int]
    num_drafted: int
    num_accepted: int
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs] | None
    start: int
    num_planned: int = 0


@dataclass(slots=True)
class PlanInFlight:
    """Hold a plan with its requests, and how often each had been preempted when the plan was made."""

    plan: SchedulerOutput
    requests: list[Request]
    generations: list[int]

    def is_late(self, index: int) -> bool:
        """Return whether the tokens of the plan's request `index` are no longer wanted."""
        request = self.requests[index]
        return request.finished or request.num_preemptions != self.generations[index]


class PlansInFlight:
    """Keep the plans in flight, oldest first. They come back in order."""

    def __init__(self) -> None:
        self._plans: deque[PlanInFlight] = deque()

    def __len__(self) -> int:
        return len(self._plans)

    def push(self, plan: SchedulerOutput, requests: list[Request]) -> None:
        self._plans.append(PlanInFlight(plan, requests, [request.num_preemptions for request in requests]))

    def pop(self, plan: SchedulerOutput) -> PlanInFlight:
        """Remove and return the oldest plan, which must be this one.

        Raises:
            ValueError: it is not.
        """
        if not self._plans or self._plans[0].plan is not plan:
            raise ValueError(f"step {plan.step} is not the oldest plan in flight: results must come back in order")
        return self._plans.popleft()

    def pop_all(self, plan: SchedulerOutput) -> list[PlanInFlight]:
        """Remove and return this plan, which must be the oldest, and all after it."""
        entries = [self.pop(plan), *self._plans]
        self._plans.clear()
        return entries

    def pinning_step(self, request: Request) -> int | None:
        """Return the last step in flight that names the request and may still write to its blocks."""
        return request.last_step if self._plans and request.last_step >= self._plans[0].plan.step else None


def settle(entry: PlanInFlight, result: ModelRunnerOutput) -> list[RequestUpdate]:
    """Give each request of a plan its sampled tokens and take back what was assumed and did not come true."""
    updates: list[RequestUpdate] = []
    for index, scheduled in enumerate(entry.plan.scheduled):
        if entry.is_late(index):
            continue
        request = entry.requests[index]
        sampled = result.sampled_token_ids[index]
        num_drafts = len(scheduled.draft_token_ids)
        new_token_ids: list[int] = []
        if scheduled.samples:
            if not 1 <= len(sampled) <= num_drafts + 1:
                raise ValueError(f"{request.request_id}: {len(sampled)} tokens came back for {num_drafts} drafts")
            request.num_in_flight_tokens -= num_drafts + 1
            request.num_computed_tokens -= num_drafts + 1 - len(sampled)
            for token_id in sampled:
                new_token_ids.append(token_id)
                if request.append(token_id):
                    break  # accepted drafts beyond the end
            if result.draft_token_ids is not None and request.num_in_flight_tokens == 0:
                request.draft_token_ids = result.draft_token_ids[index]
        num_accepted = min(len(sampled) - 1, len(new_token_ids)) if scheduled.samples else 0
        num_drafted = num_drafts if result.num_drafted is None else result.num_drafted[index]
        logprobs = None
        if result.logprobs:
            logprobs = (result.logprobs[index] or [])[: len(new_token_ids)] or None
        prompt_logprobs = result.prompt_logprobs[index] if result.prompt_logprobs else None
        updates.append(
            RequestUpdate(
                request,
                new_token_ids,
                num_drafted=num_drafted,
                num_accepted=num_accepted,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                start=scheduled.start,
                num_planned=num_drafts,
            )
        )
    return updates
