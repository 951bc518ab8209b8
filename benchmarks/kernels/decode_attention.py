"""Compare the time of decode attention, merging included, with its read floor: bytes of K and V over bandwidth.

The ceiling is the best that is known of such a card, or what is measured here, if that is higher.

    python3 benchmarks/kernels/decode_attention.py [--output FILE]

Each figure is the median of replays of a CUDA graph that holds the kernel many times over, each time with another
layer's cache, as a model does: what one has left in the second-level cache, the next must not find (all layers' caches
of 300 tokens fit there together, also in a model). Blocks of 16 tokens lie in random order; lengths are read from the
device, as in a step.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "kernels")]

import torch  # noqa: E402
from h200 import provenance, script_parser  # noqa: E402

from teachllm.bench.ceilings import measure_ceilings, median_seconds  # noqa: E402
from teachllm.engine.observability.ceilings import at_best  # noqa: E402
from teachllm.roofline import Ceilings  # noqa: E402
from teachllm_kernels.attention.decode_plan import DecodeKernel, DecodePlan, plan_decode  # noqa: E402
from teachllm_kernels.attention.paged_decode import cost, fused_paged_decode, paged_decode_triton  # noqa: E402
from teachllm_kernels.selection import Operands, card_of, case_of  # noqa: E402

NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 8, 128, 16
CALLS, LAYERS, REPLAYS = 12, 6, 15
_ragged = random.Random(1)
SHAPES = {
    "8 x 16,448": [16448] * 8,
    "256 ragged, 100 to 2,000": [_ragged.randint(100, 2000) for _ in range(256)],
    "64 x 1,088": [1088] * 64,
    "1 x 16,448": [16448],
    "1 x 300": [300],
}


def paged_cache(lens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Block tables, [num_seqs, max_blocks], and K and V, [2, num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE]."""
    counts = [-(-length // BLOCK_SIZE) for length in lens]
    blocks = torch.randperm(sum(counts), dtype=torch.int32).split(counts)
    tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True).cuda()
    return tables, torch.randn(2, sum(counts), BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, device="cuda").bfloat16()


def heads_of(device: torch.device, dtype: torch.dtype, num_heads: int) -> Operands:
    """Return what the choice of attention's kernels depends on."""
    group = num_heads // NUM_KV_HEADS
    return Operands("heads", card_of(device), dtype, head_size=HEAD_SIZE, group=group, block_size=BLOCK_SIZE)


def calls_of(lens: list[int], num_heads: int) -> dict[str, Callable[[], Any]]:
    """Attention over one layer's cache after the other's, alone and with what comes before it."""
    num_seqs, device = len(lens), torch.device("cuda")
    tables, cache = paged_cache(lens)
    layers = cycle([cache, *(cache.clone() for _ in range(LAYERS - 1))])
    qkv = torch.randn(num_seqs, num_heads + 2 * NUM_KV_HEADS, HEAD_SIZE, device=device).bfloat16()
    norm = torch.ones(num_heads + NUM_KV_HEADS, HEAD_SIZE, device=device).bfloat16()
    angles = torch.rand(2, num_seqs, 1, HEAD_SIZE, device=device).bfloat16()
    rows = torch.arange(num_seqs, dtype=torch.int32, device=device)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    kernel = case_of("decode", heads_of(device, cache.dtype, num_heads), num_seqs).kernel
    sizes = (num_seqs, num_heads, NUM_KV_HEADS, HEAD_SIZE, device)
    plan, plan_fused = (DecodePlan.allocate(*sizes) for _ in range(2))
    plan_decode(plan, seq_lens, starts, rows, NUM_KV_HEADS)
    fused: DecodeKernel = "hopper_decode" if kernel == "hopper_decode" else "fused_paged_decode"
    plan_decode(plan_fused, seq_lens, starts, rows, NUM_KV_HEADS, kernel=fused)
    scale = HEAD_SIZE**-0.5
    return {
        "attention": lambda: paged_decode_triton(qkv[:, :num_heads], *next(layers), tables, starts, plan, scale),
        "fused": lambda: fused_paged_decode(qkv, *angles, norm, 1e-6, *next(layers), tables, plan_fused, scale),
    }


def recorded(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """`CALLS` of them, one after the other."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def seconds(call: Callable[[], Any]) -> float:
    """Return the seconds of one call, among many."""
    return median_seconds(recorded(call).replay, torch.device("cuda"), REPLAYS) / CALLS


def measure(ceilings: Ceilings) -> list[dict[str, Any]]:
    """One entry for each shape and kernel; prints them as they come."""
    print(f"{ceilings.device}: reads {ceilings.read_bandwidth / 1e12:.2f} TB/s")
    found: list[dict[str, Any]] = []
    for num_heads in (16, 32):
        for name, lens in SHAPES.items():
            num_bytes, _ = cost([1] * len(lens), lens, num_heads, NUM_KV_HEADS, HEAD_SIZE)
            floor_s = num_bytes / ceilings.read_bandwidth
            for kernel, call in calls_of(lens, num_heads).items():
                took = seconds(call)
                result = {"shape": name, "num_heads": num_heads, "kernel": kernel}
                found.append(result | {"us": took * 1e6, "of_ceiling": floor_s / took})
                print(f"{num_heads:3} heads  {name:<26} {kernel:<10} {took * 1e6:8.1f} us  {floor_s / took:6.1%}")
            torch.cuda.empty_cache()
    return found


def run_script(name: str, description: str | None, measure: Callable[[Ceilings], list[dict[str, Any]]]) -> None:
    """A script that measures kernels on this machine's GPU and, told `--output`, records what it found."""
    parser = script_parser(description)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and torch sees none")
    ceilings = at_best(measure_ceilings("cuda", "bfloat16"))
    found = measure(ceilings)
    if args.output:
        begins = provenance(name, None, ceilings.device, args.commit)
        record = begins | {"ceilings": asdict(ceilings), "results": found}
        args.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    run_script("kernels/decode_attention.py", __doc__, measure)
