"""Measure what quantization gains: some of h200.py's workloads, beside bfloat16, in one process.

PYTHONPATH=.:kernels:cli:webui:lessons python3 benchmarks/quantized.py [--ways fp8,fp8-kv] [--output FILE]
    [--workloads single,mixed] [--quick]

bf16      unquantized
fp8       weights and activations in 8-bit floats, quantized when they are loaded
int8      the same in integers
int4      weights alone, 4 bits, a scale for every 128
fp8-kv    bfloat16, with K and V in 8-bit floats
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from h200_parts.ways import Way, run

_FP8_GOALS = {
    "single": {"tpot_ms": 2.5},
    "batch64": {"step_ms": 5.3, "prefill_tok_s": 66_000},
    "mixed": {"tok_s": 12_500},
}
_INT4_GOALS = {"single": {"tpot_ms": 1.9}}
_FP8_KV_GOALS = {"long": {"step_ms": 7.2}, "mixed": {"tok_s": 11_500}}
WAYS = {
    "bf16": Way(workloads=("single", "batch64", "mixed", "long"), peer="vllm", to_reach=None),
    "fp8": Way({"quantization": "fp8"}, peer="vllm-fp8-weights", to_reach={"qwen3-8b": _FP8_GOALS}),
    "int8": Way({"quantization": "int8"}),
    "int4": Way({"quantization": "int4"}, to_reach={"qwen3-8b": _INT4_GOALS}),
    "fp8-kv": Way(
        {"kv_cache_dtype": "fp8"}, ("batch64", "long", "mixed"), "vllm-fp8-kv", to_reach={"qwen3-8b": _FP8_KV_GOALS}
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    return run("quantized.py", __doc__, WAYS, arguments)


if __name__ == "__main__":
    sys.exit(main())
