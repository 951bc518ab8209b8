"""Tell attention what it must know of flat tokens on a GPU, for the layers of the model or of a drafter.

A step's tokens come in several ways (decodes in a graph, a mixed step, a drafter's next level), and each has its
lengths, slots and rows on the device. Here they become what every layer reads, and the decodes among them are planned:
once for all layers (`decode_plan.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from teachllm.layers.attention import AttentionMetadata
from teachllm.layers.attention_backends.base import AttentionBackend, AttentionNeeds
from teachllm.layers.attention_backends.triton import heads_of
from teachllm.layers.dtypes import torch_dtype
from teachllm.worker.gpu.device_batch import DeviceBatch
from teachllm.worker.gpu.device_step import LONGEST_DECODE
from teachllm_kernels.attention.decode_plan import DecodeKernel, DecodePlan, plan_decode
from teachllm_kernels.selection import at, bound

# By the names of `selection.CASES`: which kernel the plan of decodes alone is for.
_DECODES: Mapping[str, DecodeKernel] = {
    "fused_paged_decode": "fused_paged_decode",
    "hopper_decode": "hopper_decode",
    "rope_kv_write + paged_decode": "paged_decode",
}


@dataclass(slots=True)
class FlatBatch:
    """Flat tokens and where they belong; the fields are those of `AttentionMetadata`.

    Attributes:
        input_ids, positions: [num_tokens] int64.
        first_place: of a tree of drafts, where the first token of each decode stands; None: tokens follow one another.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    query_start: torch.Tensor
    rows: torch.Tensor
    num_decodes: int = 0
    decode_len: int = 1
    query_lens: list[int] = field(default_factory=list)
    kv_lens: list[int] = field(default_factory=list)
    num_decode_tokens: int | None = None
    first_place: int | None = None

    @staticmethod
    def of(batch: DeviceBatch, num_seqs: int, num_tokens: int, num_decodes: int, decode_len: int = 1) -> FlatBatch:
        """Return a step as `DeviceBatch.build` has made it, with padding; a decode has at most `decode_len` tokens."""
        verifies_tree = batch.places is not None and num_decodes > 0 and decode_len > 1
        return FlatBatch(
            input_ids=batch.input_ids[:num_tokens],
            positions=batch.positions[:num_tokens],
            slot_mapping=batch.slot_mapping[:num_tokens],
            seq_lens=batch.seq_lens[:num_seqs],
            query_start=batch.header.query_start[: num_seqs + 1],
            rows=batch.header.rows[:num_seqs],
            num_decodes=num_decodes,
            decode_len=decode_len,
            first_place=0 if verifies_tree else None,
        )


class GPUAttention:
    """Makes the metadata of some layers.

    Args:
        needs: of the layers.
        decode_len: tokens of a decode, at most.

    Attributes:
        plans: of their decodes, by window; none where the backend splits no decodes.
    """

    def __init__(self, needs: AttentionNeeds, backend: AttentionBackend, batch: DeviceBatch, decode_len: int) -> None:
        self.backend = backend
        self._batch, self._num_kv_heads = batch, needs.num_kv_heads
        self.plans: dict[int | None, DecodePlan] = {}
        if not backend.splits_decodes:
            return
        dtype, group = torch_dtype(needs.dtype), needs.num_heads // needs.num_kv_heads
        heads = heads_of(batch.device, dtype, needs.head_size, group, needs.block_size)
        self._kernels = bound("decode", heads, _DECODES)
        self.plans = {
            window: DecodePlan.allocate(
                max_seqs=batch.num_known.shape[0],
                num_heads=needs.num_heads,
                num_kv_heads=needs.num_kv_heads,
                head_size=needs.head_size,
                device=batch.device,
                max_query_len=min(decode_len, LONGEST_DECODE),
            )
            for window in needs.windows
        }

    def metadata(self, tokens: FlatBatch, can_fuse: bool = True) -> AttentionMetadata:
        """Return where flat tokens read and write; the decodes among them planned.

        Args:
            can_fuse: the layers can leave norm, rotation and KV write to attention, see `AttentionMetadata.is_fused`.
        """
        count, num_seqs, tree = tokens.num_decodes, tokens.rows.shape[0], self._batch.tree
        fits = count == num_seqs and tokens.decode_len == 1 and tokens.first_place is None
        may_fuse = can_fuse and fits and self.backend.splits_decodes
        kernel: DecodeKernel = self.kernel_of(num_seqs) if may_fuse else "paged_decode"
        if count:
            self._plan(tokens, kernel)
        first_prompt = count if tokens.num_decode_tokens is None else tokens.num_decode_tokens
        return AttentionMetadata(
            query_start=tokens.query_start,
            seq_lens=tokens.seq_lens,
            block_tables=self._batch.block_tables,
            slot_mapping=tokens.slot_mapping,
            query_lens=tokens.query_lens,
            kv_lens=tokens.kv_lens,
            backend=self.backend,
            rows=tokens.rows,
            num_decodes=count,
            decode_len=tokens.decode_len,
            num_decode_tokens=tokens.input_ids.shape[0] if count == num_seqs else tokens.num_decode_tokens,
            is_fused=kernel != "paged_decode",
            prefill_start=tokens.query_start[count:] - first_prompt if count < num_seqs else None,
            decode_plans=self.plans,
            tree=None if tree is None or tokens.first_place is None else tree.sees,
            first_place=tokens.first_place or 0,
        )

    def kernel_of(self, num_seqs: int) -> DecodeKernel:
        """Return the kernel for a step of so many decodes alone; all but `paged_decode` norm, rotate and write KV."""
        return at(self._kernels, num_seqs)

    def _plan(self, tokens: FlatBatch, kernel: DecodeKernel) -> None:
        count = tokens.num_decodes
        seq_lens, query_start, rows = tokens.seq_lens[:count], tokens.query_start[: count + 1], tokens.rows[:count]
        for window, plan in self.plans.items():
            seen = None if window is None else window + (tokens.first_place or 0) + tokens.decode_len - 1
            plan_decode(plan, seq_lens, query_start, rows, self._num_kv_heads, window=seen, kernel=kernel)
