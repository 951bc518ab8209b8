"""The memory ledger: what `teachllm info` predicts before a weight is read, beside what one GPU then uses.

    python3 benchmarks/ledger.py [--models qwen3-0.6b,qwen3-8b] [--output FILE]

Measured are: weights and KV cache as the allocator counts them; activations as the highest mark above them while real
steps of the largest size run (256 prompts of 65 tokens, 16 of 1040, one of 16,640); what recordings hold, of those that
these runs and a few decodes have made (the prediction keeps room for all sizes); and what lies outside of PyTorch.

Then as many equal requests as were predicted to run undisturbed are run, and one more, in a KV cache that is made
small (`num_gpu_blocks_override`), so that it takes seconds: none may be preempted or wait for blocks, then some must.

Random weights of the real shapes. Exit code 1 where weights, activations or KV cache are more than 2% from their
prediction, or the number of requests is wrong.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from h200 import SHAPES, add_models, engine_settings, give_back, provenance, script_parser, write_shape  # noqa: E402

from teachllm import LLM, EngineConfig  # noqa: E402
from teachllm.bench.batch import Batch, random_ids, run_batch  # noqa: E402
from teachllm.core.memory import MemoryPlan, format_bytes  # noqa: E402
from teachllm.engine.capacity import num_undisturbed  # noqa: E402
from teachllm.models.model_config import load_model_config  # noqa: E402
from teachllm.worker.memory_plan import plan_memory  # noqa: E402

LARGEST_STEPS = ((256, 65), (16, 1040), (1, 16640))  # (requests, prompt tokens): 16,640 tokens in one step
SMALL_POOL, INPUT_LEN, OUTPUT_LEN = 512, 256, 128
WITHIN = {"weights": 0.02, "activations": 0.02, "KV cache": 0.02}


def predicted_rows(plan: MemoryPlan) -> dict[str, int]:
    return {
        "weights": plan.weights,
        "activations": plan.activations,
        "step buffers": plan.buffers,
        "CUDA graphs": plan.graphs,
        "libraries": plan.libraries,
        "KV cache": plan.num_blocks * plan.bytes_per_block,
    }


def predict(settings: dict[str, Any]) -> tuple[EngineConfig, MemoryPlan]:
    """Return what `teachllm info` says; reads no weights."""
    config = EngineConfig(**settings)
    model = load_model_config(config, "cuda")
    config = config.resolve(model.max_model_len)
    return config, plan_memory(config, model, torch.device("cuda"))


def measure(settings: dict[str, Any], vocab_size: int, taken_before: int) -> dict[str, int]:
    """Bytes in use by the rows of `predicted_rows`, with an engine that has run its largest steps."""
    allocated_before = torch.cuda.memory_allocated()
    llm = LLM(**settings)
    runner = llm.engine.core.executor._runner  # type: ignore[attr-defined]
    weights = sum(t.nbytes for t in (*runner.model.parameters(), *runner.model.buffers()))
    kv = sum(tensor.nbytes for pair in runner._kv_caches for tensor in pair)
    workspaces_and_buffers = torch.cuda.memory_allocated() - allocated_before - weights - kv
    plans = [getattr(plan, name) for plan in runner._attention.plans.values() for name in plan.__slots__]
    kept = [t for t in (*plans, *vars(runner._batch).values()) if isinstance(t, torch.Tensor) and not t._is_view()]
    buffers = sum(t.nbytes for t in kept if t.is_cuda)
    rng = random.Random(0)
    peaks: list[int] = []
    for num_requests, prompt_len in LARGEST_STEPS:
        for _ in range(2):  # the second time nothing is loaded any more
            prompts = [random_ids(rng, prompt_len, vocab_size) for _ in range(num_requests)]
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run_batch(llm, Batch(prompts, [1] * num_requests))
            peak = torch.cuda.max_memory_allocated() - before
        print(f"  {num_requests} x {prompt_len}: activations {format_bytes(peak)}", file=sys.stderr)
        peaks.append(peak)
    for num_requests in (1, 8, 64, 256):
        prompts = [random_ids(rng, 100, vocab_size) for _ in range(num_requests)]
        run_batch(llm, Batch(prompts, [8] * num_requests))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    graphs = sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0))
    outside = total - free - taken_before - torch.cuda.memory_reserved()
    llm.close()
    return {
        "weights": weights,
        "activations": max(peaks),
        "step buffers": buffers,
        "CUDA graphs": graphs,
        "libraries": max(outside, 0) + workspaces_and_buffers - buffers,
        "KV cache": kv,
    }


def disturbances(settings: dict[str, Any], vocab_size: int, num_requests: int) -> tuple[int, bool]:
    """(preemptions, whether one waited for blocks) while so many equal requests run."""
    llm = LLM(**settings)
    scheduler = llm.engine.core.scheduler
    has_waited = False
    schedule = scheduler.schedule

    def watched() -> Any:
        nonlocal has_waited
        plan = schedule()
        has_waited |= any("blocks" in str(request.wait) for request in scheduler.waiting)
        return plan

    scheduler.schedule = watched  # type: ignore[method-assign]
    rng = random.Random(num_requests)
    prompts = [random_ids(rng, INPUT_LEN, vocab_size) for _ in range(num_requests)]
    run_batch(llm, Batch(prompts, [OUTPUT_LEN] * num_requests))
    llm.close()
    return scheduler.num_preemptions, has_waited


def check_model(name: str, folder: Path) -> dict[str, Any]:
    """Predicts, measures, prints and returns one model's ledger."""
    settings = engine_settings(write_shape(name, folder), "cuda")
    vocab_size = SHAPES[name]["vocab_size"]
    free, total = torch.cuda.mem_get_info()
    _, plan = predict(settings)
    predicted, measured = predicted_rows(plan), measure(settings, vocab_size, total - free)
    give_back()
    print(f"\n{name} on {torch.cuda.get_device_name()}: {format_bytes(total - free)} in use before")
    print(f"{'':<14}{'predicted':>14}{'measured':>14}{'off by':>9}")
    rows: dict[str, Any] = {}
    for what, expected in predicted.items():
        off = measured[what] / expected - 1
        is_bound = what in WITHIN
        rows[what] = {"predicted": expected, "measured": measured[what], "off": off}
        mark = "" if not is_bound else "  ok" if abs(off) <= WITHIN[what] else "  MORE THAN 2%"
        print(f"{what:<14}{format_bytes(expected):>14}{format_bytes(measured[what]):>14}{off:>9.2%}{mark}")
    rows["ok"] = all(abs(rows[what]["off"]) <= within for what, within in WITHIN.items())

    small = settings | {"num_gpu_blocks_override": SMALL_POOL}
    config, plan = predict(small)
    count = num_undisturbed(config, plan.num_blocks, INPUT_LEN, OUTPUT_LEN)
    found = {}
    for num_requests in (count, count + 1):
        found[num_requests] = disturbances(small, vocab_size, num_requests)
        give_back()
        preempted, waited = found[num_requests]
        print(f"{num_requests} requests of {INPUT_LEN} + {OUTPUT_LEN} tokens in {SMALL_POOL} blocks: {preempted} "
              f"preemptions{', one waited for blocks' if waited else ''}")  # fmt: skip
    is_exact = found[count] == (0, False) and found[count + 1] != (0, False)
    requests = {"predicted": count, "preemptions": {str(n): each[0] for n, each in found.items()}, "ok": is_exact}
    return {"memory": rows, "requests": requests}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    add_models(parser)
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("the ledger is a GPU's: torch sees none")
    torch.zeros(1, device="cuda")  # the context, which is no engine's
    result = provenance("ledger.py", arguments, torch.cuda.get_device_name(), args.commit) | {"models": {}}
    with tempfile.TemporaryDirectory(prefix="teachllm-shapes-") as folder:
        for name in args.models:
            result["models"][name] = check_model(name, Path(folder))
            if args.output is not None:
                args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return int(not all(part["ok"] for found in result["models"].values() for part in found.values()))


if __name__ == "__main__":
    sys.exit(main())
