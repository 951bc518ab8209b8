"""Simulate workloads with the real scheduler on a pretended GPU, for workloads that no laptop could run.

A form's numbers become a workload, a model's shape and settings; the simulation's trace is shown as any other. A limit
on the tokens in all keeps the answer quick.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from teachllm.config import EngineConfig

if TYPE_CHECKING:  # the page is up before torch is loaded
    from teachllm.simulator.simulate import Simulation

SHAPE_NAMES = ("teachlm", "qwen3-0.6b", "qwen3-8b")
MAX_REQUESTS = 500
MAX_OUTPUT_TOKENS = 30_000  # each takes the scheduler some 30 microseconds, and the trace 100 bytes
MAX_PROMPT_TOKENS = 500_000
URGENT = 4  # every so many-th request has the lower number, which the policy "priority" lets go first


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The form. None of a setting is the engine's default."""

    requests: int = 60
    rate: float | None = 200.0
    prompt_min: int = 50
    prompt_max: int = 400
    output_min: int = 20
    output_max: int = 120
    shared: int = 0
    model: str = "qwen3-8b"
    block_size: int = 16
    blocks: int | None = 512
    budget: int | None = 2048
    seqs: int | None = 32
    policy: str = "fcfs"
    chunked: bool = True


def run_what_if(form: WhatIf) -> Simulation:
    """Simulates it.

    Raises:
        ValueError: a number is out of its range, or there would be too much to wait for; in one line.
    """
    from teachllm.simulator.shapes import model_shape
    from teachllm.simulator.simulate import simulate
    from teachllm.simulator.workload import Workload

    if form.model not in SHAPE_NAMES:
        raise ValueError(f"model {form.model!r}: choose one of {', '.join(SHAPE_NAMES)}")
    if not 1 <= form.requests <= MAX_REQUESTS:
        raise ValueError(f"{form.requests} requests: choose 1 to {MAX_REQUESTS}")
    outputs, prompts = form.requests * form.output_max, form.requests * (form.shared + form.prompt_max)
    for what, total, limit in (("output", outputs, MAX_OUTPUT_TOKENS), ("prompt", prompts, MAX_PROMPT_TOKENS)):
        if total > limit:
            raise ValueError(
                f"up to {total:,} {what} tokens in all, and this page stops at {limit:,}: fewer requests, or shorter"
            )
    workload = Workload(
        num_requests=form.requests,
        rate=form.rate or None,
        prompt_len=(form.prompt_min, form.prompt_max),
        output_len=(form.output_min, form.output_max),
        shared_len=form.shared,
    )
    config = EngineConfig(
        block_size=form.block_size,
        num_gpu_blocks_override=form.blocks,
        max_num_batched_tokens=form.budget,
        max_num_seqs=form.seqs,
        scheduling_policy=form.policy,
        enable_chunked_prefill=form.chunked,
    )
    shape = model_shape(form.model)
    arrivals = workload.arrivals(shape.vocab_size)
    requests = [replace(each, priority=int(i % URGENT != 0)) for i, each in enumerate(arrivals, start=1)]
    return simulate(config, requests, shape)
