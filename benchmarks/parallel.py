"""Measure what more GPUs gain: some of h200.py's workloads by way of sharing, beside one GPU. See `h200_parts/ways.py`.

    PYTHONPATH=.:kernels:cli:webui:lessons python3 benchmarks/parallel.py [--ways one,tp2] [--output FILE]
        [--workloads single,mixed] [--quick]

    one                one GPU
    tp2, tp4           every layer is shared by 2 or 4: lower latency
    tp2-nccl           the same, with all sums left to NCCL
    pp2, pp4           2 or 4 stages
    dp2, dp4           2 or 4 replicas
    tp2pp2             2 stages, each of which 2 share

By default, those that there are GPUs for. How long exchanges take by themselves: `exchanges.py`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from h200_parts.ways import Way, run

from teachllm.config import PARALLEL_SIZES

_ALL = ("single", "batch64", "prefill16k", "mixed")
_THROUGHPUT = ("batch64", "mixed")
_TP2_GOALS = {
    "single": {"tpot_ms": 2.9},
    "batch64": {"step_ms": 4.6, "prefill_tok_s": 74_000},
    "prefill16k": {"ttft_ms": 275},
    "mixed": {"tok_s": 17_500},
}
_PP2_GOALS = {"mixed": {"tok_s": 14_000}}
_PP2_ALLOWED = {"mixed": 1.55}  # each of two plans in flight reads the weights


def tensor(size: int) -> dict[str, int]:
    return {"tensor_parallel_size": size}


def pipeline(size: int) -> dict[str, int]:
    return {"pipeline_parallel_size": size}


def data(size: int) -> dict[str, int]:
    return {"data_parallel_size": size}


WAYS = {
    "one": Way(workloads=_ALL, peer="vllm", to_reach=None),
    "tp2": Way(tensor(2), _ALL, "vllm-tp2", {"qwen3-8b": _TP2_GOALS}),
    "pp2": Way(pipeline(2), _ALL, to_reach={"qwen3-8b": _PP2_GOALS}, allowed=_PP2_ALLOWED),
    "dp2": Way(data(2), _THROUGHPUT),
    "tp2-nccl": Way(tensor(2) | {"disable_custom_all_reduce": True}, _ALL, "vllm-tp2"),
    "tp4": Way(tensor(4), _ALL),
    "pp4": Way(pipeline(4), _THROUGHPUT),
    "dp4": Way(data(4), _THROUGHPUT),
    "tp2pp2": Way(tensor(2) | pipeline(2), _ALL),
}


def num_gpus(way: Way) -> int:
    return math.prod(way.settings.get(name, 1) for name in PARALLEL_SIZES)


def main(arguments: Sequence[str] | None = None) -> int:
    default = [name for name, way in WAYS.items() if num_gpus(way) <= torch.cuda.device_count()]
    return run("parallel.py", __doc__, WAYS, arguments, default)


if __name__ == "__main__":
    sys.exit(main())
