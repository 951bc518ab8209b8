"""What codes gain: some of h200.py's workloads by way of storing, beside bfloat16, in one process.

    PYTHONPATH=.:kernels:cli:webui:lessons python3 benchmarks/quantized.py [--ways fp8,fp8-kv] [--output FILE]
        [--workloads single,mixed] [--quick]

    bf16      plain numbers
    fp8       weights and activations in 8-bit floats, quantized when they are loaded
    int8      the same in integers
    int4      weights alone, 4 bits, a scale for every 128
    fp8-kv    bfloat16, with K and V in 8-bit floats

The result has `{"workloads": {model: {way: {workload: {figure: value}}}}}`. A workload that fails is an error in its
place, and the exit code is 1. What each is to reach stands beside it, and what vLLM reaches, see `peers.json`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]

from h200 import (  # noqa: E402
    PEERS,
    add_models,
    benchmark,
    engine_settings,
    give_back,
    names,
    provenance,
    script_parser,
    write_shape,
)
from h200_table import best_of, is_reached  # noqa: E402

from teachllm.bench.workloads import WORKLOADS  # noqa: E402
from teachllm.engine.ceilings import device_name  # noqa: E402

WAYS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantization": "fp8"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8-kv": {"kv_cache_dtype": "fp8"},
}
_SMALL = ("single", "batch64", "mixed")
_WORKLOADS = {"bf16": (*_SMALL, "long"), "fp8-kv": ("batch64", "long", "mixed")}
_PEER_OF = {"bf16": "vllm", "fp8": "vllm-fp8-weights", "fp8-kv": "vllm-fp8-kv"}
TO_REACH = {  # by shapes, way, workload and figure: goals of this project; of bf16, see peers.json
    "qwen3-8b": {
        "fp8": {
            "single": {"tpot_ms": 2.5},
            "batch64": {"step_ms": 5.3, "prefill_tok_s": 66_000},
            "mixed": {"tok_s": 12_500},
        },
        "int4": {"single": {"tpot_ms": 1.9}},
        "fp8-kv": {"long": {"step_ms": 7.2}, "mixed": {"tok_s": 11_500}},
    }
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    add_models(parser, default=["qwen3-8b"])
    parser.add_argument("--ways", type=names(list(WAYS)), default=list(WAYS), help=f"of {','.join(WAYS)}")
    parser.add_argument("--workloads", type=names(list(WORKLOADS)), help="default: those that a way is meant for")
    parser.add_argument(
        "--quick", action="store_true", help="one warm-up and one run of everything: not for the record"
    )
    options = parser.parse_args(arguments)
    found: dict[str, Any] = provenance("quantized.py", arguments, device_name("cuda"), options.commit)
    del found["variant"]
    found["workloads"] = {}
    for model in options.models:
        cells: dict[str, dict[str, Any]] = {}
        found["workloads"][model] = cells
        for way in options.ways:
            wanted = options.workloads or _WORKLOADS.get(way, _SMALL)
            cells[way] = measured(model, WAYS[way], wanted, options.quick)
            show(model, way, cells[way])
            if options.output:
                options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    every = [figures for ways in found["workloads"].values() for cells in ways.values() for figures in cells.values()]
    return int(any("error" in figures for figures in every))


def measured(model: str, way: dict[str, Any], workloads: Sequence[str], is_quick: bool) -> dict[str, dict[str, Any]]:
    """Figures by workload, of one engine."""
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = engine_settings(write_shape(model, Path(folder)), "cuda") | way
        chosen = {name: WORKLOADS[name] for name in workloads}
        runs = {"num_warmups": 1, "num_runs": 1} if is_quick else {}
        benchmark(settings, chosen, results.__setitem__, with_cold=False, **runs)
    give_back()
    return results


def show(model: str, way: str, workloads: dict[str, dict[str, Any]]) -> None:
    for workload, figures in workloads.items():
        for figure, ours in figures.items():
            line = f"{model} {way:<7} {workload} {figure}: "
            if not isinstance(ours, float):
                print(line + str(ours), flush=True)
                continue
            peers = PEERS["models"][model].get(workload, {}).get(figure, {})
            target = TO_REACH.get(model, {}).get(way, {}).get(workload, {}).get(figure)
            target = peers.get("to_reach") if way == "bf16" else target
            theirs = best_of(peers.get(_PEER_OF.get(way, "")), figure)
            line += f"{ours:,.4g}"
            if target is not None:
                line += f", to reach {target:,.4g}: {'yes' if is_reached(ours, target, figure) else 'NO'}"
            print(line + ("" if theirs is None else f", vLLM {theirs:,.4g}"), flush=True)


if __name__ == "__main__":
    sys.exit(main())
