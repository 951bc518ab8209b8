"""Measure what a token budget does to the gaps between tokens while long prompts arrive: lesson 04, on a GPU.

PYTHONPATH=.:kernels:cli:webui:lessons python3 benchmarks/prefill_gaps.py [--model qwen3-8b] [--budgets 512,2048]
    [--output FILE] [--commit SHA]

32 requests are answering when prompts of 6,000 tokens begin to arrive, 8 per second. One engine per budget; "whole"
computes every prompt in one step. After four warm-ups, in which kernels are compiled when they are first needed, the
median of three runs; the longest gap of the first run stands beside it. Gaps are those of the 32 answers, times to a
first token those of the long prompts, from the moment at which they should arrive.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from h200 import engine_settings, give_back, provenance, script_parser, write_shape

from teachllm import EngineConfig
from teachllm.engine.llm_engine import Engine
from teachllm.sampling_params import SamplingParams
from teachllm.simulator.shapes import SHAPES
from teachllm.simulator.workload import Arrival, Workload, arrivals_of
from teachllm.trace.figures import Spread

NUM_ANSWERING, LONG = 32, 6000
ANSWERING = Workload(num_requests=NUM_ANSWERING, prompt_len=64, output_len=300)
LONG_PROMPTS = Workload(num_requests=12, rate=8.0, prompt_len=LONG, output_len=16)
BEGIN = 0.5  # seconds after which the long prompts arrive: all short ones are computed by then
NUM_WARM_UPS, NUM_RUNS = 4, 3


def settings(budget: int | None) -> dict[str, Any]:
    """Return the engine's settings for a token budget per step; None: prompts are not cut."""
    common = {"max_num_seqs": 64, "max_model_len": 8192, "enable_prefix_caching": False}
    if budget is None:
        return common | {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192}
    return common | {"max_num_batched_tokens": budget}


def arrivals() -> list[tuple[Arrival, float]]:
    """Return all requests with the times at which they arrive, in seconds."""
    answering = [(arrival, 0.0) for arrival in arrivals_of(ANSWERING, 32000)]
    late = [(arrival, BEGIN + arrival.time) for arrival in arrivals_of(LONG_PROMPTS, 32000)]
    return sorted(answering + late, key=lambda each: each[1])


def run(engine: Engine, waiting: Sequence[tuple[Arrival, float]]) -> dict[str, float]:
    """Serve the workload in real time, and return its figures in ms."""
    left, began, running = list(waiting), time.perf_counter(), []
    gaps: list[float] = []
    first: list[float] = []
    while left or running:
        now = time.perf_counter() - began
        while left and left[0][1] <= now:
            arrival, due = left.pop(0)
            params = SamplingParams(temperature=0.0, max_tokens=arrival.max_tokens, ignore_eos=True)
            prompt = {"prompt_token_ids": list(arrival.prompt_token_ids)}
            output = engine.add_request(f"{len(left)} {began}", prompt, params)
            running.append([output, due, None, 0])
        if not engine.has_unfinished_requests:
            time.sleep(max(left[0][1] - (time.perf_counter() - began), 0.0))
            continue
        engine.step()
        now = time.perf_counter() - began
        for each in running:
            output, due, last, num_known = each
            num_tokens = len(output.outputs[0].token_ids)
            if num_tokens == num_known:
                continue
            is_long = len(output.prompt_token_ids) == LONG
            if last is None and is_long:
                first.append(now - due)
            elif last is not None and not is_long:
                gaps.append(now - last)
            each[2:] = [now, num_tokens]
        running = [each for each in running if not each[0].finished]
    spread, duration = Spread.of(gaps), time.perf_counter() - began
    return {
        "gap_p50_ms": 1e3 * spread.p50,
        "gap_p99_ms": 1e3 * spread.p99,
        "gap_max_ms": 1e3 * max(gaps),
        "long_ttft_mean_ms": 1e3 * statistics.fmean(first),
        "duration_s": duration,
    }


def measured(path: Path, device: str, budget: int | None) -> dict[str, float]:
    """Return the median figures of a few runs with one budget."""
    engine = Engine(EngineConfig(**engine_settings(path, device) | settings(budget)))
    try:
        runs = [run(engine, arrivals()) for _ in range(NUM_WARM_UPS + NUM_RUNS)]
    finally:
        engine.close()
    warm = runs[NUM_WARM_UPS:]
    found = {name: statistics.median(each[name] for each in warm) for name in warm[0]}
    return found | {"first_run_gap_max_ms": runs[0]["gap_max_ms"]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="qwen3-8b", choices=list(SHAPES))
    parser.add_argument("--budgets", default="256,512,1024,2048,4096,8192")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    name = options.device
    if name == "cuda":
        import torch

        name = torch.cuda.get_device_name()
    result = provenance("prefill_gaps.py", arguments, name, options.commit)
    result |= {"date": datetime.date.today().isoformat(), "model": options.model, "budgets": {}}
    with tempfile.TemporaryDirectory() as folder:
        path = write_shape(options.model, Path(folder))
        for budget in (*map(int, options.budgets.split(",")), None):
            found = measured(path, options.device, budget)
            give_back()
            result["budgets"]["whole" if budget is None else str(budget)] = found
            print("whole" if budget is None else budget, {key: round(value, 2) for key, value in found.items()})
            if options.output is not None:
                options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
