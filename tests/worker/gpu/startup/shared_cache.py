"""A program that compiles for an engine in several processes which share a cache, and prints, as JSON, what each did.

TRITON_CACHE_DIR=FOLDER python tests/worker/gpu/startup/shared_cache.py NUM_PROCESSES

One is killed first, in the middle of its work. Run without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import sys

from teachllm.config import EngineConfig
from teachllm.models.model_config import load_model_config
from teachllm.worker.gpu.startup.compile_process import CompileProcess
from teachllm.worker.gpu.startup.compiled_record import CompiledRecord
from teachllm_kernels.gpu_type import GPU_TYPES
from teachllm_kernels.kernel_cache import cache_folder

CONFIG, GPU = EngineConfig(device="cuda", max_num_seqs=4, max_num_batched_tokens=64), GPU_TYPES["sm_80"]


class _EnoughError(Exception):
    """So much is compiled that the process can be killed."""


def is_complete() -> bool:
    """Return whether a start would find all kernels."""
    model = load_model_config(CONFIG, "cuda")
    return CompiledRecord(cache_folder(), CONFIG.resolve(model.max_model_len), model, None, GPU).read() is not None


def stop_at(done: int, of: int) -> None:
    if done == of // 2:
        raise _EnoughError


def main() -> None:
    killed = CompileProcess(CONFIG, GPU)
    try:
        killed.wait(stop_at)
    except _EnoughError:
        killed.close()
    found = {"after one was killed": is_complete()}
    processes = [CompileProcess(CONFIG, GPU) for _ in range(int(sys.argv[1]))]
    done = [process.wait() for process in processes]
    found["compiled"] = [each.num_compiled for each in done]
    found["found"] = [each.num_cached for each in done]
    found["failures"] = [failure for each in done for failure in each.failures]
    found["in the end"] = is_complete()
    for process in processes:
        process.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
