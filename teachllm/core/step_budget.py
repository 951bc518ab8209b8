"""Choose a step's token budget by how long steps take, so that no decode waits longer than it may.

A decode's next token comes when the step ends that it is in, and prompts in the same step make it longer. So the time
between two tokens of a request is that of a step, and a budget of tokens bounds it only as far as one knows what a
token takes: that depends on the model, the GPU and how long the prompts are. Here it is measured as the engine runs:

    seconds = of a step of decodes alone + prompt tokens * seconds per prompt token

Both are averages in which the newest step counts a quarter. While nothing decodes, nobody waits, and a step has all
tokens that it may have.
"""

from __future__ import annotations

from teachllm.core.scheduler_output import SchedulerOutput

_NEWEST = 0.25  # how much the newest step counts
_FEWEST = 32  # prompt tokens of a step that tell what one takes, and the fewest that a step has room for
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

    def tokens(self, num_decodes: int) -> int:
        """Return how many tokens the next step may have, if so many requests decode."""
        if not num_decodes:
            return self._most
        room = _AT_FIRST
        if self._per_token is not None:
            room = int((self._seconds - (self._of_decodes or 0.0)) / self._per_token)
        return min(num_decodes + max(room, _FEWEST), self._most)

    def time(self, plan: SchedulerOutput, seconds: float) -> None:
        """Learn from a step: it took so many seconds, from when the one before it ended."""
        decodes = [each for each in plan.scheduled if each.num_tokens == 1 + len(each.draft_token_ids)]
        num_prompt_tokens = plan.num_tokens - sum(each.num_tokens for each in decodes)
        if not num_prompt_tokens:
            self._of_decodes = _average(self._of_decodes, seconds)
        elif num_prompt_tokens >= _FEWEST:
            of_decodes = (self._of_decodes or 0.0) if decodes else 0.0
            self._per_token = _average(self._per_token, max(seconds - of_decodes, seconds / 10) / num_prompt_tokens)


def _average(known: float | None, newest: float) -> float:
    return newest if known is None else known + _NEWEST * (newest - known)
