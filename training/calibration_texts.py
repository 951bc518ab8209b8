"""Writes the two texts that `teachllm quantize` comes with: conversations, one JSON object a line.

    calibration.jsonl   what quantizers look at: conversations as teachlm was taught them
    held_out.jsonl      what the loss is measured on: a concept's name and nothing else, and what teachlm said to it

A text to measure on must leave the model in some doubt, and in no more doubt than it knows. Asked a whole question,
teachlm has the answer by heart, so there is next to nothing to lose. And where it is surer of itself than it should be,
as of prose or of what users write, it looks better once rounding has blurred it. So it is given bare names, to which
several answers fit. It chooses among them with the first two tokens, which hold seven eighths of all doubt; the rest it
knows, so that perplexity is low all the same, 1.02. The answers are its own, drawn at temperature 1: of these its
probabilities are the right ones, no other model can expect a lower perplexity, and all that a quantized one makes of it
is loss.

No sentence of the answers in the one is in the other: every third concept is held out, and conversations in which the
model says anything that is written about these are left out. Their names may be in both.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from dialogues.conversations import conversation
from dialogues.knowledge import Concept, load_knowledge

ASSETS = Path(__file__).resolve().parent.parent / "teachllm" / "assets"
EVERY = 3
FIRST_SEED = 8 * 10**15  # no conversation of the corpus or of the evaluation begins so high
NUM_CHARACTERS = 125_000  # of the conversations to look at
MAX_CHARACTERS = 2_000  # of one of them
NUM_DRAWN = 32  # answers to a name
EIGHTH = 8
MAX_TOKENS = 100

Messages = list[dict[str, Any]]


def held_out_concepts() -> tuple[Concept, ...]:
    return load_knowledge().concepts[::EVERY]


def sentences(text: str) -> set[str]:
    return {sentence.strip(" .") for sentence in text.split(". ")}


def held_out_sentences() -> set[str]:
    """All that is written about the held-out concepts, by themselves or compared with others."""
    knowledge, names = load_knowledge(), {concept.name for concept in held_out_concepts()}
    answers = [answer for concept in held_out_concepts() for each in concept.answers.values() for answer in each]
    answers += [concept.brief for concept in held_out_concepts()]
    answers += [entry.answers[0] for pair, entry in knowledge.pairs.items() if pair & names]
    return set().union(*map(sentences, answers))


def held_out(calibrated: str) -> Iterator[Messages]:
    """Yield what teachlm says to the names of the held-out concepts, where it says nothing that was calibrated on.

    Of many answers drawn to a name, in order, every eighth: so each has its share, with less left to chance.
    """
    from teachllm import LLM, SamplingParams

    names = [name for concept in held_out_concepts() for name in (concept.name, *concept.aliases[:1])]
    prompts = [prompt for name in names for prompt in (name[0].upper() + name[1:], name.upper())]
    asked: list[Messages] = [[{"role": "user", "content": prompt}] for prompt in prompts]
    drawn = SamplingParams(temperature=1.0, n=NUM_DRAWN, seed=0, max_tokens=MAX_TOKENS)
    with closing(LLM("teachlm", dtype="float32", device="cpu")) as llm:
        outputs = llm.chat(asked, drawn, use_tqdm=False)
    for messages, output in zip(asked, outputs, strict=True):
        answers = sorted(each.text.strip() for each in output.outputs)[EIGHTH // 2 :: EIGHTH]
        if all(answers) and not any(sentence in calibrated for answer in answers for sentence in sentences(answer)):
            yield from ([*messages, {"role": "assistant", "content": answer}] for answer in answers)


def calibration() -> Iterator[Messages]:
    """Whole conversations, without tools, that say no sentence that is held out."""
    forbidden, num_characters, seed = held_out_sentences(), 0, FIRST_SEED
    while num_characters < NUM_CHARACTERS:
        seed += 1
        messages, tools = conversation(seed)
        text = " ".join(message["content"] for message in messages)
        if tools is None and len(text) <= MAX_CHARACTERS and not any(sentence in text for sentence in forbidden):
            num_characters += len(text)
            yield messages


def write(path: Path, conversations: list[Messages]) -> None:
    lines = [json.dumps({"messages": messages}, ensure_ascii=False) for messages in conversations]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS)
    args = parser.parse_args()
    conversations = list(calibration())
    write(args.out / "calibration.jsonl", conversations)
    apart = list(held_out(" ".join(message["content"] for messages in conversations for message in messages)))
    random.Random(0).shuffle(apart)
    write(args.out / "held_out.jsonl", apart)


if __name__ == "__main__":
    main()
