"""Compute teachlm.json: what transformers answers with the embedded model, from the same files, in float32.

Run it as `python -m tests.golden.make_teachlm` from the root of the project.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engine.reference import GOLDEN

FOLDER = Path(__file__).resolve().parents[2] / "teachllm" / "assets" / "teachlm"
FILE = GOLDEN / "teachlm.json"
NUM_TOKENS = 48
QUESTIONS = [
    "What is a KV cache?",
    "why do we need paged attention?",
    "Explain continuous batching to me.",
    "What does TTFT mean?",
    "Hello!",
    "Who are you?",
    "What is the capital of France?",
    "Count from 1 to 9.",
]
TEXTS = ["A KV cache", "Prefill and decode", "The scheduler gives", "1, 2, 3,"]
CONVERSATION = ["What is prefix caching, and why does it exist?", "How does it work?"]


def compute() -> list[dict[str, Any]]:
    """Return prompt, answer and its text: of the questions, of the texts, and of a conversation's second turn."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(FOLDER)

    def ids_of(chat: list[dict[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids: list[int] = tokenizer(text)["input_ids"]
        return ids

    def answer(prompt: list[int], num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
        with torch.inference_mode():
            made = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
        ids = made[0, len(prompt) :].tolist()
        return {"prompt": prompt, "answer": ids, "text": tokenizer.decode(ids, skip_special_tokens=True)}

    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    found = [answer(ids_of(chat)) for chat in chats] + [answer(tokenizer(text)["input_ids"]) for text in TEXTS]
    messages = [{"role": "user", "content": CONVERSATION[0]}]
    first = answer(ids_of(messages), 200)
    messages += [{"role": "assistant", "content": first["text"]}, {"role": "user", "content": CONVERSATION[1]}]
    return [*found, answer(ids_of(messages))]


if __name__ == "__main__":
    FILE.write_text("[\n" + ",\n".join(json.dumps(each) for each in compute()) + "\n]\n")
