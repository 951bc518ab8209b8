"""Runs of an engine for the tests of the page: what they are asked, how far they are, and what their trace says."""

from __future__ import annotations

from typing import Any

from teachllm.config import EngineConfig
from teachllm.sampling_params import SamplingParams
from teachllm.trace.reader import Trace, parse_trace
from teachllm_webui.live import LiveRun
from teachllm_webui.plan import PlannedRequest
from tests.waiting import wait_for

CONFIG = EngineConfig(device="cpu", num_gpu_blocks_override=32, max_num_seqs=4, max_model_len=256)


def ask(prompt: str = "What is a KV cache?", max_tokens: int = 30, **more: Any) -> PlannedRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return PlannedRequest(prompt=prompt, params=params, **more)


def trace_of(lines: list[str]) -> Trace:
    trace = parse_trace(line + "\n" for line in lines)
    assert trace.problem is None
    return trace


def num_steps(run: LiveRun) -> int:
    return len(trace_of(run.log.upto()).steps)


def step(run: LiveRun, num_more: int = 1) -> None:
    """Take steps, one after the other, and wait for each."""
    for expected in range(num_steps(run) + 1, num_steps(run) + num_more + 1):
        run.step()
        wait_for(lambda n=expected: num_steps(run) == n)


def finish(run: LiveRun) -> list[str]:
    """Play to the end as fast as it goes; return the trace."""
    run.set_speed(None)
    run.play()
    wait_for(lambda: run.is_done)
    return run.log.upto()
