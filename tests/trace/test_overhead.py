"""Being watched costs next to nothing."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

from teachllm import EngineConfig, SamplingParams
from teachllm.engine.llm_engine import Engine


def test_recording_takes_less_than_three_percent_of_a_step(tmp_path: Path) -> None:
    config = EngineConfig(model="teachlm", device="cpu", max_num_seqs=16, trace_path=str(tmp_path / "run.jsonl"))
    engine = Engine(config)
    recorder = engine.core.recorder
    assert recorder is not None
    record, spent = recorder.step, 0.0

    def timed(*args: Any, **kwargs: Any) -> None:
        nonlocal spent
        start = time.thread_time()  # not the time that the machine takes for something else meanwhile
        record(*args, **kwargs)
        spent = time.thread_time() - start

    recorder.step = timed  # type: ignore[method-assign]
    for i in range(32):
        engine.add_request(
            str(i), "What is a KV cache, and why?", SamplingParams(max_tokens=24, ignore_eos=True, seed=i)
        )
    shares, steps = [], []
    while engine.has_unfinished_requests:
        start = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - start)
        shares.append(spent / steps[-1])
    engine.close()
    share = median(shares)
    print(f"recording takes {share:.1%} of {1000 * median(steps):.2f} ms a step")
    assert len(steps) >= 48
    assert 0 < share < 0.03
