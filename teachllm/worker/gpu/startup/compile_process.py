"""Compile an engine's kernels in a process beside it, while it reads weights.

An engine on a GPU has initialized CUDA, so it cannot fork the processes that compile. This one is started for that: it
has no context, rehearses the engine's steps, and forks. It needs nothing but the settings, on its standard input, and
says on its standard output how far it has come, one JSON object per line:

    {"done": 12, "of": 83}
    {"compiled": {"target": "sm_90", "num_compiled": 83, "num_cached": 0, "folder": "...", "failures": []}}
    {"refused": "why"}
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable

from teachllm.config import EngineConfig
from teachllm.worker.gpu.startup.compilation import Compiled, compile_known
from teachllm_kernels.gpu_type import GPUType


class CompileProcess:
    """Start to compile all that an engine may launch, see `compile_known`.

    Args:
        config: the engine's.
        gpu: the type of GPU that it runs on.
    """

    def __init__(self, config: EngineConfig, gpu: GPUType) -> None:
        command = [sys.executable, "-m", "teachllm.worker.gpu.startup.compile_process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(pickle.dumps((config, gpu)))
            self._process.stdin.close()
        except BrokenPipeError:  # it has ended already: `wait` says so
            pass

    def wait(self, progress: Callable[[int, int], None] | None = None) -> Compiled:
        """Wait until all is compiled.

        Args:
            progress: called with (variants that are done, variants in all).

        Raises:
            RuntimeError: the process has refused the settings, or ended before it was done.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if "refused" in said:
                self.close()
                raise RuntimeError(f"kernels could not be compiled ahead: {said['refused']}")
            if "compiled" in said:
                self.close()
                return Compiled(**said["compiled"])
            if progress is not None:
                progress(said["done"], said["of"])
        code = self._process.wait()
        raise RuntimeError(f"kernels could not be compiled ahead: the process for it ended with exit code {code}")

    def close(self) -> None:
        """End the process, and with it those that compile."""
        assert self._process.stdout is not None
        self._process.terminate()
        self._process.wait()
        self._process.stdout.close()


def main() -> None:
    config, gpu = pickle.load(sys.stdin.buffer)

    def say(**what: object) -> None:
        print(json.dumps(what), flush=True)

    try:
        found = compile_known(config, gpu, progress=lambda done, of: say(done=done, of=of))
    except ValueError as error:
        say(refused=str(error))
    else:
        say(compiled=found._asdict())


if __name__ == "__main__":
    main()
