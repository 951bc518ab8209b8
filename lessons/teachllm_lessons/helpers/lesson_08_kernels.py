"""Lesson 08: a small decode kernel around the reader's inner loop, and the engine's own, as attention backends;
and a probe that keeps what decodes saw and counts bytes.

Kernels are interpreted where there is no GPU: set TRITON_INTERPRET=1 before Triton is imported. Without Triton
(`teachllm_kernels.torch_interpreter`) they are interpreted in any case.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from teachllm.layers.attention_backends.base import AttentionSettings, KVCache
from teachllm.layers.attention_backends.reference import ReferenceBackend
from teachllm_kernels._triton import tl, triton
from teachllm_kernels.attention.decode_plan import LOG2_E, DecodePlan, plan_decode
from teachllm_kernels.attention.decode_tile import add_tile
from teachllm_kernels.attention.paged_attention import cost
from teachllm_kernels.attention.paged_decode import paged_decode_triton

if TYPE_CHECKING:
    from teachllm.layers.attention import AttentionMetadata


TILE = 64  # keys, as of most of the engine's kernels


_ROWS = 16  # of a tile at least: so many the tensor cores multiply at once


Update = Any  # a @triton.jit function: (scores, v, largest, total, acc) -> (largest, total, acc)


@triton.jit
def _decode(
    q_ptr, k_cache_ptr, v_cache_ptr, out_ptr, tables_ptr, tokens_ptr, seq_lens_ptr,
    scale_log2, table_stride,
    UPDATE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One sequence and KV head: the query heads that share it are the rows of each product."""
    seq, kv_head = tl.program_id(0), tl.program_id(1)
    row, channel, column = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, TILE)
    at = (tl.load(tokens_ptr + seq) * NUM_KV_HEADS + kv_head) * GROUP * D + row[:, None] * D + channel[None, :]
    is_row = (row < GROUP)[:, None]
    queries = tl.load(q_ptr + at, mask=is_row, other=0.0)
    k_head_ptrs = k_cache_ptr + kv_head * D + channel[:, None]
    v_head_ptrs = v_cache_ptr + kv_head * D + channel[None, :]
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    seq_len = tl.load(seq_lens_ptr + seq)
    for start in range(0, seq_len, TILE):
        key = start + column
        is_key = key < seq_len
        block = tl.load(tables_ptr + seq * table_stride + key // BLOCK_SIZE, mask=is_key, other=0)
        slot = (block * BLOCK_SIZE + key % BLOCK_SIZE) * (NUM_KV_HEADS * D)
        k = tl.load(k_head_ptrs + slot[None, :], mask=is_key[None, :], other=0.0)  # [D, TILE]
        v = tl.load(v_head_ptrs + slot[:, None], mask=is_key[:, None], other=0.0)  # [TILE, D]
        scores = tl.dot(queries, k, input_precision="ieee") * scale_log2
        scores = tl.where(is_key[None, :], scores, -float("inf"))
        largest, total, acc = UPDATE(scores, v, largest, total, acc)
    tl.store(out_ptr + at, acc / total[:, None], mask=is_row)


@triton.jit
def _one_tile(
    scores_ptr, v_ptr, largest_ptr, total_ptr, acc_ptr, new_largest_ptr, new_total_ptr, new_acc_ptr,
    UPDATE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    row, key, channel = tl.arange(0, ROWS), tl.arange(0, TILE), tl.arange(0, D)
    at = row[:, None] * D + channel[None, :]
    a, b, c = UPDATE(
        tl.load(scores_ptr + row[:, None] * TILE + key[None, :]),
        tl.load(v_ptr + key[:, None] * D + channel[None, :]),
        tl.load(largest_ptr + row),
        tl.load(total_ptr + row),
        tl.load(acc_ptr + at),
    )
    tl.store(new_largest_ptr + row, a)
    tl.store(new_total_ptr + row, b)
    tl.store(new_acc_ptr + at, c)


def kernel_device() -> torch.device:
    """Return where kernels run: interpreted on the CPU, or natively on the GPU."""
    return torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")


def _launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """Run `kernel[grid](**arguments)`. An error inside comes out as it is, not wrapped by Triton's interpreter."""
    try:
        kernel[grid](**arguments)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and type(cause).__name__ == "InterpreterError":
            cause = cause.__cause__
        raise cause or error from None


State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def run_tile(update: Update, scores: torch.Tensor, v: torch.Tensor, state: State | None = None) -> State:
    """One tile through an update, on any few rows, keys and channels.

    Args:
        scores: [rows, keys], base 2, -inf where masked.
        v: [keys, channels].
        state: (largest, total, acc) of the tiles before; None: there are none.

    Returns:
        (largest [rows], total [rows], acc [rows, channels]).
    """
    (rows, keys), channels, device = scores.shape, v.shape[1], kernel_device()
    if state is None:
        state = torch.full((rows,), -math.inf), torch.zeros(rows), torch.zeros(rows, channels)
    wide = torch.full((_ROWS, _ROWS), -math.inf)
    wide[:rows, :keys] = scores
    wide_v, largest, total, acc = (torch.zeros(shape) for shape in ((_ROWS, _ROWS), _ROWS, _ROWS, (_ROWS, _ROWS)))
    wide_v[:keys, :channels] = v
    largest[:rows], total[:rows], acc[:rows, :channels] = state
    wide, wide_v, largest, total, acc = (each.to(device) for each in (wide, wide_v, largest, total, acc))
    new_largest, new_total, new_acc = (torch.full_like(each, math.nan) for each in (largest, total, acc))
    _launch(
        _one_tile,
        (1,),
        scores_ptr=wide,
        v_ptr=wide_v,
        largest_ptr=largest,
        total_ptr=total,
        acc_ptr=acc,
        new_largest_ptr=new_largest,
        new_total_ptr=new_total,
        new_acc_ptr=new_acc,
        UPDATE=update,
        ROWS=_ROWS,
        TILE=_ROWS,
        D=_ROWS,
    )
    return new_largest.cpu()[:rows], new_total.cpu()[:rows], new_acc.cpu()[:rows, :channels]


class KernelAttention(ReferenceBackend):
    """Compute decodes with this lesson's small kernel around the reader's update; prompts as the engine does.

    Attributes:
        num_tiles: that the kernel has gone through.
    """

    def __init__(self, update: Update) -> None:
        self.update = update
        self.num_tiles = 0

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
        result = super().attend(q, k, v, kv_cache, metadata, settings, out)
        decodes = [index for index, length in enumerate(metadata.query_lens) if length == 1]
        if decodes:
            chosen, device = torch.tensor(decodes), kernel_device()
            self._decode(
                [each.to(device).contiguous() for each in (q, *kv_cache)],
                result,
                metadata.block_tables[chosen].to(device),
                metadata.query_start[:-1][chosen],
                metadata.seq_lens[chosen],
                settings.scale,
            )
        return result

    def _decode(
        self,
        inputs: Sequence[torch.Tensor],
        result: torch.Tensor,
        tables: torch.Tensor,
        tokens: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
    ) -> None:
        """Writes the rows of decodes. `inputs`: q, and K and V of the layer's cache."""
        q, k_cache, v_cache = inputs
        _, block_size, num_kv_heads, head_size = k_cache.shape
        out = torch.zeros_like(q)
        self.num_tiles += sum(-(-length // TILE) for length in seq_lens.tolist()) * num_kv_heads
        _launch(
            _decode,
            (len(tokens), num_kv_heads),
            q_ptr=q,
            k_cache_ptr=k_cache,
            v_cache_ptr=v_cache,
            out_ptr=out,
            tables_ptr=tables,
            tokens_ptr=tokens.to(q.device),
            seq_lens_ptr=seq_lens.to(q.device),
            scale_log2=scale * LOG2_E,
            table_stride=tables.stride(0),
            UPDATE=self.update,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=q.shape[1] // num_kv_heads,
            ROWS=_ROWS,
            D=head_size,
            BLOCK_SIZE=block_size,
            TILE=TILE,
        )
        result[tokens.long()] = out.cpu()[tokens.long()]


class EngineKernels(KernelAttention):
    """Decodes by the kernels that serve on a GPU: planned, split, merged."""

    def __init__(self) -> None:
        super().__init__(add_tile)

    def _decode(
        self,
        inputs: Sequence[torch.Tensor],
        result: torch.Tensor,
        tables: torch.Tensor,
        tokens: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
    ) -> None:
        q, k_cache, v_cache = inputs
        device, count, num_kv_heads = q.device, len(tokens), k_cache.shape[2]
        plan = DecodePlan.allocate(count, q.shape[1], num_kv_heads, q.shape[2], device)
        starts = torch.arange(count + 1, dtype=torch.int32, device=device)
        plan_decode(plan, seq_lens.to(device), starts, starts[:-1], num_kv_heads)
        chosen = q[tokens.long().to(device)].contiguous()
        out = paged_decode_triton(chosen, k_cache, v_cache, tables, starts, plan, scale)
        result[tokens.long()] = out.cpu()


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
        """Return (tiles after a first one that have a larger score than all before, tiles after a first one)."""
        rises = tiles = 0
        for layer in self.decodes:
            for each in layer:
                largest = torch.stack([part.max(dim=-1).values for part in each.scores.split(tile, dim=-1)])
                before = largest.cummax(dim=0).values[:-1]
                rises += int((largest[1:] > before).sum())
                tiles += before.numel()
        return rises, tiles

    def peaks(self, tile: int) -> dict[str, int]:
        """Return for how many heads the largest score lies in the first tile, in the last one, and between them."""
        found = {"first tile": 0, "tiles between": 0, "last tile": 0}
        for each in (attended for layer in self.decodes for attended in layer):
            last = (each.scores.shape[1] - 1) // tile
            for at in each.scores.argmax(dim=-1).tolist():
                found["first tile" if at // tile == 0 else "last tile" if at // tile == last else "tiles between"] += 1
        return found

    def weight_of_first(self) -> float:
        """Return the weight of a sequence's first token, on average over heads and layers."""
        weights = [attended.scores.softmax(dim=-1)[:, 0] for layer in self.decodes for attended in layer]
        return float(torch.cat(weights).mean())
