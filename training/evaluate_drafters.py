"""Measure how far each drafter's guesses carry: its mean length on questions that were never trained on.

    python training/evaluate_drafters.py                            # the test set
    python training/evaluate_drafters.py --questions held_out       # the development set

The mean length is the number of tokens that a step of verification yields: the accepted ones of a greedy chain of 4,
and the one that the target adds. The target answers greedily, once; every drafter then guesses from every position
of these answers at once, and the steps are counted as an engine would take them. The first token of an answer comes
from the prefill and counts for none. This is a figure for development: what an engine really does,
`benchmarks/drafters.py` has it count.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dialogues.cases import Case
from drafting import NUM_DRAFTS, TrainedDrafter, load_target, read
from evaluate import QUESTIONS, run_transformers
from train_drafters import ASSETS, DRAFTERS


@dataclass(frozen=True)
class Spoken:
    """A question and the target's greedy answer."""

    kind: str
    ids: list[int]
    num_prompt_tokens: int

    @property
    def num_answer_tokens(self) -> int:
        return len(self.ids) - self.num_prompt_tokens


def greedy_answers(folder: Path, cases: list[Case]) -> list[Spoken]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    spoken = []
    for case, answer in zip(cases, run_transformers(folder, cases), strict=True):
        text = tokenizer.apply_chat_template(
            case.messages, tools=case.tools, tokenize=False, add_generation_prompt=True
        )
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        spoken.append(Spoken(case.group.split(":")[0], prompt + answer.token_ids, len(prompt)))
    return spoken


def num_steps(spoken: Spoken, num_right: list[int]) -> int:
    """Steps of verification that the answer takes, when `num_right[i]` guesses after position i are right."""
    position, steps = spoken.num_prompt_tokens - 1, 0
    while position + 2 < len(spoken.ids):  # token position + 1 is known
        position += num_right[position] + 1
        steps += 1
    return steps


@torch.inference_mode()
def verify(drafter: TrainedDrafter, target: Any, answers: list[Spoken], tokens: int) -> list[int]:
    """Steps of verification for each answer, in order; about `tokens` tokens in a batch."""
    order = sorted(range(len(answers)), key=lambda i: len(answers[i].ids))
    steps: dict[int, int] = {}
    while order:
        longest = len(answers[order[-1]].ids)
        picked = order[-max(1, tokens // longest) :]
        order = order[: -len(picked)]
        # No guess equals -1, so nothing is right beyond the end.
        ids = torch.full((len(picked), longest), -1, device=target.device)
        for row, i in enumerate(picked):
            ids[row, : len(answers[i].ids)] = torch.tensor(answers[i].ids, device=target.device)
        drafts = drafter.drafts(read(target, ids.clamp(min=0), ids >= 0))
        beyond = torch.full((len(picked), drafts.shape[-1] + 1), -1, device=target.device)
        said = torch.cat([ids, beyond], dim=1).unfold(1, drafts.shape[-1], 1)[:, 2:]  # [rows, length, num_drafts]
        num_right = (drafts == said).int().cumprod(dim=-1).sum(dim=-1).tolist()
        for row, i in enumerate(picked):
            steps[i] = num_steps(answers[i], num_right[row])
    return [steps[i] for i in range(len(answers))]


def mean_lengths(answers: list[Spoken], steps: list[int]) -> dict[str, float]:
    """Return the mean lengths of everything, then of each kind of question."""
    num_tokens: dict[str, int] = defaultdict(int)
    num_verified: dict[str, int] = defaultdict(int)
    for answer, count in zip(answers, steps, strict=True):
        for kind in ("all", answer.kind):
            num_tokens[kind] += answer.num_answer_tokens - 1
            num_verified[kind] += count
    return {kind: num_tokens[kind] / max(1, num_verified[kind]) for kind in num_tokens}


def report(drafters: dict[str, TrainedDrafter], target: Any, answers: list[Spoken]) -> None:
    tokens = 32_768 if torch.cuda.is_available() else 4096
    steps = {name: verify(drafter, target, answers, tokens) for name, drafter in drafters.items()}
    # The last step of an answer is cut short, so not even this one reaches NUM_DRAFTS + 1.
    steps["always right"] = [num_steps(answer, [NUM_DRAFTS] * len(answer.ids)) for answer in answers]
    for name, counts in steps.items():
        lengths = mean_lengths(answers, counts)
        print(f"{name:16s} mean length", ", ".join(f"{kind} {length:.2f}" for kind, length in lengths.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, default=ASSETS, help="where the drafters are")
    parser.add_argument("--target", type=Path, default=ASSETS / "teachlm")
    parser.add_argument("--questions", choices=QUESTIONS, default="test")
    parser.add_argument("--only", default="", help="only groups that begin with this, e.g. 'skill'")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [case for case in QUESTIONS[args.questions]() if case.group.startswith(args.only)]
    answers = greedy_answers(args.target, cases)
    print(f"{len(cases)} questions of {args.questions}, {sum(a.num_answer_tokens for a in answers)} tokens of answers")
    drafters: dict[str, TrainedDrafter] = {
        name: kind.load(args.assets / name).to(device) for name, kind in DRAFTERS.items()
    }
    report(drafters, load_target(args.target, device), answers)


if __name__ == "__main__":
    main()
