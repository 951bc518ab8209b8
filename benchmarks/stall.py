"""Look for steps that take far longer than their work, in the first minute of a new process with empty caches.

    python3 benchmarks/stall.py [--models qwen3-0.6b,qwen3-8b] [--rate N] [--output FILE]

From the moment the engine is ready, requests arrive as a Poisson process for 60 s: 30 per second for 0.6B and 8 for 8B,
prompts of 10 to 8,000 tokens, uniform on a logarithmic scale, and 10 to 300 tokens of output. A step may take 2.5 times
its roofline and 20 ms. The ten longest steps, by the time beyond that bound, are printed with what happened in them.
How steps are timed is in `teachllm/bench/stall.py`. Weights are random, of the real shapes.

The model "teachlm" is the embedded one, with a smaller load, for a computer without a GPU. Where the device's ceilings
are not known, steps are printed without a bound; `teachllm bench latency` measures and keeps them.

Exit code 1 where a step is over its bound.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]

from h200 import engine_settings, names, provenance, script_parser, write_shape  # noqa: E402

from teachllm.bench.stall import StallLoad, stall  # noqa: E402
from teachllm.engine.observability.ceilings import device_name  # noqa: E402

LOADS = {
    "qwen3-0.6b": StallLoad(rate=30.0),
    "qwen3-8b": StallLoad(rate=8.0),
    "teachlm": StallLoad(rate=4.0, duration_s=10.0, longest_prompt=500, longest_output=40),
}


def load_of(model: str, options: Mapping[str, Any]) -> StallLoad:
    """Return a model's load, with what the command line changes in it."""
    given = {each.name: options[each.name] for each in fields(StallLoad)}
    return replace(LOADS[model], **{name: value for name, value in given.items() if value is not None})


def settings_of(model: str, folder: Path, device: str) -> dict[str, Any]:
    """Return the settings of a model's engine."""
    if model == "teachlm":
        return {"model": model, "skip_tokenizer_init": True, "device": device}
    return engine_settings(write_shape(model, folder), device)


def print_result(model: str, found: Mapping[str, Any]) -> None:
    """Print how many steps were over their bound, and the longest ones."""
    print(f"{model}: ready after {found['ready_s']:.1f} s; {found['num_requests']:,} requests", end=", ")
    if num_bounded := found["num_bounded"]:
        share = found["num_over"] / num_bounded
        print(f"{found['num_steps']:,} steps, {share:.3%} of them longer than 2.5 x roofline + 20 ms")
    else:
        print(f"{found['num_steps']:,} steps, without a bound: the ceilings of this device are not known")
    for step in found["longest"]:
        bound = "" if step["bound_s"] is None else f" (bound {1000 * step['bound_s']:,.1f})"
        print(f"  step {step['step']:>6}{1000 * step['seconds']:>10,.1f} ms{bound:<16}  {step['cause']}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    default = [model for model in LOADS if model != "teachlm"]
    parser.add_argument("--models", type=names(list(LOADS)), default=default, help=f"of {','.join(LOADS)}")
    parser.add_argument("--rate", type=float, help="requests per second, of every model")
    parser.add_argument("--duration", type=float, dest="duration_s", help="seconds in which requests arrive")
    for end in ("shortest", "longest"):
        for part in ("prompt", "output"):
            parser.add_argument(f"--{end}-{part}", type=int, help="tokens")
    parser.add_argument("--seed", type=int, help="of the arrivals and the requests; default: 0")
    args = parser.parse_args(arguments)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    results: dict[str, dict[str, Any]] = {}
    for model in args.models:
        load = load_of(model, vars(args))
        with tempfile.TemporaryDirectory(prefix="teachllm-shapes-") as folder:
            found = stall(settings_of(model, Path(folder), device), load)
        results[model] = {"load": asdict(load)} | found
        print_result(model, found)
        if args.output is not None:  # after each model: a later one may fail
            begins = provenance("stall.py", arguments, device_name(device), args.commit)
            args.output.write_text(json.dumps(begins | {"stall": results}) + "\n", encoding="utf-8")
    return int(any(found["num_over"] for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
