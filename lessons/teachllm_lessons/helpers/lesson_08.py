"""Lesson 08, attention in Triton: what is predicted and judged, and what a planted fault looks like.

Kernels are interpreted where there is no GPU: set TRITON_INTERPRET=1 before Triton is imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from itertools import permutations
from statistics import mean
from typing import Any
from unittest import mock

import torch

from teachllm.engine.overrides import EngineOverrides
from teachllm_kernels.attention import decode_plan
from teachllm_kernels.attention.decode_plan import DecodePlan, plan_decode
from teachllm_kernels.attention.decode_tile import add_tile
from teachllm_kernels.attention.paged_attention import paged_attention_reference
from teachllm_kernels.attention.paged_decode import paged_decode_triton
from teachllm_lessons.exercise import Exercise, require
from teachllm_lessons.helpers.lesson_08_kernels import (
    TILE,
    EngineKernels,
    KernelAttention,
    State,
    Update,
    kernel_device,
    run_tile,
)
from teachllm_lessons.palette import BAD, BAR, INK, LINE, OTHER_BAR, series_color
from teachllm_lessons.picture import Picture, axes, log_axis, short
from teachllm_lessons.predict import Prediction
from teachllm_lessons.watch import Watch

RESCALINGS = Prediction(
    asks="Rescalings of six tiles in random order, on average",
    answer=1.45,
    because="The second tile holds the largest score so far with probability 1/2, the third with 1/3, the sixth with "
    "1/6, whatever came before: 1/2 + 1/3 + 1/4 + 1/5 + 1/6 = 1.45. For k tiles it is about ln k - 0.42, so 1,000 "
    "tiles rescale fewer than seven times. (The engine went through all 720 orders of six tiles.)",
    within=0.005,
    traps={
        2.45: "That counts the first tile, too, which has nothing to rescale.",
        2.5: "The second tile beats the first half of the time, but the sixth has to beat five.",
        5: "That is the worst order, with scores that rise from tile to tile.",
        1: "The largest of all six is met once, but there may be new largest scores before it.",
    },
)


def rescalings_of_all_orders(num_tiles: int) -> float:
    """Return how often a tile after the first has the largest score so far, on average over all orders of tiles."""
    return mean(
        sum(order[at] > max(order[:at]) for at in range(1, num_tiles)) for order in permutations(range(num_tiles))
    )


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
        both[0].bar(range(first, first + count), part.tolist(), width=0.8, color=(BAR, OTHER_BAR)[number % 2])
        higher = max(largest, float(part.max()))
        total = total * math.exp(largest - higher) + float((part - higher).exp().sum())
        is_higher, largest = higher > largest, higher
        told.append(f"tile {number}: largest {largest:.2f}, total {total:.2f}")
        both[0].plot([first - 0.5, first + count - 0.5], [largest] * 2, color=BAD, linewidth=2)
        both[1].bar(first + count / 2 - 0.5, total, width=count * 0.9, color=(BAR, OTHER_BAR)[number % 2])
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
    """Points under the roof: what a card does at most for so many FLOPs per byte.

    Args:
        ceilings: as a result in benchmarks/results has them.
        flops: which of them is the flat part.
        points: (name, FLOPs per byte, FLOPs per second).
    """
    figure, ax = axes(8, 3.6)
    bandwidth, peak = ceilings["read_bandwidth"], ceilings[flops]
    xs = [0.5, peak / bandwidth, 20000]
    ax.plot(xs, [min(x * bandwidth, peak) / 1e12 for x in xs], color=INK, linewidth=2)
    ax.text(10, bandwidth * 13e-12, f"{bandwidth / 1e12:.2f} TB/s", color=INK, fontsize=8, ha="right")
    ax.text(xs[1] * 1.3, peak * 1.1e-12, f"{peak / 1e12:,.0f} TFLOP/s", color=INK, fontsize=8, va="bottom")
    taken: list[float] = []  # heights of labels, which would lie on each other where points do
    for index, (name, intensity, reached) in enumerate(sorted(points, key=lambda point: -point[2])):
        ax.plot(intensity, reached / 1e12, marker="os^vD"[index % 5], color=series_color(index), linestyle="")
        height = reached / 1e12
        while any(0.75 < height / other < 1.33 for other in taken):
            height /= 1.4
        taken.append(height)
        is_right = intensity > peak / bandwidth
        at = intensity / 1.25 if is_right else intensity * 1.25
        ax.text(at, height, name, color=INK, fontsize=8, va="center", ha="right" if is_right else "left")
    log_axis(ax, "x", multiples=(1,))
    log_axis(ax, "y")
    ax.set_xlabel("FLOPs for each byte that must be moved")
    ax.set_ylabel("TFLOP/s")
    ax.grid(color=LINE, linewidth=0.5)
    ax.set_title(title, fontsize=9, color=INK, loc="left")
    said = ", ".join(
        f"{name}: {short(reached / 1e12)} TFLOP/s, {reached / min(intensity * bandwidth, peak):.0%} of its roof"
        for name, intensity, reached in points
    )
    return Picture(figure, f"{title}: {said}")


def contract_update(piece: Update) -> int:
    """Check what a tile's step has to do, from one tile of two keys up."""
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
    "a masked key": (((2.0, -math.inf),), "its score is -inf and its weight 0"),
    "a masked first tile": (
        ((-math.inf, -math.inf), (1.0, 2.0)),
        "the largest score is still -inf after the first tile, and -inf - (-inf) is not a number: keep to 0 there",
    ),
    "a masked tile in the middle": (((1.0, 2.0), (-math.inf, -math.inf)), "it changes nothing"),
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
        f"The engine decoded with it: {attention.num_tiles} tiles of {TILE} keys went through the kernel, and it "
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
        with kernel_device():
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
    "pieces so that no request waits."
)
