"""Measure what speculation costs and gains: Qwen3-8B shapes, 4 drafts, each of which a seeded coin accepts.

    python3 benchmarks/speculation.py [--commit HASH] [--output FILE]

THE TEXT MEANS NOTHING here: weights are random, so no drafter can be right. Every step drafts and verifies in full,
and then a coin decides which drafts hold, 0.8 of them. What is measured is time alone, of one request, and of 64:

    plain       a token without speculation
    verify      a step that computes 5 tokens instead of one, timed on the device, with no drafter behind it
    draft       a token of the draft model (0.6B) by itself
    expected    (1 + 0.8 + ... + 0.8^4 = 3.36 tokens per step) / (verify + 4 x draft, in plain steps)
    measured    plain / time per token with speculation

At 64 requests the length adapts; there the whole batch is timed beside the same without speculation, for several
coins: it must not lose.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]

from h200 import give_back, provenance, script_parser, write_shape  # noqa: E402

from teachllm import LLM  # noqa: E402
from teachllm.bench.batch import Batch, Timing, random_ids, run_batch  # noqa: E402
from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput  # noqa: E402

NUM_DRAFTS = 4
RATE = 0.8
EXPECTED_TOKENS = sum(RATE**level for level in range(NUM_DRAFTS + 1))


class Constant:
    """Drafts something, and always as many as it is asked for."""

    def propose(self, token_ids: Any, num_tokens: int) -> list[int]:
        return [7] * num_tokens


def make_llm(model: Path, speculation: dict[str, Any] | None = None, **settings: Any) -> LLM:
    drafter = Constant() if speculation and speculation["method"] == "custom" else None
    defaults: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096}
    return LLM(str(model), speculative_config=speculation, drafter=drafter, **(defaults | settings))


def synthetic(method: str, rate: float = RATE, **more: Any) -> dict[str, Any]:
    settings = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rate": rate}
    return {"method": method, "num_speculative_tokens": NUM_DRAFTS, **settings, **more}


def timings(llm: LLM, num_requests: int, input_len: int, output_len: int, num_runs: int) -> list[Timing]:
    """After two warm-up runs."""
    rng = random.Random()  # seeded by the system: no run repeats a prompt of another
    vocab_size = llm.engine.model_config.vocab_size
    found = []
    for _ in range(num_runs + 2):
        prompts = [random_ids(rng, input_len, vocab_size) for _ in range(num_requests)]
        found.append(run_batch(llm, Batch(prompts, [output_len] * num_requests)))
    return found[2:]


def per_token(llm: LLM, args: argparse.Namespace) -> float:
    """Seconds of one request's token after the first."""
    found = timings(llm, 1, args.input_len, args.output_len, args.runs)
    return statistics.median((each.total_s - each.first_s) / (args.output_len - 1) for each in found)


