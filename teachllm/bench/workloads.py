"""The workloads that engines are compared by: what is sent, and what is made of the time it takes.

A workload is a function of a clock: it makes batches, asks the clock how long each takes, and returns its figures.
With an engine for a clock these are measured; with the roofline for a clock (`floor.py`) the same lines give the
figures that no engine can beat.

    mixed       256 requests of 100 to 1024 tokens, in and out: how much a full engine yields
    single      one request of 128 tokens: how fast it answers, and how fast it talks
    batch64     64 requests of 1024 tokens: prefill and decode of a steady batch
    long        8 requests of 16,384 tokens: decode that reads more KV than weights
    prefill16k  one prompt of 16,384 tokens
    shared      64 requests behind the same 4096 tokens, which are cached

`cold.py` has the one that needs processes of its own.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

from teachllm.bench.batch import Batch, random_ids, run_batch
from teachllm.bench.floor import floor_seconds, schedule
from teachllm.roofline import Ceilings

if TYPE_CHECKING:
    from teachllm import LLM
    from teachllm.config import EngineConfig
    from teachllm.models.model_config import ModelConfig

Clock = Callable[[Batch], float]  # seconds that a batch takes
Figures = dict[str, float]  # "tok_s" and "*_tok_s" are rates, everything else is a time
Workload = Callable[[Clock, int, int], Figures]  # clock, vocabulary, seed: other prompts for every seed


def mixed_batch(seed: int, vocab_size: int, num_requests: int = 256, shortest: int = 100, longest: int = 1024) -> Batch:
    """Draw all prompts first, then all output lengths, from one seeded generator: seed 0 is the same everywhere."""
    rng = random.Random(seed)
    last_id = min(10000, vocab_size - 1)
    prompts = [[rng.randint(0, last_id) for _ in range(rng.randint(shortest, longest))] for _ in range(num_requests)]
    return Batch(prompts, [rng.randint(shortest, longest) for _ in range(num_requests)], temperature=0.6)


def mixed(
    clock: Clock, vocab_size: int, seed: int, num_requests: int = 256, shortest: int = 100, longest: int = 1024
) -> Figures:
    """Return output tokens per second, over all requests."""
    batch = mixed_batch(seed, vocab_size, num_requests, shortest, longest)
    return {"tok_s": sum(batch.output_lens) / clock(batch)}


def single(clock: Clock, vocab_size: int, seed: int, prompt_len: int = 128, output_len: int = 257) -> Figures:
    """Time to the first token, and per token after it."""
    rng = random.Random(f"single {seed}")
    first_s, step_s = _first_and_step(clock, rng, vocab_size, 1, prompt_len, output_len)
    return {"tpot_ms": 1000 * step_s, "ttft_ms": 1000 * first_s}


def batch64(
    clock: Clock, vocab_size: int, seed: int, num_requests: int = 64, prompt_len: int = 1024, output_len: int = 129
) -> Figures:
    """Time of a decode step, and prompt tokens per second."""
    rng = random.Random(f"batch64 {seed}")
    first_s, step_s = _first_and_step(clock, rng, vocab_size, num_requests, prompt_len, output_len)
    return {"step_ms": 1000 * step_s, "prefill_tok_s": num_requests * prompt_len / first_s}


def long(
    clock: Clock, vocab_size: int, seed: int, num_requests: int = 8, prompt_len: int = 16384, output_len: int = 129
) -> Figures:
    """Time of a decode step."""
    rng = random.Random(f"long {seed}")
    _, step_s = _first_and_step(clock, rng, vocab_size, num_requests, prompt_len, output_len)
    return {"step_ms": 1000 * step_s}


def prefill16k(clock: Clock, vocab_size: int, seed: int, prompt_len: int = 16384) -> Figures:
    """Time to the first token."""
    prompt = random_ids(random.Random(f"prefill16k {seed}"), prompt_len, vocab_size)
    return {"ttft_ms": 1000 * clock(Batch([prompt], [1]))}


def shared(
    clock: Clock,
    vocab_size: int,
    seed: int,
    num_requests: int = 64,
    shared_len: int = 4096,
    own_len: int = 128,
    output_len: int = 64,
) -> Figures:
    """Return the wall time of all requests, with the part they share computed before."""
    rng = random.Random(f"shared {seed}")
    prefix = random_ids(rng, shared_len, vocab_size)
    clock(Batch([[*prefix, *random_ids(rng, 1, vocab_size)]], [1]))
    prompts = [prefix + random_ids(rng, own_len, vocab_size) for _ in range(num_requests)]
    return {"s": clock(Batch(prompts, [output_len] * num_requests, num_shared=shared_len))}


WORKLOADS: dict[str, Workload] = {
    "mixed": mixed,
    "single": single,
    "batch64": batch64,
    "long": long,
    "prefill16k": prefill16k,
    "shared": shared,
}


def num_runs_of(name: str) -> int:
    """Return how many runs the median is taken of."""
    return 3 if name == "mixed" else 5


def measure(workload: Workload, llm: LLM, num_runs: int, num_warmups: int = 2, first_seed: int = 0) -> Figures:
    """Return medians over `num_runs` runs, with other prompts in each.

    Args:
        first_seed: measured a second time on the same engine, a workload needs seeds that it has not seen.

    Raises:
        ValueError, RuntimeError: as `run_batch`.
    """
    vocab_size = llm.engine.model_config.vocab_size
    seeds = range(first_seed, first_seed + num_runs + num_warmups)
    warmups, counted = seeds[num_runs:], seeds[:num_runs]
    for seed in warmups:
        workload(lambda batch: run_batch(llm, batch).total_s, vocab_size, seed)
    runs = [workload(lambda batch: run_batch(llm, batch).total_s, vocab_size, seed) for seed in counted]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def limits(workload: Workload, model: ModelConfig, config: EngineConfig, ceilings: Ceilings) -> Figures:
    """Return the workload's figures at the machine's ceilings.

    Args:
        config: resolved for the model; its budgets shape the steps.
    """
    budget, max_num_seqs = config.max_num_batched_tokens, config.max_num_seqs
    assert budget and max_num_seqs

    def clock(batch: Batch) -> float:
        return floor_seconds(model, schedule(batch, budget, max_num_seqs), ceilings)

    return workload(clock, model.vocab_size, 0)


def is_rate(figure: str) -> bool:
    """Return whether more is better."""
    return figure.endswith("tok_s")


def _first_and_step(
    clock: Clock, rng: random.Random, vocab_size: int, num_requests: int, prompt_len: int, output_len: int
) -> tuple[float, float]:
    """Return the seconds to the first tokens and the seconds per step after that, by the difference of two runs."""

    def seconds(num_tokens: int) -> float:
        prompts = [random_ids(rng, prompt_len, vocab_size) for _ in range(num_requests)]
        return clock(Batch(prompts, [num_tokens] * num_requests))

    first_s = seconds(1)
    return first_s, (seconds(output_len) - first_s) / (output_len - 1)
