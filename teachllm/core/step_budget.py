"""Choose a step's token budget by how long steps take, so that no decode waits longer than it may.

A decode's next token comes when the step ends that it is in, and prompts in the same step make it longer. So the time
between two tokens of a request is that of a step, and a budget of tokens bounds it only as far as one knows what a
token takes: that depends on the model, the GPU and how long the prompts are. Here it is measured as the engine runs:

    seconds = of a step of decodes alone + prompt tokens * seconds per prompt token

The second is an average in which the newest step counts a quarter. So is the first, over steps of decodes alone; and
it is never more than the latest step took, whatever was in it: a step that had to compile a kernel is soon forgotten,
also where prompts never stop coming. While no request decodes, a step has all tokens that it may have.

It is an estimate, so a step may take longer: the first ones, those in which a prompt has its fewest tokens, and those
of decodes, which are never put off.
"""

from __future__ import annotations

from teachllm.core.scheduler_output import SchedulerOutput

_NEWEST = 0.25  # how much the newest step counts
_FEWEST = 32  # prompt tokens of a step that tell what one takes, and the fewest that a step has room for
_LEAST_S = 1e-9  # per token; a clock may have seen none
_AT_FIRST = 512  # prompt tokens, until it is known what they take


class StepBudget:
    """Bound the time of steps in which requests decode.

    Args:
        most: tokens of any step.
        seconds: that such a step may take.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._of_decodes: float | None = None
        self._per_token: float | None = None

    def tokens(self, num_decode_tokens: int) -> int:
        """Return how many tokens the next step may have, if requests decode so many, their drafts included."""
        if not num_decode_tokens:
            return self._most
        room = _AT_FIRST
        if self._per_token is not None:
            room = int((self._seconds - (self._of_decodes or 0.0)) / self._per_token)
        return min(num_decode_tokens + max(room, _FEWEST), self._most)

    def time(self, plan: SchedulerOutput, seconds: float) -> None:
        """Learn from a step: it took so many seconds, from when the one before it ended."""
        decodes = [each for each in plan.scheduled if each.num_tokens == 1 + len(each.draft_token_ids)]
        num_prompt_tokens = plan.num_tokens - sum(each.num_tokens for each in decodes)
        if not num_prompt_tokens:
            self._of_decodes = _average(self._of_decodes, seconds)
        elif num_prompt_tokens >= _FEWEST:
            if self._of_decodes is not None:
                self._of_decodes = min(self._of_decodes, seconds)
            of_decodes = (self._of_decodes or 0.0) if decodes else 0.0
            of_prompts = max(seconds - of_decodes, seconds / 10)
            self._per_token = _average(self._per_token, max(of_prompts / num_prompt_tokens, _LEAST_S))


def _average(known: float | None, newest: float) -> float:
    return newest if known is None else known + _NEWEST * (newest - known)
