"""Packs conversations into rows of token ids, on all cores, checking on the way that nothing held out slips in.

Two kinds of rows: short ones, each with a few unrelated conversations, so that many answers are learned
near position 0; and long ones filled by a single conversation or two, so that the tenth turn and position
3,500 work as well. Attention is plainly causal over a row: the model learns to mind the marks that part
conversations.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from dialogues.chat_format import PAD, render
from dialogues.conversations import conversation
from dialogues.held_out import check_messages

CHUNK = 256  # rows made by one task


@dataclass(frozen=True)
class CorpusRows:
    ids: np.ndarray  # [num_rows, length], uint16
    spoken: np.ndarray  # [num_rows, length], bool: said by the assistant, so the loss counts here


def encode(tokenizer, messages, tools) -> tuple[list[int], list[bool]]:  # type: ignore[no-untyped-def]
    pieces = render(messages, tools)
    ids: list[int] = []
    spoken: list[bool] = []
    for (_, said), encoding in zip(pieces, tokenizer.encode_batch([text for text, _ in pieces]), strict=True):
        ids += encoding.ids
        spoken += [said] * len(encoding.ids)
    return ids, spoken


def make_rows(task: tuple[str, int, int, int]) -> tuple[np.ndarray, np.ndarray, int]:
    """`num_rows` full rows of one length from one seed, and how many user messages were checked."""
    from tokenizers import Tokenizer

    folder, seed, num_rows, length = task
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    pad = tokenizer.token_to_id(PAD)
    ids = np.zeros((num_rows, length), dtype=np.uint16)
    spoken = np.zeros((num_rows, length), dtype=bool)
    asked: list[str] = []
    for row in range(num_rows):
        filled = 0
        while filled < length:
            seed += 1
            # About four characters make a token; a long conversation fills a row, now and then half of it.
            characters = None if length < 2000 or seed % 8 == 0 else length * (4 if seed % 3 else 2)
            messages, tools = conversation(seed, characters)
            asked += [message["content"] for message in messages if message["role"] == "user"]
            new_ids, new_spoken = encode(tokenizer, messages, tools)
            end = min(length, filled + len(new_ids) + 1)
            ids[row, filled:end] = [*new_ids, pad][: end - filled]
            spoken[row, filled:end] = [*new_spoken, False][: end - filled]
            filled = end
    checked, _ = check_messages(asked)
    return ids, spoken, checked


def make_corpus(folder: Path, seed: int, num_rows: int, length: int) -> CorpusRows:
    """Rows of fresh conversations. The same seed gives the same rows, whatever the number of cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tasks = [
        (str(folder), seed + start * 1_000, min(CHUNK, num_rows - start), length) for start in range(0, num_rows, CHUNK)
    ]
    with ProcessPoolExecutor() as pool:
        made = list(pool.map(make_rows, tasks))
    print(
        f"corpus: {num_rows} rows of {length} tokens; {sum(n for *_, n in made):,} user messages, none of them held out"
    )
    return CorpusRows(np.concatenate([ids for ids, *_ in made]), np.concatenate([said for _, said, _ in made]))
