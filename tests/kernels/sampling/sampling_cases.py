"""Batches of requests with every kind of sampling parameters, and their tokens by the references."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from teachllm import SamplingParams
from teachllm.core.scheduler_output import NewRow
from teachllm.sampling.device_parameters import DeviceParameters, Parameters, values_of
from teachllm.sampling.filters import apply_filters
from teachllm.sampling_params import FILTERS
from tests.kernels.cases import DEVICE
from tests.request_kinds import EXAMPLES, FILTER_VALUES


def random_requests(rng: random.Random, vocab_size: int) -> list[dict[str, float]]:
    """Return a greedy request, a random one, one with each filter, and one with all."""
    values = {name: FILTER_VALUES.get(name, (EXAMPLES[name],)) for name in FILTERS}
    values["top_k"] += (vocab_size - 1,)
    filters = {name: rng.choice(values[name]) for name in FILTERS}
    chosen = [{}, *({name: value} for name, value in filters.items()), filters]
    seeds = {"seed": rng.randrange(-(2**62), 2**62), "child_index": rng.randrange(6)}
    return [{}, *({"temperature": rng.choice([0.3, 1.0, 1.7])} | seeds | some for some in chosen)]


def make_table(vocab_size: int, requests: list[dict]) -> DeviceParameters:
    """Return the parameters of all requests, as the sampler keeps them, on the device."""
    made = DeviceParameters(len(requests), torch.device(DEVICE))
    for row, request in enumerate(requests):
        asked = {"temperature": 0.0} | request
        seed, child_index = asked.pop("seed", 0), asked.pop("child_index", 0)
        made.write(row, values_of(NewRow([], 0, SamplingParams(**asked), child_index, seed, frozenset()), vocab_size))
    made.send()
    return made


def row_of(table: DeviceParameters, row: int) -> Parameters:
    """Return the parameters of one request, [1] each."""
    return table.gather(torch.tensor([row], device=DEVICE))


def one_by_one(
    logits: torch.Tensor,
    rows: list[int],
    table: DeviceParameters,
    draw: Callable[[int, torch.Tensor, Parameters], torch.Tensor],
) -> list[int]:
    """Draw row by row, by the references; `draw` returns a random row's token, given its filtered logits."""
    tokens = []
    for i, row in enumerate(rows):
        one = logits[i : i + 1].float()
        p = row_of(table, max(row, 0))
        if row < 0:
            tokens.append(0)
        elif p["temperature"].item() == 0:
            tokens.append(int(one.cpu().argmax()))  # on a CPU the lowest of equal ids wins
        else:
            one = apply_filters(one, p, num_candidates=int(p["top_k"]))
            tokens.append(int(draw(i, one, p)))
    return tokens
