"""Lesson 08: a probe in the attention of the engine, which keeps what decodes saw and counts bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from teachllm.layers.attention_backends.base import AttentionSettings, KVCache
from teachllm.layers.attention_backends.reference import ReferenceBackend
from teachllm_kernels.attention.paged_attention import cost

if TYPE_CHECKING:
    from teachllm.layers.attention import AttentionMetadata


@dataclass(frozen=True)
class Attended:
    """One decode of one layer, as the engine computed it.

    Attributes:
        scores: [num_heads, num_keys], scaled, base e.
        v: [num_keys, num_heads, head_size], a KV head's for each query head that shares it.
        blocks: physical blocks of the keys, in logical order.
    """

    scores: torch.Tensor
    v: torch.Tensor
    blocks: list[int]


class Probe(ReferenceBackend):
    """The engine's own attention, which keeps what decodes saw in the last step and counts bytes of all.

    Attributes:
        decodes: of the last step that had any: for each layer, of each decode.
        once: bytes that must be moved: q, K and V in, the result out, 2 bytes a number.
        scores: bytes of scores and weights that the definition, a matrix at a time, writes and reads on top.
    """

    def __init__(self) -> None:
        self.decodes: list[list[Attended]] = []
        self.once = self.scores = 0
        self._metadata: AttentionMetadata | None = None  # of that step: its layers share it

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        settings: AttentionSettings,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_kv_heads, head_size = kv_cache[0].shape[2:]
        lens = metadata.query_lens, metadata.kv_lens
        self.once += cost(*lens, q.shape[1], num_kv_heads, head_size)[0]
        pairs = sum(num_queries * num_keys for num_queries, num_keys in zip(*lens, strict=True))
        self.scores += 4 * 2 * q.shape[1] * pairs  # scores written, read; weights written, read
        found = list(self._decodes(q, kv_cache, metadata, settings.scale))
        if found:
            if self._metadata is not metadata:
                self._metadata, self.decodes = metadata, []
            self.decodes.append(found)
        return super().attend(q, k, v, kv_cache, metadata, settings, out)

    @staticmethod
    def _decodes(q: torch.Tensor, kv_cache: KVCache, metadata: AttentionMetadata, scale: float) -> Iterator[Attended]:
        _, block_size, num_kv_heads, _ = kv_cache[0].shape
        for seq, (num_queries, num_keys) in enumerate(zip(metadata.query_lens, metadata.kv_lens, strict=True)):
            if num_queries == 1:
                table = metadata.block_tables[seq, : -(-num_keys // block_size)].long()
                k, v = (
                    cache[table].flatten(0, 1)[:num_keys].repeat_interleave(q.shape[1] // num_kv_heads, dim=1)
                    for cache in kv_cache
                )
                query = q[int(metadata.query_start[seq])]
                yield Attended(torch.einsum("hd,khd->hk", query, k) * scale, v, table.tolist())

    def rises(self, tile: int) -> tuple[int, int]:
        """(tiles behind a first one that have a larger score than all before, tiles behind a first one)."""
        rises = tiles = 0
        for layer in self.decodes:
            for each in layer:
                largest = torch.stack([part.max(dim=-1).values for part in each.scores.split(tile, dim=-1)])
                before = largest.cummax(dim=0).values[:-1]
                rises += int((largest[1:] > before).sum())
                tiles += before.numel()
        return rises, tiles
