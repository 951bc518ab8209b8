"""A rank that is killed in the middle of a program's batch: the program says so, and nothing stays behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from typing import Any, NamedTuple

from tests.processes import is_gone, named_memory, num_rings
from tests.programs import start_program
from tests.waiting import HANG_SECONDS
from tests.worker.engines import tiny

_BATCH = """
from teachllm import LLM, SamplingParams
llm = LLM(**{settings!r})
print(*[process.pid for process in llm.engine.core.executor._ranks.processes], flush=True)
step, num_steps = llm.engine.step, 0
def counted():
    global num_steps
    num_steps += 1
    print(num_steps, flush=True)
    return step()
llm.engine.step = counted
prompts = [{"prompt_token_ids": list(range(1, 10 + i))} for i in range(6)]
llm.generate(prompts, SamplingParams(max_tokens=80, ignore_eos=True), use_tqdm=False)
"""


class Seconds(NamedTuple):
    """From a kill on: until the last request had ended with an error, and until no process was left."""

    of_requests: float
    of_all: float


def program(code: str, settings: dict[str, Any], **environment: str) -> subprocess.Popen[str]:
    """Start Python in a process of its own; `{settings!r}` in the code stands for the settings."""
    code = code.replace("{settings!r}", repr(settings))
    return start_program("-c", code, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def kill_a_rank(rank: int, num_steps: int, delay: float = 0.0, **settings: Any) -> Seconds:
    """Kill a rank of a batch of six when so many steps have begun.

    Args:
        delay: seconds, so that it may happen anywhere in a step.

    Raises:
        AssertionError: it hangs, does not say why it ends, or not that alone, ends with exit code 0, or leaves
            something: a process, memory with a name, a file.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        program(_BATCH, tiny(**settings), TMPDIR=folder) as child,
    ):
        assert child.stdout is not None and child.stderr is not None
        try:
            pids = [*map(int, child.stdout.readline().split())]
            assert len(pids) == 2 and num_rings(child.pid, *pids) == 3, f"{pids} do not share memory with the program"
            while child.stdout.readline() != f"{num_steps}\n":
                assert child.poll() is None, "the program has ended before anybody was killed"
            memory = named_memory([child.pid, *pids])
            assert not select.select([child.stderr], [], [], 0)[0], "there was an error before anybody was killed"
            time.sleep(delay)
            os.kill(pids[rank], signal.SIGKILL)
            killed = time.monotonic()
            assert select.select([child.stderr], [], [], HANG_SECONDS)[0], f"no word after the kill of rank {rank}"
            told_after = time.monotonic() - killed
            _, said = child.communicate(timeout=HANG_SECONDS)  # ranks have its error output open, too
            ended_after = time.monotonic() - killed
        finally:
            child.kill()
        why = f"EngineDeadError: the process of rank {rank} has ended with SIGKILL\n"
        assert child.returncode == 1 and said.endswith(why), (child.returncode, said)
        assert "a step failed" not in said, f"the other rank says that it has failed: {said}"
        assert all(map(is_gone, pids)), f"one of {pids} stays behind"
        assert not os.listdir(folder), f"temporary files stay: {os.listdir(folder)}"
        assert not any(path.exists() for path in memory), f"of {memory} something stays"
    return Seconds(told_after, ended_after)
