"""Run `teachllm bench throughput`: many requests at once, and the tokens per second."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from teachllm.bench.batch import Batch, check_length, random_ids, run_batch
from teachllm.bench.figures import Figure, as_json, within_ceilings
from teachllm.bench.floor import floor_seconds, schedule
from teachllm.roofline import Ceilings

if TYPE_CHECKING:
    from teachllm import LLM


@dataclass(frozen=True)
class ThroughputOptions:
    """Describe what is sent, under vLLM's names.

    Attributes:
        random_range_ratio: r draws every length uniformly from length x (1 - r) to length x (1 + r).
        num_warmups: requests run before; None is as many as `num_prompts`.

    Raises:
        ValueError: a number is out of its range.
    """

    num_prompts: int = 1000
    input_len: int = 1024
    output_len: int = 128
    random_range_ratio: float = 0.0
    num_warmups: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.num_warmups is not None and self.num_warmups < 0:
            raise ValueError(f"num_warmups={self.num_warmups}: must be 0 or more")
        if not 0.0 <= self.random_range_ratio < 1.0:
            raise ValueError(f"random_range_ratio={self.random_range_ratio}: must be in [0, 1)")

    def draw_len(self, rng: random.Random, length: int) -> int:
        shortest = math.floor(length * (1 - self.random_range_ratio))
        return rng.randint(max(shortest, 1), math.ceil(length * (1 + self.random_range_ratio)))


@dataclass(frozen=True)
class ThroughputResult:
    """One run.

    Attributes:
        elapsed_s: from the first request's arrival to the last token.
        figures: output and total tokens per second, requests per second.
        ceilings: as given, or higher, see `within_ceilings`.
        json: all of it, with settings and ceilings.
    """

    elapsed_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    figures: list[Figure]
    ceilings: Ceilings
    json: dict[str, Any]


def throughput_batch(options: ThroughputOptions, vocab_size: int, rng: random.Random) -> Batch:
    """Draw random prompts and lengths; temperature 1 as vLLM's."""
    lengths = [
        (options.draw_len(rng, options.input_len), options.draw_len(rng, options.output_len))
        for _ in range(options.num_prompts)
    ]
    prompts = [random_ids(rng, prompt_len, vocab_size) for prompt_len, _ in lengths]
    return Batch(prompts, [output_len for _, output_len in lengths], temperature=1.0)


def run_throughput(
    llm: LLM, options: ThroughputOptions, ceilings: Ceilings, progress: Callable[[int, int], None] | None = None
) -> ThroughputResult:
    """Run all requests at once, after a warm-up with others.

    Args:
        progress: called with (requests finished, requests in all), warm-up included.

    Raises:
        ValueError: a request is longer than `max_model_len`.
    """
    longest = math.ceil((1 + options.random_range_ratio) * options.input_len)
    check_length(llm, longest + math.ceil((1 + options.random_range_ratio) * options.output_len))
    rng, vocab_size = random.Random(), llm.engine.model_config.vocab_size
    num_warmups = options.num_prompts if options.num_warmups is None else options.num_warmups
    num_finished, num_all = 0, num_warmups + options.num_prompts

    def count(num: int) -> None:
        nonlocal num_finished
        num_finished += num
        if progress is not None:
            progress(num_finished, num_all)

    if num_warmups:
        run_batch(llm, throughput_batch(replace(options, num_prompts=num_warmups), vocab_size, rng), count)
    batch = throughput_batch(options, vocab_size, rng)
    elapsed_s = run_batch(llm, batch, count).total_s

    assert llm.config.max_num_batched_tokens and llm.config.max_num_seqs
    steps = schedule(batch, llm.config.max_num_batched_tokens, llm.config.max_num_seqs)
    num_prompt, num_output = sum(batch.prompt_lens), sum(batch.output_lens)
    amounts = {"output": num_output, "total": num_prompt + num_output, "requests": options.num_prompts}

    def figures_under(ceilings: Ceilings) -> list[Figure]:
        floor_s = floor_seconds(llm.engine.model_config, steps, ceilings)
        return [
            Figure(name, "requests/s" if name == "requests" else "tokens/s", amount / elapsed_s, amount / floor_s)
            for name, amount in amounts.items()
        ]

    figures, reached = within_ceilings(llm, figures_under, ceilings)
    results = {
        "elapsed_time": elapsed_s,
        "num_requests": options.num_prompts,
        "total_num_tokens": num_prompt + num_output,
        "requests_per_second": options.num_prompts / elapsed_s,
        "tokens_per_second": (num_prompt + num_output) / elapsed_s,
    }
    json = as_json(llm, options, results, figures, reached, measured=ceilings)
    return ThroughputResult(elapsed_s, num_prompt, num_output, figures, reached, json)
