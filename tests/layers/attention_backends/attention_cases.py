"""A step's batch for attention backends, and stand-ins for packages that are not part of any install."""

from __future__ import annotations

import importlib.machinery
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from teachllm.layers.attention import AttentionMetadata
from teachllm.layers.attention_backends.base import AttentionBackend, AttentionNeeds, AttentionSettings
from teachllm_kernels.attention.decode_plan import DecodePlan, plan_decode
from teachllm_kernels.attention.kv_quantization import KVScales, dequantize_kv_reference, quantize_kv_reference
from teachllm_kernels.attention.paged_attention import paged_attention_reference
from tests.kernels.cases import DEVICE, ON_GPU, per_device

DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TOLERANCE = 1e-2 if ON_GPU else 1e-5
HEADS, KV_HEADS = per_device((2, 1), (4, 2))
HEAD_SIZE, BLOCK_SIZE = 64, 16
FULL = AttentionSettings(0.2)
NEEDS = AttentionNeeds(16, 8, 128, "bfloat16", 16, frozenset({None}))


class Batch:
    """A step's q, k and v, the cache after they were written, and where everything lies.

    Args:
        sizes: (query length, context) of each sequence: decodes first, then chunks of prompts.
        kv_dtype: The dtype of a quantized cache.
    """

    def __init__(
        self,
        sizes: list[tuple[int, int]],
        block_size: int = BLOCK_SIZE,
        window: int | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        query_lens, kv_lens = [n for n, _ in sizes], [n + context for n, context in sizes]
        self.num_decodes = next((i for i, n in enumerate(query_lens) if n > 1), len(sizes))
        counts = [-(-n // block_size) for n in kv_lens]
        order = torch.randperm(sum(counts) + 2, generator=generator).int()
        rows = torch.randperm(len(sizes) + 2, generator=generator)[: len(sizes)].int()
        tables = torch.zeros(len(sizes) + 2, max(counts) + 1, dtype=torch.int32)
        shape = (sum(counts) + 2, block_size, KV_HEADS, HEAD_SIZE)
        caches = torch.randn(2, *shape, generator=generator).to(DTYPE)
        new: list[torch.Tensor] = []
        first = 0
        for row, count, n, kv_len in zip(rows.tolist(), counts, query_lens, kv_lens, strict=True):
            tables[row, :count] = order[first : first + count]
            first += count
            at = torch.arange(kv_len - n, kv_len)
            new.append(caches[:, tables[row, at // block_size].long(), at % block_size])
        starts = torch.tensor([0, *query_lens]).cumsum(0).int().to(DEVICE)
        self.k, self.v = torch.cat(new, dim=1).to(DEVICE)
        wide = torch.randn(sum(query_lens), HEADS + 3, HEAD_SIZE, generator=generator).to(DTYPE).to(DEVICE)
        self.q = wide[:, :HEADS]
        self.kv_cache = self.dequantized = (caches[0].to(DEVICE), caches[1].to(DEVICE))
        self.scales: KVScales | None = None
        if kv_dtype is not None:
            k_scale, v_scale = self.scales = (torch.rand(2, KV_HEADS) * 0.02 + 0.03).to(DEVICE).unbind()
            k, v = (
                quantize_kv_reference(self.dequantized[0], k_scale, kv_dtype),
                quantize_kv_reference(self.dequantized[1], v_scale, kv_dtype),
            )
            self.kv_cache, self.dequantized = (
                (k, v),
                (dequantize_kv_reference(k, k_scale), dequantize_kv_reference(v, v_scale)),
            )
        self.window = window
        self.metadata = AttentionMetadata(
            query_start=starts,
            seq_lens=torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE),
            block_tables=tables.to(DEVICE),
            slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64, device=DEVICE),
            query_lens=query_lens,
            kv_lens=kv_lens,
            rows=rows.to(DEVICE),
            num_decodes=self.num_decodes,
            prefill_start=starts[self.num_decodes :] - self.num_decodes,
        )

    def plan_decodes(self) -> Batch:
        """Add what the runner prepares for backends that split decodes."""
        count, metadata = self.num_decodes, self.metadata
        assert metadata.rows is not None
        if count:
            plan = DecodePlan.allocate(count, HEADS, KV_HEADS, HEAD_SIZE, DEVICE)
            where = (metadata.seq_lens[:count], metadata.query_start[: count + 1], metadata.rows[:count])
            plan_decode(plan, *where, KV_HEADS, self.window)
            metadata.decode_plans[self.window] = plan
        return self

    def check(self, backend: AttentionBackend, settings: AttentionSettings, times: int = 1) -> None:
        """Compare a backend with the definition, `times` times, with and without a tensor to write to."""
        metadata = self.metadata
        assert metadata.rows is not None
        settings = replace(settings, kv_scales=self.scales)
        expected = paged_attention_reference(
            self.q.double(), self.dequantized[0].double(), self.dequantized[1].double(),
            metadata.block_tables[metadata.rows.long()], metadata.query_lens, metadata.kv_lens,
            settings.scale, settings.window, settings.soft_cap,
        )  # fmt: skip
        for _ in range(times):
            out = torch.full(self.q.shape, torch.nan, dtype=DTYPE, device=DEVICE)
            for result in (
                backend.attend(self.q, self.k, self.v, self.kv_cache, metadata, settings),
                backend.attend(self.q, self.k, self.v, self.kv_cache, metadata, settings, out),
            ):
                assert result.isfinite().all()
                error = (result.double() - expected).norm() / expected.norm()
                assert error < TOLERANCE, float(error)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """Put a module with these members where a package would be."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for member, value in members.items():
        setattr(module, member, value)
    monkeypatch.setitem(sys.modules, name, module)


def absent(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make packages that may be installed impossible to import."""
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
