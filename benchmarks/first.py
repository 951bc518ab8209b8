"""Measure how long a start takes until the engine is ready, and compare a workload's first run with later runs.

    python3 benchmarks/first.py [--models qwen3-0.6b,qwen3-8b] [--workloads mixed,batch64] [--output FILE]

For each model and workload the script starts two processes, one after the other. The first one starts with empty
caches, and the second one uses the kernels that the first one compiled. Each process reports when its engine is ready,
then runs the workload six times. The settled figure is the median of the last three runs. Weights are random, of the
real shapes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]

from h200 import add_models, engine_settings, names, provenance, script_parser, write_shape  # noqa: E402

from teachllm.bench.first_run import first_run  # noqa: E402
from teachllm.bench.workloads import WORKLOADS, is_rate  # noqa: E402
from teachllm.engine.observability.ceilings import device_name  # noqa: E402


def rows(figures: Mapping[str, float]) -> list[tuple[str, float, float, float]]:
    """Return (figure, first, later, how much of the later speed the first run has) with and without cached kernels."""
    found = []
    for name, first in figures.items():
        if "first_" not in name:
            continue
        later = figures[name.replace("first_", "", 1)]
        found.append((name, first, later, first / later if is_rate(name) else later / first))
    return found


def print_rows(model: str, workload: str, figures: Mapping[str, float]) -> None:
    """Print a line for each figure."""
    ready, cached = figures["ready_s"], figures["cached_ready_s"]
    print(f"{model} {workload}: ready after {ready:.1f} s, with cached kernels {cached:.1f}")
    for name, first, later, share in rows(figures):
        print(f"  {name:<28}{first:>12.6g}{later:>12.6g}{share:>8.0%}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    add_models(parser)
    parser.add_argument(
        "--workloads", type=names(list(WORKLOADS)), default=["mixed", "batch64"], help=f"of {','.join(WORKLOADS)}"
    )
    args = parser.parse_args(arguments)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, dict[str, Any]] = {}
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            settings = engine_settings(write_shape(model, Path(folder)), device)
            for workload in args.workloads:
                figures = found.setdefault(model, {})[workload] = first_run(settings, workload)
                print_rows(model, workload, figures)
    if args.output is not None:
        result = provenance("first.py", arguments, device_name(device), args.commit) | {"first": found}
        args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
