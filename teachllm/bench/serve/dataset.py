"""Make the prompts to send: random prompts of given lengths, or a file of prompts.

Random prompts have nothing in common but what `random_prefix_len` gives them, so that a server's prefix cache finds
no more than is meant. A word of random text is about one token of any tokenizer; how many it was is what the server
says afterwards.
"""

from __future__ import annotations

import itertools
import json
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from teachllm.bench.batch import random_ids
from teachllm.bench.throughput import ThroughputOptions

_WORDS = str.split(
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part"
)


@dataclass(frozen=True)
class Prompt:
    """Describe what one request asks.

    Attributes:
        content: text, or token ids.
        output_len: tokens it asks for.
    """

    content: str | list[int]
    output_len: int


@dataclass(frozen=True)
class RandomLengths:
    """Set the lengths of random prompts, under vLLM's names.

    Attributes:
        range_ratio: r draws every length uniformly from length x (1 - r) to length x (1 + r).
        prefix_len: so many words or ids more, at the front, the same in all.

    Raises:
        ValueError: a number is out of its range.
    """

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0

    def __post_init__(self) -> None:
        for name, least in (("input_len", 1), ("output_len", 1), ("prefix_len", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"random_{name}={getattr(self, name)}: must be at least {least}")
        if not 0.0 <= self.range_ratio < 1.0:
            raise ValueError(f"random_range_ratio={self.range_ratio}: must be in [0, 1)")


def random_prompts(num_prompts: int, lengths: RandomLengths, seed: int, num_ids: int | None = None) -> list[Prompt]:
    """Make random prompts, the same for the same seed.

    Args:
        num_ids: prompts are token ids below this; None makes them words.
    """
    rng = random.Random(f"prompts {seed}")
    draw = ThroughputOptions(random_range_ratio=lengths.range_ratio).draw_len

    def content(prefix: Sequence[str] | Sequence[int], length: int) -> str | list[int]:
        if num_ids is None:
            return " ".join([*map(str, prefix), *rng.choices(_WORDS, k=length)])
        return [*map(int, prefix), *random_ids(rng, length, num_ids)]

    prefix = rng.choices(_WORDS, k=lengths.prefix_len) if num_ids is None else []
    ids = random_ids(rng, lengths.prefix_len, num_ids) if num_ids is not None else []
    return [
        Prompt(content(prefix or ids, draw(rng, lengths.input_len)), draw(rng, lengths.output_len))
        for _ in range(num_prompts)
    ]


def read_prompts(path: Path, num_prompts: int | None, output_len: int) -> list[Prompt]:
    """Read the first prompts of a file of lines like {"prompt": "...", "output_tokens": 100}; a prompt is text or ids.

    Args:
        num_prompts: None is all; where the file has fewer they repeat, with a warning.
        output_len: of lines without "output_tokens".

    Raises:
        ValueError: a line is something else; with its number.
        OSError: the file cannot be read.
    """
    found = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    found.append(_prompt(json.loads(line), output_len))
                except (ValueError, TypeError, LookupError):
                    wanted = '{"prompt": text or token ids, "output_tokens": a number from 1}'
                    raise ValueError(f"{path}, line {number}: must be like {wanted}") from None
    if not found:
        raise ValueError(f"{path} has no prompts")
    if num_prompts is not None and num_prompts > len(found):
        warnings.warn(
            f"{path} has {len(found)} prompts, {num_prompts} are asked for: they repeat, and a prefix cache will find "
            "the repeats",
            stacklevel=2,
        )
    return list(itertools.islice(itertools.cycle(found), num_prompts or len(found)))


def _prompt(line: dict[str, object], output_len: int) -> Prompt:
    content, num_tokens = line["prompt"], line.get("output_tokens", output_len)
    is_ids = isinstance(content, list) and content and all(type(token) is int for token in content)
    if not (is_ids or isinstance(content, str)) or type(num_tokens) is not int or num_tokens < 1:
        raise ValueError
    return Prompt(content, num_tokens)  # type: ignore[arg-type]
