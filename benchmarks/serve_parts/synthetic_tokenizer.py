"""A tokenizer for shapes without weights, whose text costs a server as much as a real one's.

Byte-level BPE (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners"), as Qwen's: an entry is a
string of bytes. Most are made-up words of letters, half of them with a space in front; some are characters of two or
three bytes, whose beginnings are entries, too, so that some tokens end in the middle of a character and their text has
to wait for the next. The same for the same size.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHARACTERS = ((0xC0, 0x250), (0x400, 0x460), (0x3040, 0x30FF), (0x4E00, 0x9FA0))  # accents to Han
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json; the last of three special tokens ends a turn.

    Args:
        vocab_size: ids, special ones included; the model's.

    Raises:
        ValueError: there are more bytes than ids.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    num_plain = vocab_size - len(_SPECIAL)
    if num_plain < 256:
        raise ValueError(f"vocab_size={vocab_size}: must be at least {256 + len(_SPECIAL)}, one for each byte")
    ids, merges = _entries(num_plain)
    vocab = ids | {token: num_plain + index for index, token in enumerate(_SPECIAL)}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _SPECIAL[-1],
        "pad_token": _SPECIAL[0],
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _entries(num_tokens: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """({token: id}, merges): bytes first, then characters (a twentieth), then words, each a merge of two before it."""
    rng = random.Random("synthetic tokenizer")
    written = _byte_characters()
    ids = {character: index for index, character in enumerate(written.values())}
    merges: list[tuple[str, str]] = []

    def merge(left: str, right: str) -> str:
        if left + right not in ids and len(ids) < num_tokens:
            ids[left + right] = len(ids)
            merges.append((left, right))
        return left + right

    while len(ids) < 256 + (num_tokens - 256) // 20:
        first, *rest = chr(rng.randrange(*rng.choice(_CHARACTERS))).encode()
        token = written[first]
        for byte in rest:
            token = merge(token, written[byte])
    letters = [written[byte] for byte in b"eeeeaaooiinntttsrrhldcumfpgwybvk"]
    words = list(letters)
    while len(ids) < num_tokens:
        word = merge(rng.choice(words), rng.choice(letters))
        if len(word) > 1 and len(word) < 9:
            words.append(word)
        if rng.random() < 0.5:
            merge(written[ord(" ")], word)
    return ids, merges


def _byte_characters() -> dict[int, str]:
    """{byte: the character that stands for it}: itself if it can be printed, else one from 256 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printed)
    return {byte: chr(byte) for byte in printed} | {byte: chr(256 + n) for n, byte in enumerate(others)}
