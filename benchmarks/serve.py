"""Measure what the server costs: `mixed` through `teachllm serve`, beside the same engine without it.

    PYTHONPATH=.:kernels:cli:webui:lessons python3 benchmarks/serve.py [--output FILE] [--serve-flags="--flag ..."]

Offline: `mixed` of `teachllm/bench/workloads.py` in a process of its own, which ends before the server starts. Served:
the same requests as token ids, all at once, each streamed to a client on the same machine as text. Same settings, same
seeds; random weights of Qwen3-0.6B's shape, and a synthetic tokenizer of its size, so that turning ids into text is
real work (`serve_parts/synthetic_tokenizer.py`). After two warm-ups, the median of three runs; times are of all three
together.

The bar is 0.90 of the offline output tokens per second. The exit code is 1 if something failed, not if the bar is
missed.
Needs the extra `serve`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WINGS = [str(ROOT / folder) for folder in (".", "kernels", "cli", "webui", "lessons", "benchmarks")]
sys.path[:0] = WINGS

from h200 import engine_settings, provenance, script_parser, write_shape  # noqa: E402
from serve_parts.synthetic_tokenizer import write_tokenizer  # noqa: E402

from teachllm.bench.serve.client import Target  # noqa: E402
from teachllm.bench.serve.dataset import Prompt  # noqa: E402
from teachllm.bench.serve.figures import figures  # noqa: E402
from teachllm.bench.serve.load import Load, measure, run  # noqa: E402
from teachllm.bench.workloads import mixed, mixed_batch, num_runs_of  # noqa: E402
from teachllm.simulator.shapes import SHAPES  # noqa: E402

MODEL = "qwen3-0.6b"
BAR = 0.90
_NUM_WARMUPS, _NUM_RUNS = 2, num_runs_of("mixed")
_SEEDS = (*range(_NUM_RUNS, _NUM_RUNS + _NUM_WARMUPS), *range(_NUM_RUNS))  # as `workloads.measure` has them
_LONGEST_S = 600.0
_TINY_SHAPE = SHAPES[MODEL] | {
    **{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 8, "head_dim": 16, "intermediate_size": 32},
    **{"vocab_size": 512, "eos_token_id": 511, "dtype": "float32"},
}
_TINY_SETTINGS = {"max_model_len": 64, "kv_cache_memory_bytes": 1 << 25, "device": "cpu"}
_BATCH = {"vocab_size": SHAPES[MODEL]["vocab_size"]}
_TINY_BATCH = {"vocab_size": _TINY_SHAPE["vocab_size"], "num_requests": 8, "shortest": 4, "longest": 24}
_PACKAGES = ("aiohttp", "fastapi", "httptools", "msgspec", "pyzmq", "tokenizers", "uvicorn", "uvloop")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="a model of a few kilobytes on the CPU: not for the record")
    parser.add_argument("--serve-flags", default="", help="more flags of `teachllm serve`, in one text")
    parser.add_argument("--offline", metavar="JSON", help="run only the part without a server, with these settings")
    options = parser.parse_args(arguments)
    batch = _TINY_BATCH if options.tiny else _BATCH
    if options.offline:
        print(json.dumps(offline(json.loads(options.offline), batch)), flush=True)
        return 0
    with tempfile.TemporaryDirectory(prefix="teachllm-serve-") as folder:
        settings = write_model(Path(folder), options.tiny)
        without = offline_process(settings, options.tiny)
        print(f"offline: {without['tok_s']:,.0f} output tokens/s", file=sys.stderr, flush=True)
        with server(settings, shlex.split(options.serve_flags), Path(folder) / "server.log") as running:
            print(f"server: ready after {running.ready_s:.1f} s", file=sys.stderr, flush=True)
            loads = served(running.url, batch)
    begins = with_packages(provenance("serve.py", arguments, without.pop("device"), options.commit))
    with_server = summary(loads)
    ratio = with_server["tok_s"] / without["tok_s"]
    result = {"offline": without, "served": with_server, "ratio": ratio, "bar": BAR}
    if options.output:
        text = json.dumps(begins | {"workloads": {MODEL: {"mixed": result}}}, indent=2)
        options.output.write_text(text + "\n", encoding="utf-8")
    show(result)
    return 0


def with_packages(begins: dict[str, Any]) -> dict[str, Any]:
    """Return what a result begins with, and the versions of what serves."""
    found = dict(begins["versions"])
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return begins | {"versions": found}


def write_model(folder: Path, is_tiny: bool, model: str = MODEL) -> dict[str, Any]:
    """Write the checkpoint; return the settings of its engine."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = write_shape(model, folder)
    settings = engine_settings(path, device) | (_TINY_SETTINGS if is_tiny else {})
    shape = _TINY_SHAPE if is_tiny else SHAPES[model]
    (path / "config.json").write_text(json.dumps(shape, indent=2), encoding="utf-8")
    write_tokenizer(path, shape["vocab_size"])
    return settings


def offline(settings: dict[str, Any], batch: dict[str, int]) -> dict[str, Any]:
    """The engine alone: output tokens per second of every run, and their median."""
    from teachllm import LLM
    from teachllm.bench.batch import run_batch
    from teachllm.engine.observability.ceilings import device_name

    with contextlib.closing(LLM(**settings)) as llm:
        runs = [mixed(lambda asked: run_batch(llm, asked).total_s, seed=seed, **batch)["tok_s"] for seed in _SEEDS]
    runs = runs[_NUM_WARMUPS:]
    return {"tok_s": statistics.median(runs), "runs": runs, "device": device_name(settings["device"])}


