"""Compare what is lost and what is won: a model and its quantized forms, on one text, in one engine.

    size            of the safetensors files
    perplexity      exp of the mean of -log p(token), over answers that no calibration has seen; its increase is known
                    up to a standard error, as answers are few and go either way
    KL divergence   how far the quantized model's next-token probabilities are from the original's, mean over the text:
                    sum of p log(p / q). Perplexity may fall by chance, where the original was wrong; this cannot
    tokens/s        of a few requests that decode together, behind their prompts

Both models run in the engine, which gives each position's likeliest tokens. Tokens that one of the two lists lacks
count as one, the rest; so what is printed as the KL divergence is at most what it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teachllm.checkpoint.files import find_folder, stored_tensors
from teachllm.quantization.algorithms.texts import HELD_OUT_TEXT, Document, read_tokenizer, scored_documents

NUM_LIKELIEST = 50  # tokens of each position that are compared one by one
_REST = 1e-9  # probability that at least is left for all others
_NUM_RUNS = 3

ORIGINAL = "original"


@dataclass(frozen=True)
class Decoding:
    """Describe what is timed: so many requests, of so many tokens each, and as many that each generates, at least 2."""

    num_requests: int = 8
    prompt_len: int = 32
    output_len: int = 64


@dataclass(frozen=True)
class Scores:
    """Hold the scores of a text; each list is by the tokens that are scored.

    Attributes:
        logprobs: of the token.
        likeliest: {token id: log-probability} of the tokens that might have been there.
        answers: to which answer it belongs; answers of the same tokens are one.
    """

    logprobs: list[float]
    likeliest: list[dict[int, float]]
    answers: list[int]

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


@dataclass(frozen=True)
class Compared:
    """A line of the table.

    Attributes:
        name: of the method and its settings, or `ORIGINAL`.
        num_bytes: of all tensors.
        standard_error: of the perplexity's increase over the original's, as a part of it; None: of one answer there is
            none.
        kl_divergence: in nats per token.
        kl_standard_error: of its mean.
        tokens_per_s: of all requests together.
    """

    name: str
    num_bytes: int
    perplexity: float
    standard_error: float | None
    kl_divergence: float
    kl_standard_error: float | None
    tokens_per_s: float


def read(text: Path | None, model: str | Path, seq_len: int = 512) -> list[Document]:
    """Read a text to measure on, see `texts.py`; None: the text that comes with teachllm.

    Args:
        model: the model whose tokenizer reads it, a folder or hub id.
        seq_len: tokens of a piece, at most.

    Raises:
        ValueError: there is nothing to score, or the file is not what it should be.
    """
    return scored_documents(text or HELD_OUT_TEXT, read_tokenizer(find_folder(str(model))), seq_len)


def compare(
    models: Iterable[tuple[str, str | Path]],
    documents: Sequence[Document],
    decoding: Decoding | None = None,
    **settings: Any,
) -> list[Compared]:
    """Measure checkpoints of one model.

    Args:
        models: (name, folder or hub id), the first is the original. Each is done with when the next is asked for.
        documents: to score.
        settings: of the engine.

    Raises:
        ValueError: the engine refuses a folder.
    """
    found: list[Compared] = []
    original: Scores | None = None
    for name, model in models:
        folder = find_folder(str(model))
        scores, tokens_per_s = measure(folder, documents, decoding or Decoding(), **settings)
        original = original or scores
        _, error = mean_and_error(differences(original, scores), scores.answers)
        divergence, divergence_error = mean_and_error(divergences(original, scores), scores.answers)
        num_bytes = sum(file.stat().st_size for file in {each.file for each in stored_tensors(folder).values()})
        found.append(
            Compared(
                name=name,
                num_bytes=num_bytes,
                perplexity=scores.perplexity,
                standard_error=error,
                kl_divergence=divergence,
                kl_standard_error=divergence_error,
                tokens_per_s=tokens_per_s,
            )
        )
    return found


def measure(folder: Path, documents: Sequence[Document], decoding: Decoding, **settings: Any) -> tuple[Scores, float]:
    """Return a checkpoint's scores of a text, and the tokens per second that it generates."""
    from teachllm import LLM, SamplingParams

    longest = max(len(document.ids) for document in documents)
    settings = {"max_model_len": max(longest + 1, decoding.prompt_len + decoding.output_len)} | settings
    with closing(LLM(str(folder), max_logprobs=NUM_LIKELIEST, **settings)) as llm:
        prompts: Any = [{"prompt_token_ids": document.ids} for document in documents]
        asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=NUM_LIKELIEST)
        scores, numbers = Scores([], [], []), dict[tuple[int, ...], int]()
        for document, output in zip(documents, llm.generate(prompts, asked, use_tqdm=False), strict=True):
            answer = document.ids[document.first :]
            number = numbers.setdefault(tuple(answer), len(numbers))
            for token_id, entries in zip(answer, (output.prompt_logprobs or [])[document.first :], strict=True):
                assert entries is not None
                scores.logprobs.append(entries[token_id].logprob)
                scores.likeliest.append({each: entry.logprob for each, entry in entries.items()})
                scores.answers.append(number)
        return scores, _tokens_per_s(llm, documents, decoding)


