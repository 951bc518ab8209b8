"""Lesson 08, attention in Triton: a small decode kernel around the reader's inner loop, and the engine that runs it.

Kernels are interpreted where there is no GPU: set TRITON_INTERPRET=1 before Triton is imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from teachllm.engine.overrides import EngineOverrides
from teachllm.layers.attention_backends.base import AttentionSettings, KVCache
from teachllm.layers.attention_backends.reference import ReferenceBackend
from teachllm_kernels._triton import tl, triton
from teachllm_kernels.attention import decode_plan
from teachllm_kernels.attention.decode_plan import LOG2_E, DecodePlan, plan_decode
from teachllm_kernels.attention.decode_tile import add_tile
from teachllm_kernels.attention.paged_attention import cost, paged_attention_reference
from teachllm_kernels.attention.paged_decode import paged_decode_triton
from teachllm_lessons.exercise import Exercise, require
from teachllm_lessons.palette import BAD, INK, LINE, color
from teachllm_lessons.picture import Picture, axes
from teachllm_lessons.watch import Watch

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


def _device() -> torch.device:
    """Where kernels run: interpreted on the CPU, or natively on the GPU."""
    return torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")


def _launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """Run `kernel[grid](**arguments)`. An error inside comes out as it is, not wrapped by the interpreter."""
    from triton.runtime.errors import InterpreterError

    try:
        kernel[grid](**arguments)
    except InterpreterError as error:
        cause: BaseException | None = error
        while isinstance(cause, InterpreterError):
            cause = cause.__cause__
        raise cause or error from None


State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def run_tile(update: Update, scores: torch.Tensor, v: torch.Tensor, state: State | None = None) -> State:
    """One tile through an update, on any few rows, keys and channels.

    Args:
        scores: [rows, keys], base 2, -inf where nobody may look.
        v: [keys, channels].
        state: (largest, total, acc) of the tiles before; None: there are none.

    Returns:
        (largest [rows], total [rows], acc [rows, channels]).
    """
    (rows, keys), channels, device = scores.shape, v.shape[1], _device()
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
    """Decodes by the small kernel of this lesson, around somebody's update; prompts as the engine computes them.

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
            chosen, device = torch.tensor(decodes), _device()
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
        """(tiles behind a first one that have a larger score than all before, tiles behind a first one)."""
        rises = tiles = 0
        for layer in self.decodes:
            for each in layer:
                largest = torch.stack([part.max(dim=-1).values for part in each.scores.split(tile, dim=-1)])
                before = largest.cummax(dim=0).values[:-1]
                rises += int((largest[1:] > before).sum())
                tiles += before.numel()
        return rises, tiles


def draw_tiles(scores: torch.Tensor, tile: int, blocks: Sequence[int]) -> Picture:
    """Scores of one query and head, tile by tile, with the largest so far and the sum of weights relative to it.

    Args:
        scores: [num_keys], base e.
        blocks: physical blocks of 16 keys each, in logical order.
    """
    figure, both = axes(10, 4.2, nrows=2, sharex=True)
    largest, total, told = -math.inf, 0.0, []
    for number, part in enumerate(scores.split(tile)):
        first, count = number * tile, len(part)
        both[0].bar(range(first, first + count), part.tolist(), width=0.8, color=color(number % 2))
        higher = max(largest, float(part.max()))
        total = total * math.exp(largest - higher) + float((part - higher).exp().sum())
        is_higher, largest = higher > largest, higher
        told.append(f"tile {number}: largest {largest:.2f}, total {total:.2f}")
        both[0].plot([first - 0.5, first + count - 0.5], [largest] * 2, color=BAD, linewidth=2)
        both[1].bar(first + count / 2 - 0.5, total, width=count * 0.9, color=color(number % 2), alpha=0.8)
        said = f"{total:.2f}" + (f"\nlargest {largest:.2f}" if is_higher else "")
        both[1].text(first + count / 2 - 0.5, total, said, ha="center", va="bottom", fontsize=8, color=INK)
    for place, block in enumerate(blocks):
        at, below = min(16 * place + 7.5, len(scores)), both[0].get_xaxis_transform()
        both[0].text(at, -0.03, str(block), ha="center", va="top", fontsize=7, color=INK, transform=below)
    both[0].set_ylabel("score (base e)")
    both[0].set_title("red: the largest so far; below: physical blocks", fontsize=9, color=INK, loc="left")
    both[1].set_ylabel("total, relative to\nthe largest")
    both[1].set_xlabel("key")
    both[1].margins(y=0.35)
    return Picture(figure, "; ".join(told))