def offline_process(settings: dict[str, Any], is_tiny: bool) -> dict[str, Any]:
    """`offline` in a process that ends, so that the server finds the whole device.

    Raises:
        RuntimeError: it ended without a figure; with the last line it printed.
    """
    command = [sys.executable, __file__, "--offline", json.dumps(settings), *(["--tiny"] if is_tiny else [])]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=_LONGEST_S)
    if done.returncode:
        raise RuntimeError(f"the offline run ended with {done.returncode}: {_last_line(done.stderr)}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


class RunningServer(NamedTuple):
    """A server that is ready.

    Attributes:
        ready_s: from the start of its process until /health said so.
    """

    url: str
    ready_s: float


@contextlib.contextmanager
def server(
    settings: dict[str, Any],
    more_flags: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[RunningServer]:
    """Run a server until it is ready, and end it afterwards.

    Args:
        environment: of its process, besides where our packages are; None is this process's.

    Raises:
        RuntimeError: it ended, or was not ready in time; with the last line of its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {name: value for name, value in settings.items() if name not in ("model", "skip_tokenizer_init")}
    command = [sys.executable, "-m", "teachllm_cli", "serve", settings["model"], "--port", str(port)]
    command += [text for name, value in flags.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        begin = time.monotonic()
        process = subprocess.Popen([*command, *more_flags], env=_environment(environment), stdout=output, stderr=output)
        try:
            while not _is_ready(url):
                if process.poll() is not None or time.monotonic() - begin > _LONGEST_S:
                    why = f"ended with {process.returncode}" if process.poll() is not None else "is not ready"
                    raise RuntimeError(f"the server {why}: {_last_line(log.read_text(errors='replace'))}")
                time.sleep(0.1)
            yield RunningServer(url, time.monotonic() - begin)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def served(url: str, batch: dict[str, int]) -> list[Load]:
    """The counted runs of `mixed` through a server.

    Raises:
        RuntimeError: a request failed, or ended early: its time does not count.
    """
    return [checked(once(url, seed, batch)) for seed in _SEEDS][_NUM_WARMUPS:]


def checked(load: Load) -> Load:
    """Return a load whose requests have all got their tokens.

    Raises:
        RuntimeError: a request failed, or ended early: its time does not count.
    """
    if load.failed:
        raise RuntimeError(f"{len(load.failed)} requests failed, the first with: {load.failed[0].error}")
    if short := [record for record in load.records if record.num_output_tokens != record.output_len]:
        raise RuntimeError(
            f"a request ended after {short[0].num_output_tokens} of {short[0].output_len} tokens: the time of its "
            "run does not count"
        )
    return load


def once(url: str, seed: int, batch: dict[str, int]) -> Load:
    """All requests at once."""
    requests = mixed_batch(seed, **batch)
    pairs = zip(requests.prompts, requests.output_lens, strict=True)
    prompts = [Prompt(list(ids), output_len) for ids, output_len in pairs]
    fields = {"temperature": requests.temperature, "ignore_eos": True}
    return run(measure(Target(url, fields=fields, timeout_s=_LONGEST_S), prompts, [0.0] * len(prompts)))


def summary(loads: Sequence[Load]) -> dict[str, Any]:
    """Output tokens per second of every run and their median; percentiles of the times of all runs together."""
    runs = [sum(record.num_output_tokens for record in load.records) / load.duration_s for load in loads]
    together = Load(
        loads[0].model,
        [record for load in loads for record in load.records],
        sum(load.duration_s for load in loads),
        max(load.busy for load in loads),
    )
    found = figures(together)
    times = {name: value for name, value in found.items() if name.endswith(("ttft_ms", "tpot_ms", "itl_ms"))}
    times |= {"num_chunks": sum(len(record.chunk_s) for record in together.records)}
    times |= {"num_output_tokens": found["total_output_tokens"], "client": found["client"]}
    return {"tok_s": statistics.median(runs), "runs": runs, **times, "doubts": together.doubts()}


def show(result: dict[str, Any]) -> None:
    without, served, ratio = result["offline"], result["served"], result["ratio"]
    print(f"mixed, offline: {without['tok_s']:,.0f} output tokens/s")
    print(f"mixed, served:  {served['tok_s']:,.0f} output tokens/s")
    print(f"ratio: {ratio:.3f} (bar {BAR:.2f}: {'reached' if ratio >= BAR else 'missed'})")
    for metric in ("ttft", "itl", "tpot"):
        times = ", ".join(f"{p} {served[f'{p}_{metric}_ms']:,.2f}" for p in ("p50", "p90", "p99"))
        print(f"{metric} ms: {times}")
    per_chunk = served["num_output_tokens"] / served["num_chunks"]
    client = served["client"]
    print(
        f"tokens a chunk: {per_chunk:.2f}; the client used {client['busy']:.0%} of a core at its busiest, "
        f"and sent up to {client['max_late_ms']:.0f} ms late"
    )
    for doubt in served["doubts"]:
        print(f"warning: {doubt}")


def _environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    given = os.environ if environment is None else environment
    paths = [*WINGS, *filter(None, [given.get("PYTHONPATH")])]
    return {**given, "PYTHONPATH": os.pathsep.join(paths)}


def _is_ready(url: str) -> bool:
    with (
        contextlib.suppress(urllib.error.URLError, OSError),
        urllib.request.urlopen(f"{url}/health", timeout=5) as said,
    ):
        return bool(said.status == 200)
    return False


def _last_line(text: str) -> str:
    return (text.strip() or "no word").splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main())
