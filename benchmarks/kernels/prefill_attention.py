"""Measure how fast prompts attend: this project's kernels, and cuDNN's where the prompt lies in one piece.

    python3 benchmarks/kernels/prefill_attention.py [--output FILE]

Each figure is that of a CUDA graph that holds the kernel many times over: from a rest, and, after 0.2 seconds in which
nothing else runs, the mean of another 0.2, when power bounds what a card can do. The fraction is of the ceiling for
products of matrices. A plan is made once per step and serves all layers; it is timed apart. Blocks of 16 tokens lie in
random order. K and V are the same each time, in the second-level cache if they fit there: so prompts find their own,
which were just written; what earlier steps left a model's layer would not.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "kernels")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from decode_attention import (  # noqa: E402
    CALLS,
    HEAD_SIZE,
    NUM_KV_HEADS,
    heads_of,
    paged_cache,
    recorded,
    run_script,
)
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from teachllm.roofline import Ceilings  # noqa: E402
from teachllm_kernels.attention.hopper_prefill import hopper_prefill  # noqa: E402
from teachllm_kernels.attention.paged_prefill import cost, paged_prefill_triton  # noqa: E402
from teachllm_kernels.attention.prefill_plan import plan_prefill  # noqa: E402
from teachllm_kernels.selection import case_of  # noqa: E402

_ragged = random.Random(5)
# Tokens that each sequence computes, and what it has in the cache before them.
SHAPES: dict[str, tuple[list[int], list[int]]] = {
    "1 x 128": ([128], [0]),
    "4 x 128": ([128] * 4, [0] * 4),
    "8 x 512": ([512] * 8, [0] * 8),
    "29 ragged, 100 to 1,024": ([_ragged.randint(100, 1024) for _ in range(29)], [0] * 29),
    "16 x 1,024": ([1024] * 16, [0] * 16),
    "4 x 4,096": ([4096] * 4, [0] * 4),
    "1 x 16,384": ([16384], [0]),
    "2,048 after 8,192": ([2048], [8192]),
    "8 x 64 after 4,096": ([64] * 8, [4096] * 8),
    "2 x 4,096, 8 x 100 after 20,000": ([4096] * 2 + [100] * 8, [0] * 2 + [20000] * 8),
    "16 x 200 after 500 to 16,000": ([200] * 16, [500 + 1033 * i for i in range(16)]),
}


def calls_of(lens: list[int], contexts: list[int], num_heads: int) -> dict[str, Callable[[], Any]]:
    """Return what computes such a batch, and what plans it."""
    device, num_tokens, group = torch.device("cuda"), sum(lens), num_heads // NUM_KV_HEADS
    kv_lens = [query + context for query, context in zip(lens, contexts, strict=True)]
    tables, (k_cache, v_cache) = paged_cache(kv_lens)
    qkv = torch.randn(num_tokens, num_heads + 2 * NUM_KV_HEADS, HEAD_SIZE, device=device).bfloat16()
    q, k, v = qkv.split([num_heads, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    starts = torch.tensor([0, *lens], device=device).cumsum(0).int()
    seq_lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    rows = torch.arange(len(lens), dtype=torch.int32, device=device)
    scale = HEAD_SIZE**-0.5
    where = (q, k_cache, v_cache, tables)
    calls = {"paged_prefill": lambda: paged_prefill_triton(*where, rows, starts, seq_lens, scale, out=out)}
    if "hopper_prefill" in case_of("prefill", heads_of(device, q.dtype, num_heads), num_tokens).kernel:
        calls["plan"] = partial(plan_prefill, starts, seq_lens, rows, num_tokens, group)
        for tile, longest in ((64, 0), (128, 2**20)):
            plan = plan_prefill(starts, seq_lens, rows, num_tokens, group, longest)
            calls[f"hopper_prefill, {tile} keys"] = partial(hopper_prefill, *where, plan, scale, out=out)
    if not any(contexts) and len(set(lens)) == 1:
        batch = [x.unflatten(0, (len(lens), lens[0])).transpose(1, 2) for x in (q, k, v)]
        calls["cuDNN"] = partial(F.scaled_dot_product_attention, *batch, is_causal=True, scale=scale, enable_gqa=True)
    return calls


def seconds(call: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds of one call: from a rest, and in the 0.2 seconds after the first 0.2."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        graph = recorded(call)

    def timed(replays: int) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(replays):
            graph.replay()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3 / replays / CALLS

    timed(1)
    time.sleep(0.05)
    from_rest = timed(2)
    enough = max(int(0.2 / from_rest / CALLS), 1)
    timed(enough)
    return from_rest, timed(enough)


def measure(ceilings: Ceilings) -> list[dict[str, Any]]:
    """One entry for each shape and kernel; prints them as they come."""
    print(f"{ceilings.device}: products {ceilings.gemm_flops / 1e12:.0f} TFLOP/s")
    found: list[dict[str, Any]] = []
    for num_heads in (16, 32):
        for name, (lens, contexts) in SHAPES.items():
            kv_lens = [query + context for query, context in zip(lens, contexts, strict=True)]
            _, flops = cost(lens, kv_lens, num_heads, NUM_KV_HEADS, HEAD_SIZE)
            for kernel, call in calls_of(lens, contexts, num_heads).items():
                rest, hot = seconds(call)
                result = {"shape": name, "num_heads": num_heads, "kernel": kernel, "rest_us": rest * 1e6}
                result |= {"us": hot * 1e6}
                text = f"{num_heads:3} heads  {name:<32} {kernel:<25} {rest * 1e6:8.1f} us, {hot * 1e6:8.1f} hot"
                if kernel != "plan":
                    result |= {"tflops": flops / hot / 1e12, "of_ceiling": flops / hot / ceilings.gemm_flops}
                    text += f" {flops / hot / 1e12:6.0f} TFLOP/s {result['of_ceiling']:6.1%}"
                found.append(result)
                print(text, flush=True)
            torch.cuda.empty_cache()
    return found


if __name__ == "__main__":
    run_script("kernels/prefill_attention.py", __doc__, measure)
