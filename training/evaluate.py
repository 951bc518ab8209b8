"""Asks the embedded model what it has never been asked, and prints how it did.

    python training/evaluate.py                          # with teachllm itself
    python training/evaluate.py --questions test         # the test set, see README.md
    python training/evaluate.py --backend transformers   # with the library it must agree with
    python training/evaluate.py --check-equal            # do both give the same greedy tokens?

An answer counts when it holds all key terms that the knowledge base demands of that concept and facet.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dialogues.cases import Case, held_out_cases, test_cases

ASSETS = Path(__file__).resolve().parent.parent / "teachllm" / "assets" / "teachlm"
MAX_TOKENS = 200


@dataclass(frozen=True)
class ModelAnswer:
    text: str
    token_ids: list[int]
    ended: bool  # by the model itself, before MAX_TOKENS


def run_teachllm(path: Path, cases: list[Case], temperature: float = 0.0) -> list[ModelAnswer]:
    from teachllm import LLM, SamplingParams

    llm = LLM(model=str(path), dtype="float32")
    params = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=0 if temperature else None)
    outputs: list[Any] = [None] * len(cases)
    # One call for the cases without tools, one for each case with its own.
    plain = [i for i, case in enumerate(cases) if case.tools is None]
    asked = llm.chat([cases[i].messages for i in plain], params, use_tqdm=False)
    for i, output in zip(plain, asked, strict=True):
        outputs[i] = output.outputs[0]
    for i, case in enumerate(cases):
        if case.tools is not None:
            outputs[i] = llm.chat([case.messages], params, tools=case.tools, use_tqdm=False)[0].outputs[0]
    return [ModelAnswer(out.text, list(out.token_ids), out.finish_reason == "stop") for out in outputs]


def run_transformers(path: Path, cases: list[Case], temperature: float = 0.0) -> list[ModelAnswer]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
    torch.manual_seed(0)
    prompts = [
        tokenizer.apply_chat_template(case.messages, tools=case.tools, tokenize=False, add_generation_prompt=True)
        for case in cases
    ]
    order = sorted(range(len(cases)), key=lambda i: len(prompts[i]))
    size = 256 if device == "cuda" else 16
    answers: dict[int, ModelAnswer] = {}
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        batch = tokenizer([prompts[i] for i in rows], return_tensors="pt", padding=True, add_special_tokens=False)
        random_options: dict[str, Any] = {"temperature": temperature, "top_k": 0} if temperature else {}
        made = model.generate(
            **batch.to(device), max_new_tokens=MAX_TOKENS, do_sample=temperature > 0, **random_options
        )[:, batch["input_ids"].shape[1] :]
        for i, ids in zip(rows, made.tolist(), strict=True):
            stops = [at for at, token in enumerate(ids) if token in (tokenizer.eos_token_id, tokenizer.pad_token_id)]
            kept = ids[: stops[0] + 1] if stops else ids
            answers[i] = ModelAnswer(tokenizer.decode(kept, skip_special_tokens=True), kept, bool(stops))
    return [answers[i] for i in range(len(cases))]


QUESTIONS = {"held_out": held_out_cases, "test": test_cases}
BACKENDS = {"teachllm": run_teachllm, "transformers": run_transformers}


def rate(good: int, total: int) -> str:
    return f"{good}/{total} = {good / max(total, 1):.1%}"


def report(cases: list[Case], answers: list[ModelAnswer], show: int) -> None:
    """Prints one line per group of questions, the totals that matter, and the first failures."""
    right = [case.check(answer.text) for case, answer in zip(cases, answers, strict=True)]
    groups: dict[str, list[int]] = defaultdict(list)
    for i, case in enumerate(cases):
        groups[case.group].append(i)
        groups[case.group.split(":")[0] + " (all)"].append(i)
    for group in sorted(groups):
        print(f"  {group:32s} {rate(sum(right[i] for i in groups[group]), len(groups[group]))}")
    answered, declined = groups["answered (all)"], groups["declined (all)"]
    asked = answered + declined
    exact = sum(answers[i].text.strip() in cases[i].exact for i in answered)
    ended = sum(answers[i].ended for i in asked)
    all_ended = sum(answer.ended for answer in answers)
    print(
        f"answered {rate(sum(right[i] for i in answered), len(answered))}, word for word {rate(exact, len(answered))}"
    )
    print(f"declined {rate(sum(right[i] for i in declined), len(declined))}")
    print(f"ended by itself within {MAX_TOKENS} tokens {rate(ended, len(asked))} of these,", end=" ")
    print(f"{rate(all_ended, len(answers))} of everything")
    for i in [i for i in range(len(cases)) if not right[i]][:show]:
        print(f"- {cases[i].group}: {cases[i].messages[-1]['content']!r}")
        print(f"    wanted {cases[i].wanted}\n    got {answers[i].text!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ASSETS)
    parser.add_argument("--questions", choices=QUESTIONS, default="held_out")
    parser.add_argument("--backend", choices=BACKENDS, default="teachllm")
    parser.add_argument("--only", default="", help="only groups that begin with this, e.g. 'skill'")
    parser.add_argument("--show", type=int, default=20, help="failures to print")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--check-equal", action="store_true", help="compare the greedy tokens of both backends")
    args = parser.parse_args()

    cases = [case for case in QUESTIONS[args.questions]() if case.group.startswith(args.only)]
    if args.check_equal:
        ours, theirs = (run(args.model, cases) for run in BACKENDS.values())
        different = [i for i in range(len(cases)) if ours[i].token_ids != theirs[i].token_ids]
        for i in different[: args.show]:
            print(f"- {cases[i].messages[-1]['content']!r}\n    {ours[i].text!r}\n    {theirs[i].text!r}")
        print(f"same greedy tokens {rate(len(cases) - len(different), len(cases))}")
        raise SystemExit(1 if different else 0)
    print(f"{len(cases)} questions of {args.questions}, backend {args.backend}, temperature {args.temperature}")
    report(cases, BACKENDS[args.backend](args.model, cases, args.temperature), args.show)


if __name__ == "__main__":
    main()
