"""Some of h200.py's workloads by several ways of running a model, in one process, one engine after the other.

The result has `{"workloads": {model: {way: {workload: {figure: value}}}}}`. A workload that fails is an error in its
place, and the exit code is 1. What each is to reach stands beside it, and what vLLM reaches, see `peers.json`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
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
from h200_parts.h200_table import best_of, is_rate, is_reached  # noqa: E402

from teachllm.bench.workloads import WORKLOADS  # noqa: E402
from teachllm.engine.observability.ceilings import device_name  # noqa: E402


@dataclass(frozen=True)
class Way:
    """Describe one way to run the engine in a benchmark.

    Attributes:
        settings: of the engine, besides those of all.
        workloads: that it is meant for.
        peer: the name of vLLM's figures by the same way in peers.json.
        to_reach: goals of this project, by shapes, workload and figure; None: those of peers.json.
        allowed: by workload, how many times the tokens/s of the way "one" the bytes to be read allow, where counted.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    workloads: Sequence[str] = ("single", "batch64", "mixed")
    peer: str = ""
    to_reach: Mapping[str, Mapping[str, Mapping[str, float]]] | None = field(default_factory=dict)
    allowed: Mapping[str, float] = field(default_factory=dict)


def run(
    script: str,
    description: str | None,
    ways: Mapping[str, Way],
    arguments: Sequence[str] | None,
    default: Sequence[str] | None = None,
) -> int:
    """A script's `main`; returns its exit code.

    Args:
        default: ways that are run if none are named; None: all.
    """
    parser = script_parser(description)
    add_models(parser, default=["qwen3-8b"])
    parser.add_argument("--ways", type=names(list(ways)), default=list(default or ways), help=f"of {','.join(ways)}")
    parser.add_argument("--workloads", type=names(list(WORKLOADS)), help="default: those that a way is meant for")
    parser.add_argument(
        "--quick", action="store_true", help="one warm-up and one run of everything: not for the record"
    )
    options = parser.parse_args(arguments)
    found: dict[str, Any] = provenance(script, arguments, device_name("cuda"), options.commit)
    del found["variant"]
    found["workloads"] = {}
    for model in options.models:
        cells: dict[str, dict[str, Any]] = {}
        found["workloads"][model] = cells
        for name in options.ways:
            way = ways[name]
            cells[name] = measured(model, way, options.workloads or way.workloads, options.quick)
            show(model, name, way, cells[name], cells.get("one"))
            if options.output:
                options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    every = [figures for way in found["workloads"].values() for cells in way.values() for figures in cells.values()]
    return int(any("error" in figures for figures in every))


def measured(model: str, way: Way, workloads: Sequence[str], is_quick: bool) -> dict[str, dict[str, Any]]:
    """Figures by workload, of one engine."""
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = engine_settings(write_shape(model, Path(folder)), "cuda") | way.settings
        chosen = {name: WORKLOADS[name] for name in workloads}
        runs = {"num_warmups": 1, "num_runs": 1} if is_quick else {}
        benchmark(settings, chosen, results.__setitem__, with_cold=False, **runs)
    give_back()
    return results


def show(
    model: str,
    name: str,
    way: Way,
    workloads: dict[str, dict[str, Any]],
    one: dict[str, dict[str, Any]] | None,
) -> None:
    """Prints a way's figures, how they compare to those of the way "one" if there are any, and what they are to be."""
    for workload, figures in workloads.items():
        for figure, ours in figures.items():
            line = f"{model} {name:<7} {workload} {figure}: "
            if not isinstance(ours, float):
                print(line + str(ours), flush=True)
                continue
            peers = PEERS["models"][model].get(workload, {}).get(figure, {})
            if way.to_reach is None:
                target = peers.get("to_reach")
            else:
                target = way.to_reach.get(model, {}).get(workload, {}).get(figure)
            theirs = best_of(peers.get(way.peer), figure)
            line += f"{ours:,.4g}"
            of_one = (one or {}).get(workload, {}).get(figure)
            if of_one is not None and name != "one":
                ratio = ours / of_one if is_rate(figure) else of_one / ours
                line += f" ({ratio:.2f} times as good as one"
                if figure == "tok_s" and workload in way.allowed:
                    line += f", the bytes allow {way.allowed[workload]}"
                line += ")"
            if target is not None:
                line += f", to reach {target:,.4g}: {'yes' if is_reached(ours, target, figure) else 'NO'}"
            print(line + ("" if theirs is None else f", vLLM {theirs:,.4g}"), flush=True)
