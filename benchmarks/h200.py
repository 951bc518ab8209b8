"""teachllm on one GPU beside vLLM, nano-vllm and transformers: the same workloads, the same shapes.

    python3 benchmarks/h200.py [--models qwen3-0.6b,qwen3-8b] [--workloads mixed,single,...] [--output FILE]

Random weights of the real shapes: speed does not depend on their values. What each workload sends and how it is
timed is in `teachllm/bench/workloads.py` and `cold.py`; the peers' figures, with where they come from, in
`peers.json`. After two warm-up runs, the median of five (`mixed`: three); `cold`: the median of five processes with
empty caches, and of the five that follow each in the caches it left.

Nothing needs to be installed but torch, triton, transformers, typer and rich:

    PYTHONPATH=.:kernels:cli:webui:lessons python3 benchmarks/h200.py

The result is written after every workload. One that fails is an error in its place, the others still run, and the
exit code is 1.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]

from h200_parts.h200_table import print_table  # noqa: E402

from teachllm import LLM, EngineConfig, __version__  # noqa: E402
from teachllm.bench.ceilings import measure_ceilings  # noqa: E402
from teachllm.bench.cold import cold  # noqa: E402
from teachllm.bench.workloads import WORKLOADS, Figures, Workload, limits, measure, num_runs_of  # noqa: E402
from teachllm.models.model_config import load_model_config  # noqa: E402
from teachllm.roofline import Ceilings  # noqa: E402
from teachllm.simulator.shapes import SHAPES  # noqa: E402

PEERS = json.loads((ROOT / "benchmarks" / "peers.json").read_text(encoding="utf-8"))


def write_shape(name: str, folder: Path) -> Path:
    """A checkpoint folder with nothing but the model's config.json."""
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SHAPES[name], indent=2), encoding="utf-8")
    return path


def engine_settings(path: Path, device: str) -> dict[str, Any]:
    """The settings that the peers were given; defaults otherwise."""
    return {
        **{"model": str(path), "load_format": "dummy", "skip_tokenizer_init": True, "device": device},
        **{"max_model_len": 20480, "gpu_memory_utilization": 0.85},
    }


def model_limits(settings: Mapping[str, Any], ceilings: Ceilings, workloads: Mapping[str, Workload]) -> dict[str, Any]:
    """{workload: its figures at the ceilings}; reads no weights."""
    config = EngineConfig(**settings)
    model = load_model_config(config, config.device.partition(":")[0])
    resolved = config.resolve(model.max_model_len)
    return {name: limits(workload, model, resolved, ceilings) for name, workload in workloads.items()}


def benchmark(
    settings: dict[str, Any],
    workloads: Mapping[str, Workload],
    on_result: Callable[[str, dict[str, Any]], None],
    *,
    with_cold: bool,
    num_warmups: int = 2,
    num_runs: int | None = None,
) -> None:
    """Runs one model through the workloads.

    Args:
        on_result: called with (workload, its figures, or {"error": one line}) as soon as it is there.
        num_runs: that the median is taken of; None is what the workloads ask for.
    """

    def attempt(name: str, run: Callable[[], Figures]) -> None:
        result: dict[str, Any]
        try:
            result = dict(run())
        except Exception as error:
            result = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        on_result(name, result)

    if with_cold:  # before this process holds the memory that the new ones need
        attempt("cold", lambda: cold(settings, num_runs or 5))
    if not workloads:
        return
    try:
        llm = LLM(**settings)
    except Exception as error:
        for name in workloads:
            on_result(name, {"error": " ".join(f"no engine: {type(error).__name__}: {error}".split())})
        return
    for name, workload in workloads.items():
        attempt(
            name,
            lambda name=name, workload=workload: measure(  # type: ignore[misc]
                workload, llm, num_runs or num_runs_of(name), num_warmups
            ),
        )
    llm.close()


def give_back() -> None:
    """The memory of a closed engine, before the next one looks for free memory."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def versions() -> dict[str, str]:
    import torch

    found = {"teachllm": __version__, "python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        number = re.search(r"\d+\.[\d.]+", driver.read_text(encoding="utf-8"))
        found["driver"] = number.group() if number else "unknown"
    for package in ("torch", "triton", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit_of(folder: Path) -> str:
    """Return the commit that is checked out in a folder, or "unknown" outside a clone."""
    try:
        command = ["git", "rev-parse", "HEAD"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def provenance(script: str, arguments: Sequence[str] | None, device: str, commit: str | None) -> dict[str, Any]:
    """Return what a result file begins with: where, of what, and how it was made."""
    command = ["python3", f"benchmarks/{script}", *(sys.argv[1:] if arguments is None else arguments)]
    return {
        "device": device,
        "commit": commit or commit_of(ROOT),
        "versions": versions(),
        "command": shlex.join(command),
        "variant": "bf16",
    }


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of an argument that lists some of these, with commas between them."""

    def split(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"no {unknown[0]!r} here: choose from {','.join(known)}")
        return text.split(",")

    return split


def script_parser(
    description: str | None, output: str = "write the result to this file, as JSON"
) -> argparse.ArgumentParser:
    """Return what every script takes that records what it measures.

    Args:
        output: help for `--output`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="recorded with the result; default: git rev-parse HEAD")
    parser.add_argument("--output", type=Path, help=output)
    return parser


def add_models(parser: argparse.ArgumentParser, default: Sequence[str] = tuple(SHAPES)) -> None:
    """Add the options of a script that measures the models of `SHAPES`."""
    parser.add_argument("--models", type=names(list(SHAPES)), default=list(default), help=f"of {','.join(SHAPES)}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__, "default: benchmarks/results/<date>-<device>-<commit>.json")
    add_models(parser)
    every = [*WORKLOADS, "cold"]
    parser.add_argument(
        "--workloads", type=names(every), help=f"of {','.join(every)}; default: what peers.json has of the model"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one warm-up and one run of everything: not for the record"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ceilings = measure_ceilings(device)
    begins = provenance("h200.py", arguments, ceilings.device, args.commit)
    slug = re.sub(r"[^a-z0-9]+", "-", ceilings.device.lower()).strip("-")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    output: Path = args.output or ROOT / "benchmarks" / "results" / f"{today}-{slug}-{begins['commit'][:9]}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = begins | {"ceilings": asdict(ceilings), "workloads": {}}
    best: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="teachllm-shapes-") as folder:
        for model in args.models:
            wanted = args.workloads or list(PEERS["models"][model])
            workloads = {name: WORKLOADS[name] for name in wanted if name != "cold"}
            settings = engine_settings(write_shape(model, Path(folder)), device)
            cells = result["workloads"][model] = {}

            def keep(name: str, figures: dict[str, Any], model: str = model, cells: dict[str, Any] = cells) -> None:
                cells[name] = figures
                output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
                print(f"{model} {name}: {json.dumps(figures)}", file=sys.stderr, flush=True)

            runs = {"num_warmups": 1, "num_runs": 1} if args.quick else {}
            benchmark(settings, workloads, keep, with_cold="cold" in wanted, **runs)
            best[model] = model_limits(settings, ceilings, workloads)
            give_back()
    print_table(result["workloads"], best, PEERS, result["ceilings"])
    print(f"written to {output}", file=sys.stderr)
    return int(any("error" in figures for cells in result["workloads"].values() for figures in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