def differences(original: Scores, other: Scores) -> list[float]:
    """Return how much less likely each token has become, in nats."""
    return [p - q for p, q in zip(original.logprobs, other.logprobs, strict=True)]


def divergences(original: Scores, other: Scores) -> list[float]:
    """Return KL(original, other) at each position, in nats."""
    return [_divergence(p, q) for p, q in zip(original.likeliest, other.likeliest, strict=True)]


def mean_and_error(values: Sequence[float], answers: Sequence[int]) -> tuple[float, float | None]:
    """Return the mean of values, and its standard error if answers were drawn, and with each all of its tokens.

    Tokens of an answer vary together, and more so the tokens of an answer that was drawn twice.

    Args:
        answers: of each value.

    Returns:
        The error is None if there is but one answer.
    """
    mean, off = sum(values) / len(values), dict[int, float]()
    for value, answer in zip(values, answers, strict=True):
        off[answer] = off.get(answer, 0.0) + value - mean
    if len(off) == 1:
        return mean, None
    return mean, math.sqrt(len(off) / (len(off) - 1) * sum(each**2 for each in off.values())) / len(values)


def _divergence(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """Return the divergence of two distributions, of which the likeliest log-probabilities are known; the rest is
    one event."""
    both = p.keys() & q.keys()
    rest_p = max(1.0 - sum(math.exp(p[each]) for each in both), _REST)
    rest_q = max(1.0 - sum(math.exp(q[each]) for each in both), _REST)
    return sum(math.exp(p[each]) * (p[each] - q[each]) for each in both) + rest_p * math.log(rest_p / rest_q)


def _tokens_per_s(llm: Any, documents: Sequence[Document], decoding: Decoding) -> float:
    """Return tokens per second from the first token on, the best of some runs: whatever else runs on a machine only
    takes time.

    Prompts are pieces of the text, so that all models have the same work.
    """
    from teachllm import SamplingParams

    ids = [token_id for document in documents for token_id in document.ids]
    ids *= -(-decoding.num_requests * decoding.prompt_len // len(ids))
    starts = range(0, decoding.num_requests * decoding.prompt_len, decoding.prompt_len)
    prompts: Any = [{"prompt_token_ids": ids[start : start + decoding.prompt_len]} for start in starts]
    params = SamplingParams(temperature=0.0, max_tokens=decoding.output_len, ignore_eos=True)
    best = math.inf
    for _ in range(_NUM_RUNS):
        times: list[Any] = [output.metrics for output in llm.generate(prompts, params, use_tqdm=False)]
        begin = min(each.first_token_time for each in times)
        best = min(best, max(each.last_token_time for each in times) - begin)
    return len(prompts) * (decoding.output_len - 1) / best
