"""Compare a workload's first run, right after an engine reports that it is ready, with its later runs.

An engine may report that and still compile kernels or capture CUDA graphs when a step first needs them. A benchmark
that warms up does not see this, and a user has no warm-up. So the first run is measured in two new processes: the first
one starts with empty caches, and the second one uses what the first one compiled.

Run as a program, this module is that process. Its arguments: the engine's settings as JSON, the workload's name, its
parameters as JSON, and how many runs follow the first.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from statistics import median
from typing import Any

from teachllm.bench.batch import run_batch
from teachllm.bench.fresh_process import run_fresh
from teachllm.bench.workloads import WORKLOADS, Figures

_WARM_UPS = 2  # runs after the first one that are not counted


def first_run(
    settings: Mapping[str, Any],
    workload: str,
    num_later: int = 5,
    parameters: Mapping[str, int] | None = None,
) -> Figures:
    """Return a workload's figures in its first run and later.

    Args:
        settings: fields of `EngineConfig`.
        workload: a name of `WORKLOADS`.
        num_later: runs after the first; the median is taken of all but two.
        parameters: of the workload, in place of its own.

    Returns:
        "ready_s", from the start of the process; each figure of the workload as "first_..." and, of later runs, by its
        own name; and all of these again as "cached_...", with compiled kernels on disk.

    Raises:
        ValueError: there are too few later runs.
        RuntimeError: a process failed; with the last line that it printed.
    """
    if num_later <= _WARM_UPS:
        raise ValueError(f"num_later={num_later}: {_WARM_UPS} runs warm up, so set it to {_WARM_UPS + 1} or more")
    arguments = [json.dumps(dict(settings)), workload, json.dumps(dict(parameters or {})), str(num_later)]
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="teachllm-first-") as folder:
        for prefix in ("", "cached_"):
            ready, result = run_fresh("teachllm.bench.first_run", arguments, folder, ["ready", "{"])
            figures[f"{prefix}ready_s"] = ready.seconds
            figures |= {f"{prefix}{name}": value for name, value in json.loads(result.text).items()}
    return figures


def main() -> None:
    settings, workload, parameters, num_later = sys.argv[1:]
    from teachllm import LLM

    llm = LLM(**json.loads(settings))
    print("ready", flush=True)
    vocab_size, kwargs = llm.engine.model_config.vocab_size, json.loads(parameters)
    first, *later = (
        WORKLOADS[workload](lambda batch: run_batch(llm, batch).total_s, vocab_size, seed, **kwargs)
        for seed in range(1 + int(num_later))
    )
    settled = {name: median(run[name] for run in later[_WARM_UPS:]) for name in first}
    print(json.dumps({f"first_{name}": value for name, value in first.items()} | settled), flush=True)
    llm.close()


if __name__ == "__main__":
    main()
