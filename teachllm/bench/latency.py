"""Run `teachllm bench latency`: one batch of equal requests, again and again, from its arrival to its end."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from teachllm.bench.batch import Batch, Timing, check_length, random_ids, run_batch
from teachllm.bench.figures import Figure, as_json, within_ceilings
from teachllm.bench.floor import floor_seconds, schedule
from teachllm.roofline import Ceilings

if TYPE_CHECKING:
    from teachllm import LLM

_PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True)
class LatencyOptions:
    """Describe what is sent, under vLLM's names.

    Raises:
        ValueError: a number is too small.
    """

    input_len: int = 32
    output_len: int = 128
    batch_size: int = 8
    num_iters_warmup: int = 10
    num_iters: int = 30

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "batch_size", "num_iters"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.num_iters_warmup < 0:
            raise ValueError(f"num_iters_warmup={self.num_iters_warmup}: must be 0 or more")


@dataclass(frozen=True)
class LatencyResult:
    """Seconds of every iteration, and figures with their limits.

    Attributes:
        timings: one an iteration.
        figures: median latency, time to the first tokens, time per output token after them.
        ceilings: as given, or higher, see `within_ceilings`.
        json: all of it, with settings and ceilings.
    """

    timings: list[Timing]
    figures: list[Figure]
    ceilings: Ceilings
    json: dict[str, Any]


def latency_batch(llm: LLM, options: LatencyOptions) -> Batch:
    """Make equal requests with random prompts, which sample; no two batches have a prompt in common."""
    rng = random.Random()  # seeded by the system: no run repeats a prompt of another
    vocab_size = llm.engine.model_config.vocab_size
    prompts = [random_ids(rng, options.input_len, vocab_size) for _ in range(options.batch_size)]
    return Batch(prompts, [options.output_len] * options.batch_size, temperature=1.0)


def run_latency(
    llm: LLM, options: LatencyOptions, ceilings: Ceilings, progress: Callable[[int, int], None] | None = None
) -> LatencyResult:
    """Run the iterations, each with new random prompts.

    Args:
        progress: called with (iterations done, iterations in all), warm-up included.

    Raises:
        ValueError: a request is longer than `max_model_len`.
    """
    check_length(llm, options.input_len + options.output_len)
    num_all = options.num_iters_warmup + options.num_iters
    timings = []
    for done in range(1, num_all + 1):
        batch = latency_batch(llm, options)
        timings.append(run_batch(llm, batch))
        if progress is not None:
            progress(done, num_all)
    timings = timings[options.num_iters_warmup :]
    figures_under = partial(_figures, llm, options, batch=batch, timings=timings)
    figures, reached = within_ceilings(llm, figures_under, ceilings)
    seconds = [timing.total_s for timing in timings]
    results = {
        "avg_latency": statistics.mean(seconds),
        "latencies": seconds,
        "percentiles": {str(percent): _percentile(seconds, percent) for percent in _PERCENTILES},
    }
    return LatencyResult(timings, figures, reached, as_json(llm, options, results, figures, reached, measured=ceilings))


def _figures(
    llm: LLM, options: LatencyOptions, ceilings: Ceilings, batch: Batch, timings: list[Timing]
) -> list[Figure]:
    """Return medians. When the last request has its first token, it has one step to go for each other token."""
    model, num_later = llm.engine.model_config, options.output_len - 1
    assert llm.config.max_num_batched_tokens and llm.config.max_num_seqs
    steps = schedule(batch, llm.config.max_num_batched_tokens, llm.config.max_num_seqs)
    num_first = len(steps) - num_later
    first_floor_s = floor_seconds(model, steps[:num_first], ceilings)
    later_floor_s = floor_seconds(model, steps[num_first:], ceilings)
    first_s = statistics.median(timing.first_s for timing in timings)
    total_s = statistics.median(timing.total_s for timing in timings)
    figures = [
        Figure("latency", "ms", 1000 * total_s, 1000 * (first_floor_s + later_floor_s)),
        Figure("ttft", "ms", 1000 * first_s, 1000 * first_floor_s),
    ]
    if num_later:
        later_s = statistics.median(timing.total_s - timing.first_s for timing in timings)
        figures.append(Figure("tpot", "ms", 1000 * later_s / num_later, 1000 * later_floor_s / num_later))
    return figures


def _percentile(values: list[float], percent: int) -> float:
    """Return a percentile, linear between neighbours, as NumPy's default."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
