"""Batches of requests with every kind of sampling parameters, and their tokens by the references."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from teachllm.sampling.filters import apply_filters
from tests.kernels.cases import DEVICE

FLOATS, INTS = ("temperature", "top_p", "min_p"), ("top_k", "seed", "child_index")
# No fraction that equal tokens add up to: on whose very edge the sum reaches p, rounding decides.
TOP_PS = [0.0, 0.1037, 0.5071, 0.9013, 0.9991]


def random_requests(rng: random.Random, vocab_size: int) -> list[dict[str, float]]:
    """Return a greedy request, a random one, one with each filter, and one with all."""
    filters = {
        "top_k": rng.choice([1, 2, 5, 20, vocab_size - 1]),
        "top_p": rng.choice(TOP_PS),
        "min_p": rng.choice([0.001, 0.1, 0.7, 1.0]),
    }
    chosen = [{}, *({name: value} for name, value in filters.items()), filters]
    seeds = {"seed": rng.randrange(-(2**62), 2**62), "child_index": rng.randrange(6)}
    return [{}, *({"temperature": rng.choice([0.3, 1.0, 1.7])} | seeds | some for some in chosen)]


def make_table(vocab_size: int, requests: list[dict]) -> dict[str, torch.Tensor]:
    """Return the parameters of all requests, as columns of two wider tensors, on the device."""
    plain = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "top_k": vocab_size, "seed": 0, "child_index": 0}
    values = [plain | request for request in requests]
    floats = torch.tensor([[0.5, *(v[name] for name in FLOATS)] for v in values], dtype=torch.float32)
    ints = torch.tensor([[7, *(v[name] for name in INTS)] for v in values], dtype=torch.int64)
    columns = (*floats.to(DEVICE).unbind(1)[1:], *ints.to(DEVICE).unbind(1)[1:])
    return dict(zip(FLOATS + INTS, columns, strict=True))


def one_by_one(
    logits: torch.Tensor,
    rows: list[int],
    table: dict[str, torch.Tensor],
    draw: Callable[[int, torch.Tensor, dict[str, torch.Tensor]], torch.Tensor],
) -> list[int]:
    """Draw row by row, by the references; `draw` returns a random row's token, given its filtered logits."""
    vocab_size, tokens = logits.shape[1], []
    for i, row in enumerate(rows):
        one = logits[i : i + 1].float()
        p = {name: column[row : row + 1] for name, column in table.items()}
        if row < 0:
            tokens.append(0)
        elif p["temperature"].item() == 0:
            tokens.append(int(one.cpu().argmax()))  # on a CPU the lowest of equal ids wins
        else:
            if p["top_k"].item() < vocab_size or p["top_p"].item() < 1 or p["min_p"].item() > 0:
                top_k = p["top_k"]
                one = apply_filters(one, p["temperature"], top_k, p["top_p"], p["min_p"], num_candidates=int(top_k))
            tokens.append(int(draw(i, one, p)))
    return tokens
