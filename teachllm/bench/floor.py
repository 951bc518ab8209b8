"""The steps of a batch, and the time that no engine can beat for them: the roofline's floor, step by step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from teachllm.bench.batch import Batch
from teachllm.roofline import Ceilings, StepShape, step_work

if TYPE_CHECKING:
    from teachllm.models.model_config import ModelConfig


def floor_seconds(model: ModelConfig, steps: Iterable[StepShape], ceilings: Ceilings) -> float:
    """Return the least time for these steps, one after the other."""
    return sum(step_work(model, step).seconds(ceilings) for step in steps)


def schedule(batch: Batch, token_budget: int, max_num_seqs: int) -> list[StepShape]:
    """Yield the steps of a batch whose KV fits: a request past its prompt gets a token, prompts get what is left.

    Args:
        token_budget: tokens per step, at least `max_num_seqs`.
    """
    prompt_lens = batch.prompt_lens
    computed = [batch.num_shared] * len(prompt_lens)
    running: list[int] = []
    num_admitted = 0
    steps: list[StepShape] = []
    while running or num_admitted < len(prompt_lens):
        shares = {i: 1 for i in running if computed[i] >= prompt_lens[i]}
        left = token_budget - len(shares)
        for i in running:
            if left and i not in shares:
                shares[i] = min(prompt_lens[i] - computed[i], left)
                left -= shares[i]
        while left and num_admitted < len(prompt_lens) and len(running) < max_num_seqs:
            shares[num_admitted] = min(prompt_lens[num_admitted] - computed[num_admitted], left)
            left -= shares[num_admitted]
            running.append(num_admitted)
            num_admitted += 1
        for i, num_tokens in shares.items():
            computed[i] += num_tokens
        num_sampled = sum(computed[i] >= prompt_lens[i] for i in shares)
        steps.append(StepShape(list(shares.values()), [computed[i] for i in shares], num_sampled, batch.num_shared))
        # The last token is sampled, and never computed.
        running = [i for i in running if computed[i] < prompt_lens[i] + batch.output_lens[i] - 1]
    return steps
