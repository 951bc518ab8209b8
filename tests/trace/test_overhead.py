"""Being watched costs next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from teachllm import EngineConfig, SamplingParams
from teachllm.engine.engine import Engine


def test_recording_takes_less_than_three_percent_of_a_step(tmp_path: Path) -> None:
    config = EngineConfig(model="teachlm", device="cpu", max_num_seqs=16, trace_path=str(tmp_path / "run.jsonl"))
    engine = Engine(config)
    recorder, spent = engine.core.recorder, [0.0]
    assert recorder is not None

    def timed(call: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            start = time.perf_counter()
            call(*args, **kwargs)
            spent[0] += time.perf_counter() - start

        return run

    for name in ("arrival", "step", "end"):
        setattr(recorder, name, timed(getattr(recorder, name)))
    start = time.perf_counter()
    for i in range(32):
        engine.add_request(
            str(i), "What is a KV cache, and why?", SamplingParams(max_tokens=24, ignore_eos=True, seed=i)
        )
    num_steps = 0
    while engine.has_unfinished_requests:
        engine.step()
        num_steps += 1
    took = time.perf_counter() - start
    engine.close()
    assert num_steps >= 48
    assert 0 < spent[0] < 0.03 * took, f"{spent[0] / took:.1%} of {1000 * took / num_steps:.2f} ms a step"
