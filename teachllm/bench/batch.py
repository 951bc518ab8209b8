"""Requests that arrive together, and how long an engine takes for them.

Every prompt is random and new, so nothing may come from the prefix cache but what is meant to: a run whose prompts
were found there would report the speed of work that was not done. So each run checks its outputs before its time
counts.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teachllm.outputs import RequestOutput
from teachllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from teachllm import LLM

_run_numbers = itertools.count()


@dataclass(frozen=True)
class Batch:
    """Requests that arrive together.

    Attributes:
        prompts: token ids of each.
        output_lens: how many tokens each samples.
        temperature: 0 is greedy.
        num_shared: the first so many prompt tokens are the same in all, and cached already.
    """

    prompts: Sequence[Sequence[int]]
    output_lens: Sequence[int]
    temperature: float = 0.0
    num_shared: int = 0

    @property
    def prompt_lens(self) -> list[int]:
        return [len(prompt) for prompt in self.prompts]

    @property
    def max_tokens(self) -> int:
        """Return the tokens of the longest request, prompt and output."""
        return max(len(prompt) + out for prompt, out in zip(self.prompts, self.output_lens, strict=True))


@dataclass(frozen=True)
class Timing:
    """Seconds from the arrival of a batch.

    Attributes:
        first_s: until every request has its first token.
        total_s: until the last token.
    """

    first_s: float
    total_s: float


def random_ids(rng: random.Random, num_tokens: int, vocab_size: int) -> list[int]:
    """Draw [num_tokens] ids, uniform over the vocabulary."""
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


def run_batch(llm: LLM, batch: Batch, on_finished: Callable[[int], None] | None = None) -> Timing:
    """Run a batch to its end.

    Args:
        on_finished: called with how many more requests have finished.

    Raises:
        ValueError: the longest request is longer than `max_model_len`.
        RuntimeError: an output is too short, or the prefix cache served what was meant to be computed.
    """
    check_length(llm, batch.max_tokens)
    engine, name = llm.engine, f"bench {next(_run_numbers)}"
    params = [
        SamplingParams(temperature=batch.temperature, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in batch.output_lens
    ]
    _settle(llm)
    outputs: list[RequestOutput] = []
    start = time.perf_counter()
    first_s = 0.0
    try:
        for index, (prompt, each) in enumerate(zip(batch.prompts, params, strict=True)):
            outputs.append(engine.add_request(f"{name}.{index}", {"prompt_token_ids": prompt}, each))
        waiting = {output.request_id for output in outputs}  # for a first token
        while engine.has_unfinished_requests:
            changed = engine.step()
            if waiting:
                waiting.difference_update(output.request_id for output in changed)
                if not waiting:
                    first_s = time.perf_counter() - start
            if on_finished is not None and (num := sum(output.finished for output in changed)):
                on_finished(num)
        timing = Timing(first_s, time.perf_counter() - start)
    finally:
        for output in outputs:
            engine.abort_request(output.request_id)
    _check(llm, batch, outputs)
    return timing


def check_length(llm: LLM, num_tokens: int) -> None:
    """Refuse requests whose outputs would be cut off.

    Raises:
        ValueError: with both numbers.
    """
    limit = llm.config.max_model_len or 0
    if num_tokens > limit:
        raise ValueError(
            f"prompt and output make {num_tokens} tokens, more than max_model_len={limit}: shorten them, "
            "or raise max_model_len"
        )


def _check(llm: LLM, batch: Batch, outputs: Sequence[RequestOutput]) -> None:
    cached = batch.num_shared // llm.config.block_size * llm.config.block_size
    for output, wanted in zip(outputs, batch.output_lens, strict=True):
        num_tokens = len(output.outputs[0].token_ids)
        if num_tokens != wanted:
            raise RuntimeError(f"a request ended after {num_tokens} of {wanted} tokens: its time does not count")
        if output.num_cached_tokens != cached:
            raise RuntimeError(
                f"{output.num_cached_tokens} prompt tokens came from the prefix cache instead of {cached}: "
                "the time does not count; run with other prompts, a larger KV cache, or prefix caching as it was meant"
            )


def _settle(llm: LLM) -> None:
    """Collect garbage and wait for queued work of the run before, which are not this one's cost."""
    gc.collect()
    if llm.config.device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(llm.config.device)