def draw_roofline(
    ceilings: Mapping[str, Any], flops: str, points: Sequence[tuple[str, float, float]], title: str
) -> Picture:
    """Points under the roof: what a card does at most for so many FLOPs a byte.

    Args:
        ceilings: as a result in benchmarks/results has them.
        flops: which of them is the flat part.
        points: (name, FLOPs a byte, FLOPs a second).
    """
    figure, ax = axes(8, 3.6)
    bandwidth, peak = ceilings["read_bandwidth"], ceilings[flops]
    xs = [0.5, peak / bandwidth, 20000]
    ax.plot(xs, [min(x * bandwidth, peak) / 1e12 for x in xs], color=INK, linewidth=2)
    for index, (name, intensity, reached) in enumerate(points):
        ax.plot(intensity, reached / 1e12, marker="o", color=color(index), linestyle="", label=name)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("FLOPs for each byte that must be moved")
    ax.set_ylabel("TFLOP/s")
    ax.grid(color=LINE, linewidth=0.5)
    ax.legend(frameon=False, labelcolor=INK, fontsize=8, loc="lower right")
    ax.set_title(title, fontsize=9, color=INK, loc="left")
    said = ", ".join(f"{name}: {reached / 1e12:,.3g} TFLOP/s" for name, _, reached in points)
    return Picture(figure, f"{title}: {said}")


def contract_update(piece: Update) -> int:
    """What a tile's step has to do, from one tile of two keys up."""
    cases = 0
    for what, (tiles, why) in _CASES.items():
        state = None
        for number, tile in enumerate(tiles, start=1):
            scores = torch.tensor([tile])
            v = _values(scores.shape[1], number)
            state = _valid(run_tile(piece, scores, v, state), f"{what}: {_told(tiles, number)}")
            _compare(state, tiles[:number], what, why)
            cases += 1
    generator = torch.Generator().manual_seed(8)
    scores = 6 * torch.randn(3, 48, generator=generator)
    scores[1], scores[2, :16] = scores[1].sort().values + 300, -math.inf  # one rises, one sees nothing at first
    v = torch.randn(48, 5, generator=generator)
    state = None
    for at in range(0, 48, 16):
        state = run_tile(piece, scores[:, at : at + 16], v[at : at + 16], state)
    expected = torch.softmax(scores * math.log(2.0), dim=-1) @ v
    found = state[2] / state[1][:, None] if state else expected
    for row, (name, error) in enumerate(
        zip(("any order", "rising scores", "nothing to see in the first tile"), (found - expected).abs(), strict=True)
    ):
        require(
            bool(error.max() < 1e-3),  # and not NaN
            f"is right for one row, and not for several: of 3 rows of 48 keys, row {row} ({name}) is off by "
            f"{error.max():.3g}. Each row has a largest score of its own: reduce along axis 1.",
        )
        cases += 1
    return cases