def step_seconds(llm: LLM, args: argparse.Namespace) -> tuple[float, float]:
    """Device seconds of a decode, and tokens per step; medians and means of the last run."""
    core: Any = llm.engine.core
    core.executor._runner.observe(True)
    seconds: list[float] = []
    gained: list[int] = []
    update = core.scheduler.update

    def noting(plan: SchedulerOutput, result: ModelRunnerOutput) -> Any:
        if all(scheduled.num_tokens == 1 + NUM_DRAFTS for scheduled in plan.scheduled) and result.seconds:
            seconds.append(result.seconds)
            gained.append(len(result.sampled_token_ids[0]))
        return update(plan, result)

    core.scheduler.update = noting
    timings(llm, 1, args.input_len, args.output_len, 1)
    core.scheduler.update = update
    core.executor._runner.observe(False)
    return statistics.median(seconds[len(seconds) // 2 :]), statistics.mean(gained)


def single(large: Path, small: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One request."""
    found: dict[str, Any] = {}

    def measure(name: str, model: Path, speculation: dict[str, Any] | None, **settings: Any) -> LLM:
        llm = make_llm(model, speculation, **settings)
        if speculation is None or speculation["method"] != "custom":
            found[name] = 1000 * per_token(llm, args)
        if speculation is not None:
            seconds, gained = step_seconds(llm, args)
            found[f"{name}_step"], found[f"{name}_tokens"] = 1000 * seconds, gained
        llm.close()
        print(name, {key: round(value, 4) for key, value in found.items() if key.startswith(name)}, flush=True)
        return llm

    plans: list[tuple[str, Path, dict[str, Any] | None]] = [
        ("plain", large, None),
        ("draft", small, None),
        ("verify", large, synthetic("custom", rate=0.0, adaptive=False)),
        ("ngram", large, synthetic("ngram", adaptive=False)),
        ("draft_model", large, synthetic("draft_model", model=str(small), adaptive=False)),
    ]
    for plan in plans:
        measure(*plan)
        give_back()
        gc.collect()
    verify = found["verify_step"] / found["plain"]
    draft = found["draft"] / found["plain"]
    for name, cost in (("ngram", verify), ("draft_model", verify + NUM_DRAFTS * draft)):
        expected, measured = EXPECTED_TOKENS / cost, found["plain"] / found[name]
        found[f"{name}_expected"], found[f"{name}_measured"] = expected, measured
        found[f"{name}_of_expected"] = measured / expected
        print(f"{name}: expected {expected:.3f} x, measured {measured:.3f} x, {measured / expected:.1%}", flush=True)
    return found


def count_lengths(llm: LLM) -> Counter[int]:
    """From now on, how often a request was drafted for how far."""
    lengths: Counter[int] = Counter()
    schedule = llm.engine.core.scheduler.schedule

    def noting() -> SchedulerOutput:
        plan = schedule()
        lengths.update(scheduled.num_next_drafts for scheduled in plan.scheduled)
        return plan

    llm.engine.core.scheduler.schedule = noting  # type: ignore[method-assign]
    return lengths


def many(large: Path, small: Path, args: argparse.Namespace) -> dict[str, Any]:
    """64 requests, adaptive."""
    found: dict[str, Any] = {}
    plans: list[tuple[str, dict[str, Any] | None]] = [("plain", None)]
    for rate in args.rates:
        plans.append((f"ngram_{rate}", synthetic("ngram", rate=rate)))
        plans.append((f"draft_model_{rate}", synthetic("draft_model", rate=rate, model=str(small))))
    for name, speculation in plans:
        llm = make_llm(large, speculation)
        lengths = count_lengths(llm)
        found[f"{name}_runs"] = [t.total_s for t in timings(llm, 64, args.input_len, args.output_len, args.runs)]
        found[name] = statistics.median(found[f"{name}_runs"])
        line = f"{name}: {found[name]:.3f} s"
        if name != "plain":
            found[f"{name}_against_plain"] = found[name] / found["plain"]
            found[f"{name}_lengths"] = dict(sorted(lengths.items()))
            line += f", {found[name] / found['plain']:.3f} of plain; lengths {found[f'{name}_lengths']}"
        print(line, flush=True)
        llm.close()
        del llm
        give_back()
        gc.collect()
    return found


PARTS = {"single": single, "many": many}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=384)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="*", default=[0.8, 0.4, 0.0], help="coins of the batch of 64")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--shapes", nargs=2, default=["qwen3-8b", "qwen3-0.6b"], help="the model's, and its drafter's")
    args = parser.parse_args(arguments)
    import torch

    result = provenance("speculation.py", arguments, torch.cuda.get_device_name(), args.commit)
    result["note"] = "synthetic acceptance: the text means nothing"
    result |= {name: getattr(args, name) for name in ("input_len", "output_len", "runs", "shapes")}
    result |= {"num_drafts": NUM_DRAFTS, "rate": RATE}
    with tempfile.TemporaryDirectory() as folder:
        large, small = (write_shape(name, Path(folder)) for name in args.shapes)
        for part in args.parts:
            result[part] = PARTS[part](large, small, args)
            if args.output:
                args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
