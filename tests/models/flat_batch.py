"""Runs a model as the engine does, from a hand-made schedule: chunks and decodes of several requests in one batch."""

from __future__ import annotations

from typing import Any

import torch

from teachllm.layers.attention import AttentionMetadata
from teachllm.models.model_config import ModelConfig

Step = list[tuple[int, int]]  # (request, how many of its next tokens)


def random_schedule(lengths: list[int], seed: int) -> list[Step]:
    """Steps that compute every token of every request once: some requests a step, one or many tokens each."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    left = dict(enumerate(lengths))
    steps: list[Step] = []
    while any(left.values()):
        step = [(i, min(n, (1, 1, 7, 16, 33)[draw(5)])) for i, n in left.items() if n and draw(3)]
        for request, count in step:
            left[request] -= count
        if step:
            steps.append(step)
    return steps


def logits_by_schedule(
    model: Any,
    config: ModelConfig,
    sequences: list[torch.Tensor],
    steps: list[Step],
    dtype: torch.dtype,
    block_size: int,
) -> list[torch.Tensor]:
    """Per sequence the logits of all its tokens, [length, vocab_size], computed step by step over a paged cache.

    Blocks are handed out in random order, and unwritten slots hold NaN, so that reading one shows.
    """
    tables = _shuffled_tables([len(s) for s in sequences], block_size)
    num_blocks = int(tables.max()) + 1
    shape = (num_blocks, block_size, config.num_kv_heads, config.head_size)
    kv_caches = [
        (torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
        for _ in range(config.num_layers)
    ]
    done = [0] * len(sequences)
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in steps:
        spans = [(request, done[request], done[request] + count) for request, count in step]
        positions = torch.cat([torch.arange(begin, end) for _, begin, end in spans])
        owners = torch.cat([torch.full((end - begin,), request) for request, begin, end in spans])
        query_lens, kv_lens = [end - begin for _, begin, end in spans], [end for _, _, end in spans]
        metadata = AttentionMetadata(
            query_start=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens=torch.tensor(kv_lens, dtype=torch.int32),
            block_tables=tables[[request for request, _, _ in spans]],
            slot_mapping=tables[owners, positions // block_size].long() * block_size + positions % block_size,
            query_lens=query_lens,
            kv_lens=kv_lens,
        )
        input_ids = torch.cat([sequences[request][begin:end] for request, begin, end in spans])
        with torch.inference_mode():
            logits = model.logits(model(input_ids, positions, kv_caches, metadata))
        for (request, _, end), rows in zip(spans, logits.split(query_lens), strict=True):
            parts[request].append(rows)
            done[request] = end
    return [torch.cat(rows) for rows in parts]


def _shuffled_tables(lengths: list[int], block_size: int) -> torch.Tensor:
    counts = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, blocks in enumerate(order.split(counts)):
        tables[row, : len(blocks)] = blocks
    return tables