_CASES: dict[str, tuple[tuple[tuple[float, ...], ...], str]] = {
    "one tile": (((0.0, 0.0),), "both keys weigh the same"),
    "one tile, scores that differ": (((1.0, 3.0),), "weights are 2^(score - largest): 1/4 and 1"),
    "a later tile with smaller scores": (
        ((3.0, 1.0), (2.0, 0.0)),
        "weights of the second tile are relative to the first one's largest score",
    ),
    "a later tile with the largest score": (
        ((1.0, 0.0), (4.0, 1.0)),
        "what was summed up before was relative to 1, and the largest score is 4 now: it shrinks by 2^(1 - 4)",
    ),
    "huge scores": (((900.0, 899.0), (901.0, 0.0)), "2^900 is more than float32 holds: only differences are small"),
    "a key that nobody may see": (((2.0, -math.inf),), "its score is -inf and its weight 0"),
    "a first tile that nobody may see": (
        ((-math.inf, -math.inf), (1.0, 2.0)),
        "the largest score is still -inf after the first tile, and -inf - (-inf) is not a number: keep to 0 there",
    ),
    "a tile in the middle that nobody may see": (((1.0, 2.0), (-math.inf, -math.inf)), "it changes nothing"),
}


def _values(count: int, number: int) -> torch.Tensor:
    """V of a tile: small whole numbers that are easy to add up by hand."""
    return torch.tensor([[10.0 * number + key, 1.0] for key in range(count)])


def _told(tiles: Sequence[Sequence[float]], number: int) -> str:
    shown = ", then ".join("[" + ", ".join(f"{score:g}" for score in tile) + "]" for tile in tiles[:number])
    return f"scores {shown}"


def _valid(found: Any, what: str) -> State:
    largest, total, acc = found
    for name, each in (("largest", largest), ("total", total), ("acc", acc)):
        wrong = "not a number" if each.isnan().any() else "infinite" if (each == math.inf).any() else ""
        if name != "largest" and (each == -math.inf).any():
            wrong = "infinite"
        require(not wrong, f"{what}: {name} is {wrong}. Which difference is taken of -inf, or which power of a sum?")
    return largest, total, acc


def _compare(state: State, tiles: Sequence[Sequence[float]], what: str, why: str) -> None:
    """Against softmax over all tiles at once, in float64."""
    scores = torch.tensor([score for tile in tiles for score in tile], dtype=torch.float64)
    v = torch.cat([_values(len(tile), number) for number, tile in enumerate(tiles, start=1)]).double()
    largest = scores.max()
    base = largest if largest > -math.inf else torch.zeros(())
    weights = torch.exp2(scores - base)
    given = f"{what}: {_told(tiles, len(tiles))}"
    found_largest, found_total, found_acc = (each[0].double() for each in state)
    require(
        bool(found_largest == largest),
        f"{given}: largest is {found_largest.item():g} and should be {largest.item():g}, of all tiles so far.",
    )
    natural = torch.exp(scores - base).sum()
    hint = " That is the sum of e^x: scores come in base 2, so use tl.exp2." if len(tiles) == 1 else ""
    close = bool(abs(found_total - natural) < 1e-4)
    require(
        bool(abs(found_total - weights.sum()) < 1e-4),
        f"{given}: total is {found_total.item():.6g} and should be {weights.sum().item():.6g}. {why[0].upper()}"
        f"{why[1:]}.{hint if close else ''}",
    )
    expected = weights @ v
    require(
        bool((found_acc - expected).abs().max() < 1e-3),
        f"{given}: acc is {_row(found_acc)} and should be {_row(expected)}, the weighted sum of V's rows "
        f"{', '.join(_row(each) for each in v)}. {why[0].upper()}{why[1:]}.",
    )


def _row(values: torch.Tensor) -> str:
    return "[" + ", ".join(f"{value:.5g}" for value in values.tolist()) + "]"


def live_update(piece: Update) -> str:
    attention = KernelAttention(piece)
    found, expected = _answers(EngineOverrides(attention=attention)), _own_answers()
    for name, ids in expected.items():
        require(
            found[name] == ids,
            f"changes what the engine says: request {name} should be answered with ids {ids}, and was with "
            f"{found[name]}",
        )
    return (
        f"The engine decoded with it: {attention.num_tiles} tiles of {TILE} keys went through a Triton kernel, and it "
        "said the same words."
    )


