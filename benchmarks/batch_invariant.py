"""Measure what `batch_invariant` costs: some of h200.py's workloads with it and without, in one process.

    PYTHONPATH=.:kernels:cli:webui:lessons python3 benchmarks/batch_invariant.py [--models qwen3-8b] [--output FILE]

A token's logits then have the same bits whatever runs beside it, so no kernel may suit itself to the batch. The result
has `{"workloads": {model: {workload: {figure: [without, with]}}}}`. A workload that fails is an error in its place, and
the exit code is 1.
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

from h200 import add_models, benchmark, engine_settings, give_back, provenance, script_parser, write_shape  # noqa: E402

from teachllm.bench.workloads import WORKLOADS, is_rate  # noqa: E402
from teachllm.engine.observability.ceilings import device_name  # noqa: E402

_WORKLOADS = {name: WORKLOADS[name] for name in ("single", "batch64", "mixed")}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    add_models(parser)
    options = parser.parse_args(arguments)
    found: dict[str, Any] = provenance("batch_invariant.py", arguments, device_name("cuda"), options.commit)
    found["workloads"] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            settings = engine_settings(write_shape(model, Path(folder)), "cuda")
            pairs = [measured(settings | {"batch_invariant": is_fixed}) for is_fixed in (False, True)]
            found["workloads"][model] = pair_up(*pairs)
            show(model, found["workloads"][model])
            if options.output:
                options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return int(any("error" in figures for cells in found["workloads"].values() for figures in cells.values()))


def measured(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Figures by workload, of one engine."""
    results: dict[str, dict[str, Any]] = {}
    benchmark(settings, _WORKLOADS, results.__setitem__, with_cold=False, num_warmups=2, num_runs=1)
    give_back()
    return results


def pair_up(without: dict[str, dict[str, Any]], fixed: dict[str, dict[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """By workload and figure: (without, with); None where one of them failed, which is then an "error" beside."""
    return {
        workload: {name: [figures.get(name), fixed[workload].get(name)] for name in figures | fixed[workload]}
        for workload, figures in without.items()
    }


def show(model: str, workloads: dict[str, dict[str, list[Any]]]) -> None:
    print(f"{model}: without, with, and how many times as long")
    for workload, figures in workloads.items():
        for figure, (without, fixed) in figures.items():
            if not isinstance(without, float) or not isinstance(fixed, float):
                print(f"  {workload} {figure}: {without}, {fixed}")
                continue
            longer = without / fixed if is_rate(figure) else fixed / without
            print(f"  {workload} {figure}: {without:,.4g}, {fixed:,.4g}, {longer:.2f}")


if __name__ == "__main__":
    sys.exit(main())
