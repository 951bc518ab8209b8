"""Measure the host's work per step: CPU time and calls, for 1, 64 and 256 running requests, of one checkout or two.

    python3 benchmarks/host_step.py [--against PATH] [--output FILE]

No GPU is needed. Every request decodes; the engine's loop, scheduler and rows are the real ones, and the runner returns
a constant token at once, after it has built the step's inputs ("cpu") or packed the plan for a GPU ("gpu"). What is
measured, and how, is in `host_step_worker.py`. The phases of a step:

    schedule   `Scheduler.schedule`
    inputs     rows, block tables, flat tensors; or the buffer that one kernel reads
    update     sampled tokens into the rows, `Scheduler.update`
    loop       the rest of `EngineCore.step`; unless steps run ahead, it hashes the blocks that have become full

A third kind of row, "arrivals", has the cost of a request that shares 4,096 tokens with those before it, from its
arrival to its only token: most of it is to find the prefix in the cache.

Times are those of the best of 15 processes, each a fresh interpreter; calls are counted in a process of their own. With
`--against` three kinds of process take turns, in one order and then in the other: this checkout ("here"), the same once
more, and the other one ("there").
The ratio of the first two is the machine's noise, to hold the ratio of here to there against. Calls have no noise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]
sys.path.insert(0, str(Path(__file__).resolve().parent / "host_step_parts"))

from h200 import commit_of, names, provenance, script_parser  # noqa: E402
from host_step_meter import PHASES  # noqa: E402
from host_step_worker import ARRIVALS, RUNNERS, Cells  # noqa: E402

from teachllm.engine.observability.ceilings import device_name  # noqa: E402

WORKER = ROOT / "benchmarks" / "host_step_parts" / "host_step_worker.py"
WINGS = (".", "kernels", "cli", "webui", "lessons")
NUM_WINDOWS_OF_CALLS = 2
COLUMNS = (*PHASES, "sum", "calls")


def run_worker(checkout: Path, *options: str) -> Cells:
    """Measure a checkout in a fresh interpreter.

    Args:
        options: of `host_step_worker.py`.

    Raises:
        RuntimeError: the worker failed, or imported another checkout than it should.
    """
    path = os.pathsep.join(str(checkout / wing) for wing in WINGS)
    environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", str(WORKER), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{checkout} cannot be measured: {reason}")
    found = json.loads(done.stdout)
    if Path(found["package"]) != checkout / "teachllm":
        raise RuntimeError(f"{checkout} has no package teachllm: {found['package']} was imported")
    cells: Cells = found["cells"]
    return cells


def least(processes: Sequence[Cells]) -> Cells:
    """Return, for each cell, the costs of the process that took least for it: phases still add up to the sum."""
    return {
        runner: {
            count: min((cells[runner][count] for cells in processes), key=lambda costs: sum(costs.values()))
            for count in counts
        }
        for runner, counts in processes[0].items()
    }


def measure(
    sides: Mapping[str, Path], *, runners: Sequence[str], requests: Sequence[int], num_processes: int
) -> tuple[dict[str, Cells], dict[str, Cells]]:
    """Measure every side, in turns.

    Returns:
        CPU time in microseconds per step, and calls per step, both by side.
    """
    cells = ("--runners", ",".join(runners), "--requests", ",".join(map(str, requests)))
    calls = {
        side: run_worker(checkout, *cells, "--count-calls", "--windows", str(NUM_WINDOWS_OF_CALLS))
        for side, checkout in sides.items()
    }
    processes: dict[str, list[Cells]] = {side: [] for side in sides}
    for turn in range(num_processes):
        order = list(sides.items())
        for side, checkout in order if turn % 2 == 0 else reversed(order):  # no side always comes last
            processes[side].append(run_worker(checkout, *cells))
        print(f"turn {turn + 1} of {num_processes}", file=sys.stderr, flush=True)
    return {side: least(found) for side, found in processes.items()}, calls


def rows_of(times: Cells, calls: Cells) -> dict[tuple[str, str], dict[str, float]]:
    """Return a table's rows by runner and number of requests: each phase's time, their sum, and the calls."""
    return {
        (runner, count): costs | {"sum": sum(costs.values()), "calls": sum(calls[runner][count].values())}
        for runner, counts in times.items()
        for count, costs in counts.items()
    }


def print_table(title: str, rows: Mapping[tuple[str, str], Mapping[str, float]], *, digits: int) -> None:
    """Print rows of `COLUMNS`."""
    print(f"\n{title}")
    print(f"  {'runner':<7}{'requests':>9}" + "".join(f"{column:>10}" for column in COLUMNS))
    for (runner, count), row in rows.items():
        print(f"  {runner:<7}{count:>9}" + "".join(f"{row[column]:>10.{digits}f}" for column in COLUMNS))


def show(times: Mapping[str, Cells], calls: Mapping[str, Cells], commits: Mapping[str, str]) -> None:
    """Print the noise, how both sides compare, and what each takes.

    Args:
        times, calls: per step, by side.
    """
    rows = {side: rows_of(times[side], calls[side]) for side in times}
    for title, other in (("here / here again: the noise", "here again"), ("here / there", "there")):
        if other in rows:
            ratios = {
                key: {column: row[column] / rows[other][key][column] for column in COLUMNS}
                for key, row in rows["here"].items()
            }
            print_table(title, ratios, digits=4)
    for side, commit in commits.items():
        print_table(f"{side} ({commit[:9]}): us of CPU time and calls per step", rows[side], digits=1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout, older or newer")
    every = [*RUNNERS, ARRIVALS]
    parser.add_argument("--runners", type=names(every), default=every, help=f"of {','.join(every)}")
    parser.add_argument("--requests", default="1,64,256", help="how many run, with commas between the numbers")
    parser.add_argument("--processes", type=int, default=15, help="per side (default: 15)")
    options = parser.parse_args(arguments)
    sides = {"here": ROOT}
    if options.against is not None:
        sides |= {"here again": ROOT, "there": options.against.resolve()}
    found: dict[str, Any] = provenance("host_step.py", arguments, device_name("cpu"), options.commit)
    del found["variant"]
    commits = {"here": found["commit"]}
    if options.against is not None:
        commits["there"] = found["against_commit"] = commit_of(sides["there"])
    requests = [int(count) for count in options.requests.split(",")]
    try:
        times, calls = measure(sides, runners=options.runners, requests=requests, num_processes=options.processes)
    except RuntimeError as error:
        parser.exit(1, f"{error}\n")
    print(f"{found['device']}; the least of {options.processes} processes")
    show(times, calls, commits)
    if options.output:
        found |= {"processes": options.processes, "us_per_step": times, "calls_per_step": calls}
        options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
