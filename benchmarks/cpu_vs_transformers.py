"""teachllm against transformers on a CPU: the same model, the same requests, the same two threads.

    python benchmarks/cpu_vs_transformers.py [--output benchmarks/results/NAME.json]

Throughput: 32 requests, prompts of 20 to 300 tokens, outputs of 20 to 200. transformers gets every way it has:
`generate` over left-padded batches of 8, 16 and 32 (a batch runs until its longest output is done; only the tokens
asked for are counted), and the continuous batching behind `generate_batch`, started and warm, with each request's own
output length. The best one counts.

Latency: one request of 64 tokens, 129 tokens out; time per output token = (t129 - t1) / 128.

Latency comes first, then throughput. The two engines take turns, `--repeats` times, for latency three times as often
since its turns are short; the figure is the median of the ratios within a turn, so a machine that slows down for a
while slows both. (Continuous batching has its turns before, alone, in a process of its own.)
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "2"  # read when torch is imported
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import torch  # noqa: E402

from teachllm import LLM, SamplingParams  # noqa: E402

Workload = list[tuple[list[int], int]]  # prompt ids, output tokens


def mixed_workload(vocab_size: int, seed: int) -> Workload:
    rng = random.Random(seed)
    sizes = [(rng.randint(20, 300), rng.randint(20, 200)) for _ in range(32)]
    return [([rng.randrange(vocab_size) for _ in range(num_prompt)], num_out) for num_prompt, num_out in sizes]


class Ours:
    def __init__(self, path: str) -> None:
        self.llm = LLM(path, dtype="float32", device="cpu", skip_tokenizer_init=True)

    def run(self, workload: Workload) -> None:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in workload]
        prompts = [{"prompt_token_ids": ids} for ids, _ in workload]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [n for _, n in workload]


class Theirs:
    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def run_padded(self, workload: Workload, batch_size: int) -> None:
        for first in range(0, len(workload), batch_size):
            batch = workload[first : first + batch_size]
            longest = max(len(ids) for ids, _ in batch)
            ids = torch.tensor([[0] * (longest - len(ids)) + ids for ids, _ in batch])
            mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in batch])
            most = max(n for _, n in batch)
            with torch.inference_mode():
                out = self.model.generate(
                    ids, attention_mask=mask, max_new_tokens=most, do_sample=False, eos_token_id=None, pad_token_id=0
                )
            assert out.shape[1] == longest + most


def continuous_batching_seconds(path: str, repeats: int) -> list[float]:
    """transformers' continuous batching, every request with an output length of its own. Run it in its own process:
    its scheduler is a thread, and its cache takes most of the memory."""
    from transformers import GenerationConfig

    torch.set_num_threads(2)
    model = Theirs(path).model
    workload = mixed_workload(model.config.vocab_size, seed=0)
    longest = max(len(ids) + n for ids, n in workload)
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_length=longest)
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()

    def run() -> None:
        wanted = {manager.add_request(ids, max_new_tokens=n): n for ids, n in workload}
        while wanted:
            result = manager.get_result(timeout=60)
            if result is None:
                raise RuntimeError("no result for a minute")
            if result.is_finished():
                assert len(result.generated_tokens) == wanted.pop(result.request_id)

    run()  # warm-up
    times = [seconds(run) for _ in range(repeats)]
    manager.stop(block=True)
    return times


def seconds(run: Callable[[], None]) -> float:
    """Garbage collection waits meanwhile, as in timeit: what one engine leaves behind is not the other's cost."""
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    try:
        run()
        return time.perf_counter() - start
    finally:
        gc.enable()


def time_per_output_token(run: Callable[[Workload], None], prompt: list[int]) -> float:
    return (seconds(lambda: run([(prompt, 129)])) - seconds(lambda: run([(prompt, 1)]))) / 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", default="", help="recorded with the result; default: git rev-parse HEAD")
    args = parser.parse_args()

    torch.set_num_threads(2)
    path = str(ROOT / "teachllm" / "assets" / "teachlm")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        continuous = pool.apply(continuous_batching_seconds, (path, args.repeats))
    ours, theirs = Ours(path), Theirs(path)
    vocab_size = ours.llm.engine.model_config.vocab_size
    workload = mixed_workload(vocab_size, seed=0)
    num_output = sum(n for _, n in workload)

    ways: dict[str, Callable[[], None]] = {
        f"generate, batches of {size}": lambda size=size: theirs.run_padded(workload, size)  # type: ignore[misc]
        for size in (8, 16, 32)
    }
    prompt = workload[0][0][:64]
    latencies: dict[str, list[float]] = {"teachllm": [], "transformers": []}
    for turn in range(-1, 3 * args.repeats):
        mine = time_per_output_token(ours.run, [(i + turn) % vocab_size for i in prompt])
        other = time_per_output_token(lambda w: theirs.run_padded(w, 1), prompt)
        if turn >= 0:  # the first is the warm-up
            latencies["teachllm"].append(mine)
            latencies["transformers"].append(other)
    for way in ways.values():
        way()  # warm-up
    ours.run(mixed_workload(vocab_size, seed=1))

    times: dict[str, list[float]] = {"teachllm": [], "continuous batching": continuous, **{name: [] for name in ways}}
    for turn in range(args.repeats):
        fresh = mixed_workload(vocab_size, seed=0)
        for ids, _ in fresh:  # the same lengths, other ids: nothing may come from the prefix cache
            ids[:] = [(i + turn + 1) % vocab_size for i in ids]
        times["teachllm"].append(seconds(lambda fresh=fresh: ours.run(fresh)))  # type: ignore[misc]
        for name, way in ways.items():
            times[name].append(seconds(way))

    print(f"{num_output} output tokens, {args.repeats} turns, {torch.get_num_threads()} threads")
    for name, values in times.items():
        print(f"  {name:<26}{num_output / statistics.median(values):9.0f} output tokens/s")
    best = [min(times[name][turn] for name in times if name != "teachllm") for turn in range(args.repeats)]
    throughput = statistics.median(b / o for b, o in zip(best, times["teachllm"], strict=True))
    pairs = zip(latencies["teachllm"], latencies["transformers"], strict=True)
    latency = statistics.median(o / t for o, t in pairs)
    print(f"throughput: {throughput:.2f}x transformers' best way")
    for name, values in latencies.items():
        print(f"  {name:<26}{statistics.median(values) * 1000:9.2f} ms per output token, one request")
    print(f"time per output token: {latency:.2f}x generate's")
    if args.output:
        commit = (
            args.commit
            or subprocess.run(
                ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout.strip()
        )
        import transformers

        result = {
            "benchmark": "cpu_vs_transformers",
            "commit": commit,
            "command": " ".join(["python", *sys.argv]),
            "device": f"{platform.machine()}, 2 threads",
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "output_tokens": num_output,
            "seconds": times,
            "time_per_output_token_s": latencies,
            "throughput_ratio": round(throughput, 3),
            "latency_ratio": round(latency, 3),
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
