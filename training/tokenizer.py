"""Trains the tokenizer: byte-level BPE of 4,096 entries on the training conversations themselves.

A small vocabulary, because in a tiny model the embedding is a large share of the parameters. Digits stay
apart, so that counting and copying numbers work on single digits.
"""

from __future__ import annotations

import json
from pathlib import Path

from dialogues.chat_format import END, PAD, START, jinja_template, render
from dialogues.conversations import conversation

VOCAB_SIZE = 4096
MAX_LENGTH = 4096
# A word with the space before it, one digit, one other sign, white space. Signs never join: a piece such as
# ",status" would be rare, and what is rare in training cannot be copied.
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(folder: Path, seed: int, num_conversations: int = 25_000) -> None:
    """Writes tokenizer.json and tokenizer_config.json, the latter with the chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for i in range(num_conversations) for text, _ in render(*conversation(seed + i)))
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "chat_template": jinja_template(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def check_template(folder: Path, seed: int, num_conversations: int = 200) -> None:
    """Raises AssertionError unless the template shipped writes what `render` trained on, turn by turn."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for i in range(num_conversations):
        messages, tools = conversation(seed + i)
        expected = "".join(text for text, _ in render(messages, tools))
        assert tokenizer.apply_chat_template(messages, tools=tools, tokenize=False) == expected, f"conversation {i}"
        for end in range(1, len(messages)):
            if messages[end]["role"] == "assistant":
                prompt = tokenizer.apply_chat_template(
                    messages[:end], tools=tools, tokenize=False, add_generation_prompt=True
                )
                assert expected.startswith(prompt + messages[end]["content"]), f"conversation {i}, message {end}"
