"""A cold start: from starting a process to its first token.

A cold start has empty caches; a warm start uses what the cold start before it compiled. Each is a new process, so the
time includes imports, the device's context, compilation and graph capture, as it does when a service restarts.

Run as a program, this module is that process: its argument is the engine's settings as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from teachllm.bench.fresh_process import run_fresh
from teachllm.bench.workloads import Figures


def cold(settings: Mapping[str, Any], num_runs: int = 5, prompt_len: int = 8) -> Figures:
    """Return medians in seconds, cold and warm; every cold start has empty caches of its own.

    Args:
        settings: fields of `EngineConfig`.

    Raises:
        RuntimeError: the process ended without a token; with the last line it printed.
    """
    arguments, runs = [json.dumps(dict(settings)), str(prompt_len)], []
    for _ in range(num_runs):
        with tempfile.TemporaryDirectory(prefix="teachllm-cold-") as folder:
            [cold_start], [warm_start] = (
                run_fresh("teachllm.bench.cold", arguments, folder, ["first token"]) for _ in range(2)
            )
            runs.append((cold_start.seconds, warm_start.seconds))
    return {"s": statistics.median(cold_s for cold_s, _ in runs), "warm_s": statistics.median(w for _, w in runs)}


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