def _answers(overrides: EngineOverrides) -> dict[str, list[int]]:
    """Of a long question and a short one: so few tokens, as an interpreted kernel takes its time."""
    with Watch(overrides=overrides, num_gpu_blocks_override=24, max_model_len=256) as watch:
        watch.add("long", "Explain paged attention, continuous batching and chunked prefill to me. " * 6, 3)
        watch.add("short", "What is a block table?", 3)
        return watch.run().all_tokens


@cache
def _own_answers() -> dict[str, list[int]]:
    return _answers(EngineOverrides())


UPDATE = Exercise(
    lesson="08",
    name="update",
    contract=contract_update,
    live=live_update,
    reference=add_tile,
    hints=(
        "All that is kept is relative to the largest score so far. What has to happen to `total` and `acc` when a tile "
        "brings a larger one? And what is to be done before any score is larger than -inf?",
        "`higher = tl.maximum(largest, tl.max(scores, axis=1))`. The tile's weights are `tl.exp2(scores - "
        "higher[:, None])`, and what was there before shrinks by `tl.exp2(largest - higher)`. Where `higher` is -inf, "
        "take 0 in its place (`tl.where`): -inf - (-inf) is not a number.",
        "With `base = tl.where(higher == -float('inf'), 0.0, higher)`, `weight = tl.exp2(scores - base[:, None])` and "
        "`shrink = tl.exp2(largest - base)`: return `higher`, `total * shrink + tl.sum(weight, axis=1)` and "
        "`acc * shrink[:, None] + tl.dot(weight, v)`.",
    ),
)


def rising_scores() -> None:
    """A decode over keys that suit its query better and better, by the engine's kernel against the definition."""
    torch.manual_seed(8)
    head_size, block_size = 16, 16
    for length in (60, 120, 200):
        with _device():
            q = torch.randn(1, 4, head_size)
            rise = torch.linspace(0.0, 1.0, 208).view(13, block_size, 1, 1)
            k, v = rise * q.mean((0, 1)) * 8 + torch.randn(2, 13, block_size, 1, head_size)
            tables = torch.randperm(13).int().unsqueeze(0)
            starts, lens = torch.arange(2, dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
        cache = k.expand(-1, -1, 2, -1).contiguous(), v.expand(-1, -1, 2, -1).contiguous()
        with _multiprocessors(1):  # so few that there are no more than two splits
            plan = DecodePlan.allocate(1, 4, 2, head_size, q.device)
            plan_decode(plan, lens, starts, starts[:-1], 2)
            found = paged_decode_triton(q, *cache, tables, starts, plan, 1.0)
        exact = paged_attention_reference(q, *cache, tables, [1], [length], 1.0)
        print(f"{length:3} keys, tiles of 64: off by {(found - exact).abs().max():.3f}")


def long_answer() -> None:
    """A question of two tiles, decoded by the engine's kernels on a GPU of two multiprocessors, interpreted."""
    overrides = EngineOverrides(attention=EngineKernels())
    with _multiprocessors(2), Watch(overrides=overrides, num_gpu_blocks_override=24, max_model_len=256) as watch:
        begun = [*watch.ids(_FACTS + " Which of these decides who goes first?"), 35]  # "A"
        watch.add("A", begun, 2)  # the first of them comes with the prompt
        watch.run()
        print(f"the answer goes on with {watch.text('A')!r}, behind 'A'")


def _multiprocessors(count: int) -> AbstractContextManager[Any]:
    """Plans are made for a GPU of so many: each tile may be a split of its own."""
    return mock.patch.object(decode_plan, "_MULTIPROCESSORS", count)


_FACTS = (
    "A block holds the keys and values of sixteen tokens. A block table says which block stands at which place of a "
    "sequence. A scheduler decides who computes how many tokens in each step. A prefix cache finds blocks of equal "
    "beginnings. A drafter guesses tokens that are verified together. Quantization makes weights smaller. Sampling "
    "draws the next token. Preemption takes blocks back when memory runs out. Chunked prefill cuts a long prompt into "
    "pieces so that nobody waits."
)
