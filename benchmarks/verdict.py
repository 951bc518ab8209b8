"""The verdict of the trace on three steps whose answer is known: floor, measured time, and what bound them.

    python3 benchmarks/verdict.py [--output FILE]

    8B, decode of one request          bandwidth   every weight is read for two FLOPs each
    8B, prefill of 16,384 tokens       compute     every weight is used 16,384 times
    0.6B, decode of one, no graphs     overhead    launching hundreds of kernels takes longer than their work

Medians over the steps of the second run of each, as a traced engine wrote them, with the best ceilings that are known
once they have been measured here.
Also printed is what recording costs: the median time of a call of the engine's step beside that without a recorder.
Exit code 1 where a verdict is wrong or a floor lies above a measured time. Random weights of the real shapes.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from h200 import SHAPES, engine_settings, give_back, provenance, script_parser, write_shape  # noqa: E402

from teachllm import EngineConfig, SamplingParams  # noqa: E402
from teachllm.bench.batch import random_ids  # noqa: E402
from teachllm.bench.ceilings import measure_ceilings  # noqa: E402
from teachllm.engine.llm_engine import Engine  # noqa: E402
from teachllm.engine.observability.ceilings import at_best  # noqa: E402
from teachllm.trace.recorder import Recorder  # noqa: E402

# what: (model, prompt tokens, output tokens, steps left out at the start, settings, verdict)
CASES: dict[str, tuple[str, int, int, int, dict[str, Any], str]] = {
    "8B decode of one": ("qwen3-8b", 128, 64, 4, {}, "bandwidth"),
    "8B prefill of 16k": ("qwen3-8b", 16384, 1, 0, {}, "compute"),
    "0.6B eager decode of one": ("qwen3-0.6b", 128, 64, 4, {"enforce_eager": True}, "overhead"),
}


def run(engine: Engine, name: str, prompt_len: int, output_len: int) -> list[float]:
    """Generates for a new random prompt; seconds of each call of `step`."""
    prompt = random_ids(random.Random(name), prompt_len, engine.model_config.vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    engine.add_request(name, {"prompt_token_ids": prompt}, params)
    calls: list[float] = []
    while engine.has_unfinished_requests:
        start = time.perf_counter()
        engine.step()
        calls.append(time.perf_counter() - start)
    return calls


def steps_of(path: Path, prompt_len: int, output_len: int, skipped: int, **settings: Any) -> dict[str, Any]:
    """One case: the trace's steps without the first and the last, and the cost of recording them."""
    lines: list[str] = []
    given = EngineConfig(**engine_settings(path, "cuda") | {"num_gpu_blocks_override": 1300} | settings)
    engine = Engine(given, recorder=Recorder(lines.append, time.perf_counter))
    run(engine, "warm-up", prompt_len, output_len)
    lines.clear()
    traced = run(engine, "counted", prompt_len, output_len)
    engine.core.recorder = None
    engine.core.executor._runner.observe(False)  # type: ignore[attr-defined]
    plain = run(engine, "untraced", prompt_len, output_len)
    engine.close()
    found = [event["roofline"] for event in map(json.loads, lines) if event["event"] == "step"]
    found = found[skipped:-1] if len(found) > skipped + 1 else found
    middle = {
        key: statistics.median(step[key] for step in found) for key in ("num_bytes", "num_flops", "seconds", "floor")
    }
    return middle | {
        "bounds": sorted({step["bound"] for step in found}),
        "floors_above": sum("raised" in step for step in found),  # a step was faster than its ceilings allow
        "recording": statistics.median(traced) / statistics.median(plain) - 1,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("the verdicts are a GPU's: torch sees none")
    ceilings = at_best(measure_ceilings("cuda"))  # as the engine takes them
    result = provenance("verdict.py", arguments, ceilings.device, args.commit)
    result |= {"ceilings": asdict(ceilings), "cases": {}}
    print(f"{'':<26}{'floor':>10}{'measured':>12}{'of it':>8}{'recording':>11}  verdict")
    with tempfile.TemporaryDirectory(prefix="teachllm-shapes-") as folder:
        paths = {name: write_shape(name, Path(folder)) for name in SHAPES}
        for what, (model, prompt_len, output_len, skipped, settings, expected) in CASES.items():
            found = steps_of(paths[model], prompt_len, output_len, skipped, **settings)
            found["ok"] = found["bounds"] == [expected] and not found["floors_above"]
            result["cases"][what] = found
            times = f"{1000 * found['floor']:>7.3f} ms{1000 * found['seconds']:>9.3f} ms"
            share = f"{found['floor'] / found['seconds']:>8.1%}{found['recording']:>11.1%}"
            verdict = ", ".join(found["bounds"]) + ("" if found["ok"] else f"  WRONG: {expected} was expected")
            print(f"{what:<26}{times}{share}  {verdict}", flush=True)
            give_back()
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return int(not all(found["ok"] for found in result["cases"].values()))


if __name__ == "__main__":
    sys.exit(main())
