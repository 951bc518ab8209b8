"""Measure what users of a new server meet: with empty caches, and with the kernels that an earlier start compiled.

    PYTHONPATH=.:kernels:cli:webui:lessons python3 benchmarks/served.py [--model qwen3-0.6b] [--rate 30] [--output FILE]

`teachllm serve` starts in a new process with empty caches. As soon as /health says that it is ready, 450 requests
arrive as a Poisson process, 30 per second: prompts of 100 to 4,096 random ids and 50 to 250 tokens of output, at
temperature 0.6, each streamed to a client on the same machine. The load runs three times, each time with new prompts.
Then a second server starts, which finds the kernels that the first one compiled, and gets the same three loads. No run
is a warm-up.

Weights are random, of the real shape; settings and tokenizer are those of `serve.py`. The exit code is 1 if something
failed. Needs the extra `serve`.
"""

from __future__ import annotations

import json
import random
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]

from h200 import provenance, script_parser  # noqa: E402
from serve import checked, server, with_packages, write_model  # noqa: E402

from teachllm.bench.batch import random_ids  # noqa: E402
from teachllm.bench.fresh_process import environment_with_caches  # noqa: E402
from teachllm.bench.serve.arrivals import arrival_times  # noqa: E402
from teachllm.bench.serve.client import Target  # noqa: E402
from teachllm.bench.serve.dataset import Prompt  # noqa: E402
from teachllm.bench.serve.figures import figures  # noqa: E402
from teachllm.bench.serve.load import Load, measure, run  # noqa: E402
from teachllm.engine.observability.ceilings import device_name  # noqa: E402
from teachllm.simulator.shapes import SHAPES  # noqa: E402

STARTS = ("empty caches", "cached kernels")
_SEEDS = (0, 1, 2)
_TIMEOUT_S = 600.0
_PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}


@dataclass(frozen=True)
class ServedLoad:
    """Describe the requests of one run; lengths are in tokens and uniform, `rate` is requests per second."""

    rate: float = 30.0
    num_requests: int = 450
    shortest_prompt: int = 100
    longest_prompt: int = 4096
    shortest_output: int = 50
    longest_output: int = 250
    temperature: float = 0.6

    def draw(self, seed: int, vocab_size: int) -> tuple[list[Prompt], list[float]]:
        """Return prompts and arrival times, the same for the same seed."""
        rng = random.Random(f"served {seed}")
        prompts = [
            Prompt(
                random_ids(rng, rng.randint(self.shortest_prompt, self.longest_prompt), vocab_size),
                rng.randint(self.shortest_output, self.longest_output),
            )
            for _ in range(self.num_requests)
        ]
        return prompts, arrival_times(self.num_requests, self.rate, seed=seed)


TINY = ServedLoad(50.0, 8, shortest_prompt=4, longest_prompt=24, shortest_output=4, longest_output=24)


def served_runs(
    url: str, drawn: Sequence[tuple[list[Prompt], list[float]]], temperature: float
) -> list[dict[str, Any]]:
    """Return the figures of each load, sent one after the other.

    Raises:
        RuntimeError: a request failed, or ended early.
    """
    target = Target(url, fields={"temperature": temperature, "ignore_eos": True}, timeout_s=_TIMEOUT_S)
    return [figures_of(checked(run(measure(target, prompts, arrivals_s)))) for prompts, arrivals_s in drawn]


def figures_of(load: Load) -> dict[str, Any]:
    """Return a run's output tokens per second, percentiles of TTFT and ITL in ms, and how well the client kept up."""
    found = figures(load, metrics=("ttft", "itl"), percentiles=tuple(_PERCENTILES.values()))
    times = {
        f"{name}_{metric}_ms": found[f"p{percentile}_{metric}_ms"]
        for metric in ("ttft", "itl")
        for name, percentile in _PERCENTILES.items()
    }
    return {"tok_s": found["output_throughput"], **times, "client": found["client"], "doubts": load.doubts()}


def print_start(name: str, found: Mapping[str, Any]) -> None:
    """Print a line for each run of one server."""
    for number, figures_of_run in enumerate(found["runs"], start=1):
        times = "; ".join(
            f"{metric.upper()} ms "
            + ", ".join(f"{each} {figures_of_run[f'{each}_{metric}_ms']:,.1f}" for each in names)
            for metric, names in {"ttft": ("p50", "p90", "p99"), "itl": ("p50", "p90", "p99", "max")}.items()
        )
        begins = f"{name}, ready after {found['ready_s']:.1f} s, run {number}"
        print(f"{begins}: {figures_of_run['tok_s']:,.0f} tok/s; {times}", flush=True)
        for doubt in figures_of_run["doubts"]:
            print(f"  warning: {doubt}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--model", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--rate", type=float, help=f"requests per second; default: {ServedLoad.rate:g}")
    parser.add_argument("--tiny", action="store_true", help="a model of a few kilobytes on the CPU: not for the record")
    parser.add_argument("--serve-flags", default="", help="more flags of `teachllm serve`, in one text")
    options = parser.parse_args(arguments)
    load = TINY if options.tiny else ServedLoad()
    if options.rate is not None:
        load = replace(load, rate=options.rate)
    starts: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="teachllm-served-") as name:
        folder = Path(name)
        settings = write_model(folder, options.tiny, options.model)
        vocab_size = json.loads((Path(settings["model"]) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        drawn = [load.draw(seed, vocab_size) for seed in _SEEDS]  # before a server waits for them
        environment, flags = environment_with_caches(folder / "caches"), shlex.split(options.serve_flags)
        for start in STARTS:
            with server(settings, flags, folder / "server.log", environment) as running:
                runs = served_runs(running.url, drawn, load.temperature)
            starts[start] = {"ready_s": running.ready_s, "runs": runs}
            print_start(start, starts[start])
    if options.output is not None:
        begins = with_packages(provenance("served.py", arguments, device_name(settings["device"]), options.commit))
        result = begins | {"load": asdict(load), "served": {options.model: starts}}
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
