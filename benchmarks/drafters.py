"""Count how many tokens each of the embedded drafters yields per step, as the engine itself counts.

    python3 benchmarks/drafters.py [--device cuda] [--dtype bfloat16] [--output FILE]
    python3 benchmarks/drafters.py --device cpu --dtype float32 --limit 5

The embedded model answers questions that it was never trained on, greedily, one after the other, without drafts and
with each drafter, always as many drafts as it is allowed:

    test    the test set's questions
    copy    the development set's texts to be copied: the answer stands in the prompt, and look-up drafts further

The mean length is 1 + accepted drafts / verifications, over the steps that verified any. It differs a little from what
`training/evaluate_drafters.py` simulates: that counts all steps after the first token, also a last one without drafts.

All answers must be those without drafts, or the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks"), str(ROOT / "training")]

from dialogues.cases import held_out_cases, test_cases  # noqa: E402
from h200 import give_back, provenance, script_parser  # noqa: E402

from teachllm import LLM, SamplingParams  # noqa: E402
from teachllm.engine.observability.ceilings import device_name  # noqa: E402
from teachllm.engine.observability.speculation_stats import Speculation  # noqa: E402

METHODS = {"draft_model": "teachlm-draft", "eagle": "teachlm-eagle", "medusa": "teachlm-medusa", "ngram": None}
NUM_COPIED = 6  # drafts of look-up in the copy task


def conversations(task: str, limit: int | None) -> list[Any]:
    """Questions without tools; of the copy task those alone, spread over all if they are limited."""
    cases = test_cases() if task == "test" else [case for case in held_out_cases() if case.group == "skill: copy"]
    plain = [case.messages for case in cases if case.tools is None]
    return plain[:: max(len(plain) // limit, 1)][:limit] if limit else plain


def answer(
    questions: Sequence[Any], speculation: dict[str, Any] | None, args: argparse.Namespace
) -> tuple[list[list[int]], Speculation | None]:
    """Token ids of every answer, and what was counted."""
    settings: dict[str, Any] = {"device": args.device, "dtype": args.dtype, "max_num_seqs": 1, "max_model_len": 4096}
    llm = LLM("teachlm", speculative_config=speculation, kv_cache_memory_bytes=1 << 30, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    outputs = llm.chat(questions, params, use_tqdm=False)
    found = llm.speculation()
    llm.close()
    return [list(output.outputs[0].token_ids) for output in outputs], found


def measure(task: str, method: str, questions: Sequence[Any], plain: Any, args: argparse.Namespace) -> dict[str, Any]:
    """One drafter's figures."""
    num_drafts = max(args.drafts, NUM_COPIED) if (task, method) == ("copy", "ngram") else args.drafts
    given = {"method": method, "model": METHODS[method], "num_speculative_tokens": num_drafts, "adaptive": False}
    answers, found = answer(questions, given, args)
    assert found is not None
    figures = {
        "num_speculative_tokens": num_drafts,
        "mean_length": found.mean_length,
        "num_accepted_tokens": found.stats.num_accepted_tokens,
        "num_verifications": found.stats.num_drafts,
        "num_draft_tokens": found.stats.num_draft_tokens,
        "num_answers": len(answers),
        "num_same_answers": sum(one == other for one, other in zip(answers, plain, strict=True)),
    }
    line = f"{task:5s} {method:12s} {num_drafts} drafts: mean length {found.mean_length:.3f}"
    print(f"{line}, same answers {figures['num_same_answers']} of {figures['num_answers']}", flush=True)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--drafts", type=int, default=4, help=f"look-up has {NUM_COPIED} or more in the copy task")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tasks", nargs="*", choices=["test", "copy"], default=["test", "copy"])
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--limit", type=int, help="no more than so many questions of each task")
    args = parser.parse_args(arguments)

    result = provenance("drafters.py", arguments, device_name(args.device), args.commit) | {"variant": args.dtype}
    result |= {"benchmark": "drafters", "max_tokens": args.max_tokens}
    for task in args.tasks:
        questions = conversations(task, args.limit)
        plain, _ = answer(questions, None, args)
        result[task] = {}
        for method in args.methods:
            if args.device == "cuda":
                give_back()
            result[task][method] = measure(task, method, questions, plain, args)
            if args.output:
                args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    every = [figures for task in args.tasks for figures in result[task].values()]
    if any(figures["num_same_answers"] < figures["num_answers"] for figures in every):
        raise SystemExit("error: not all answers are those without drafts")


if __name__ == "__main__":
    main()
