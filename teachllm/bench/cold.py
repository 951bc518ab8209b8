"""A cold start: from starting a process to its first token.

Compiled kernels and saved tuning live in directories on disk. A cold start finds them empty, a warm one finds what
the cold one before it left there. Each is a new process, so that imports, the device's context, compilation and
graph capture are all counted, as they are for whoever waits for a service to come back.

Run as a program, this module is that process: its argument is the engine's settings as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from teachllm.bench.workloads import Figures

_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
_LONGEST_S = 600.0


def cold(settings: Mapping[str, Any], num_runs: int = 5, prompt_len: int = 8) -> Figures:
    """Return medians in seconds, cold and warm; every cold start has empty caches of its own.

    Args:
        settings: fields of `EngineConfig`.

    Raises:
        RuntimeError: the process ended without a token; with the last line it printed.
    """
    runs = []
    for _ in range(num_runs):
        with tempfile.TemporaryDirectory(prefix="teachllm-cold-") as folder:
            runs.append((_start(settings, prompt_len, folder), _start(settings, prompt_len, folder)))
    return {"s": statistics.median(cold_s for cold_s, _ in runs), "warm_s": statistics.median(w for _, w in runs)}


def _start(settings: Mapping[str, Any], prompt_len: int, folder: str) -> float:
    """Return the seconds until a new process has its first token."""
    caches = {name: str(Path(folder) / name.lower()) for name in _CACHES}
    environment = os.environ | caches | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "teachllm.bench.cold", json.dumps(dict(settings)), str(prompt_len)]
    errors = Path(folder) / "stderr"
    with errors.open("w") as stderr:
        start = time.perf_counter()
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
            assert process.stdout is not None
            patience = threading.Timer(_LONGEST_S, process.kill)
            patience.start()
            try:
                line = process.stdout.readline()
                seconds = time.perf_counter() - start
                process.wait()
            finally:
                patience.cancel()
                process.kill()
    if process.returncode or not line.startswith("first token"):
        last = (errors.read_text(errors="replace").strip() or "no word").splitlines()[-1]
        raise RuntimeError(f"the process of a cold start ended with {process.returncode}: {last}")
    return seconds


def main() -> None:
    settings, prompt_len = json.loads(sys.argv[1]), int(sys.argv[2])
    from teachllm import LLM, SamplingParams

    llm = LLM(**settings)
    prompt = {"prompt_token_ids": list(range(1, prompt_len + 1))}
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    print("first token", output.outputs[0].token_ids, flush=True)
    llm.close()


if __name__ == "__main__":
    main()
