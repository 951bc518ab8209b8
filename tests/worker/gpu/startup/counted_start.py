"""A program that starts an engine on a GPU and serves, and prints, as JSON, what was compiled and recorded when.

TRITON_CACHE_DIR=FOLDER python tests/worker/gpu/startup/counted_start.py FOLDER SETTINGS

Programs that compile are replaced by scripts which note that they ran: the assembler and the C compiler.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from triton import knobs

from teachllm import LLM, SamplingParams
from teachllm.bench.engine_events import EngineEvent, observing

PROMPTS = [[3 + i * 7 % 50 for i in range(count)] for count in (5, 20, 600, 33, 1, 90)]
PARAMS = [SamplingParams(temperature=t, top_p=p, max_tokens=9, seed=1) for t, p in ((0, 1), (1, 1), (1, 0.9))]


def noted(program: str, folder: Path) -> str:
    """Return a script that notes its arguments and runs the program."""
    script = folder / Path(program).name
    script.write_text(f'#!/bin/sh\necho "$@" >> {folder / "ran"}\nexec {program} "$@"\n')
    script.chmod(0o755)
    return str(script)


def num_compilers(folder: Path) -> int:
    """Return how often a noted program has compiled; it is also asked for its version."""
    ran = folder / "ran"
    return sum("--version" not in line for line in ran.read_text().splitlines()) if ran.exists() else 0


def names(events: Sequence[EngineEvent], kind: str) -> list[str]:
    """Return the names of the events of a kind."""
    return [event.name for event in events if event.kind == kind]


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir()
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is not None:
        os.environ["CC"] = noted(compiler, folder)
    os.environ["TRITON_PTXAS_PATH"] = noted(knobs.nvidia.ptxas.path, folder)
    stages: dict[str, int] = {}
    with observing(time.perf_counter) as events:
        llm = LLM(**json.loads(sys.argv[2]), progress=lambda stage, done, total: stages.update({stage: done}))
        found = {"stages": stages, "in the engine": names(events, "compiled"), "by programs": num_compilers(folder)}
        events.clear()
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        for count in (1, 2, 6):
            for params in PARAMS:
                for _ in range(2):  # a graph that is not known is recorded the second time
                    llm.generate(prompts[:count], params, use_tqdm=False)
        found["when ready"] = {kind: names(events, kind) for kind in ("compiled", "recorded")}
    llm.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
