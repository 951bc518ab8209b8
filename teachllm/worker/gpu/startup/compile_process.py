"""Compile an engine's kernels in a process beside it, while it reads weights.

An engine on a GPU has initialized CUDA, so it cannot fork the processes that compile. This one is started for that: it
has no context, rehearses the engine's steps, and forks. It is told the settings on its standard input, and says in a
pipe how far it has come, one JSON object per line:

    {"done": 12, "of": 83}
    {"compiled": {"target": "sm_90", "num_compiled": 83, "num_cached": 0, "folder": "...", "failures": []}}
    {"refused": "why"}

A second start finds a record of what the first one has found out (`compiled_record.py`), and needs no process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple, TextIO

import torch

from teachllm.config import EngineConfig
from teachllm.models.model_config import ModelConfig
from teachllm.spec_decode.load import DrafterConfig
from teachllm.worker.gpu.memory.predicted import PredictedNeeds
from teachllm.worker.gpu.startup.compilation import Compiled, compile_known
from teachllm.worker.gpu.startup.compiled_record import CompiledRecord
from teachllm.worker.processes.child import (
    end_with_the_parent,
    how_it_ended,
    leave_signals_to_the_parent,
    only_here,
    start_child,
    tell,
    uninterrupted,
    what_to_do,
)
from teachllm_kernels.dry_run import gpu_type, leave_compiler_out
from teachllm_kernels.gpu_type import GPUType
from teachllm_kernels.kernel_cache import copy_kernels, usable_cache_folder, usual_cache_folder


class CompileProcess:
    """Start to compile all that an engine may launch, see `compile_known`.

    The process ends when it is done, when this is closed or forgotten, and with this process.

    Args:
        config: the engine's.
        gpu: the type of GPU that it runs on.

    Attributes:
        close: ends it.
    """

    def __init__(self, config: EngineConfig, gpu: GPUType) -> None:
        reads, writes = os.pipe()
        self._said: TextIO = os.fdopen(reads, encoding="utf-8")
        try:
            with uninterrupted():
                self._process = start_child(__name__, str(writes), pass_fds=(writes,))
        finally:
            os.close(writes)
        self.close = weakref.finalize(self, only_here(_end), self._process, self._said)
        with suppress(BrokenPipeError):  # it has ended already: `wait` says so
            tell(self._process, json.dumps([asdict(config), gpu]).encode())

    def wait(self, progress: Callable[[int, int], None] = lambda done, of: None) -> Compiled:
        """Wait until all is compiled.

        Args:
            progress: called with (kernels that are done, kernels in all).

        Raises:
            RuntimeError: the process has refused the settings, or ended before it was done.
        """
        for line in self._said:
            said = json.loads(line)
            if "refused" in said:
                raise RuntimeError(said["refused"])
            if "compiled" in said:
                return Compiled(**said["compiled"])
            progress(said["done"], said["of"])
        raise RuntimeError(f"the process for it ended: {how_it_ended(self._process.wait())}")


def _end(process: subprocess.Popen[bytes], said: TextIO) -> None:
    """End the process and the processes that it has forked."""
    assert process.stdin is not None
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # it leads a session
        process.wait()
    with suppress(BrokenPipeError):  # it has not read all that it was told
        process.stdin.close()
    said.close()


class Compiling(NamedTuple):
    """Say what has begun, and what an earlier start has left.

    Attributes:
        process: compiles the kernels; None: they are in the cache, or another rank's process compiles them.
        needs: predicted memory of each stage's ranks, as an earlier start has found; None: there is no record.
    """

    process: CompileProcess | None
    needs: Sequence[PredictedNeeds] | None


def start_compiling(
    config: EngineConfig, model: ModelConfig, drafter: DrafterConfig | None, device: torch.device, is_first: bool = True
) -> Compiling:
    """Start to compile an engine's kernels, unless an earlier start has left all of them in the cache.

    If nothing can be kept in Triton's cache, this process and its children get another one, and a warning says so.

    Args:
        is_first: of this machine's ranks; the others start nothing.
    """
    gpu, usual = gpu_type(device), usual_cache_folder()
    folder, why_not = usable_cache_folder()
    record = CompiledRecord(folder, config, model, drafter, gpu)
    if why_not is not None:
        found = CompiledRecord(usual, config, model, drafter, gpu).read()  # an image's, say
        os.environ["TRITON_CACHE_DIR"] = str(folder)
        if found is not None:
            copy_kernels(found.kernels, usual, folder)
            record.write(found)
        elif is_first:
            warnings.warn(
                f"kernels cannot be kept in {usual} ({why_not}) and are in {folder}: set TRITON_CACHE_DIR to a folder "
                "that lasts",
                stacklevel=2,
            )
    if (found := record.read()) is not None:
        return Compiling(None, found.needs)
    try:
        return Compiling(CompileProcess(config, gpu) if is_first else None, None)
    except OSError as error:  # no memory for a process, or no room for its pipes
        warnings.warn(f"not compiled ahead, so at its launch: every kernel ({error})", stacklevel=2)
        return Compiling(None, None)


def finish_compiling(process: CompileProcess, progress: Callable[[int, int], None]) -> None:
    """Wait until all is compiled. A kernel that was not is compiled when it is launched, and a warning says so."""
    try:
        failures = process.wait(progress).failures
    except RuntimeError as error:
        failures = [str(error)]
    finally:
        process.close()
    if failures:
        more = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
        warnings.warn(f"not compiled ahead, so at its launch: {failures[0]}{more}", stacklevel=2)


def main() -> None:
    """Compile for the settings on standard input."""
    leave_signals_to_the_parent()
    settings, gpu = json.loads(what_to_do())
    end_with_the_parent()
    leave_compiler_out()
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as pipe, warnings.catch_warnings(action="ignore"):

        def say(**what: Any) -> None:
            print(json.dumps(what), file=pipe, flush=True)

        try:  # whatever the settings are warned of, the engine says
            target, capability, num_multiprocessors, shared_memory = gpu
            found = compile_known(
                EngineConfig(**settings),
                GPUType(target, (capability[0], capability[1]), num_multiprocessors, shared_memory),
                progress=lambda done, of: say(done=done, of=of),
            )
        except Exception as error:
            say(refused=" ".join(str(error).split()) or type(error).__name__)
        else:
            say(compiled=found._asdict())


if __name__ == "__main__":
    main()
