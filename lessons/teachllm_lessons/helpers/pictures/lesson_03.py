"""Pictures of lesson 03: the places of a batch, the roofline, and what a batch costs and brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from teachllm.roofline import StepShape, step_work
from teachllm.simulator.shapes import model_shape
from teachllm_lessons.helpers.lesson_03 import PLACES, QUEUE, SHAPE, MeasuredStep, ceilings, seats
from teachllm_lessons.palette import BAR, GOOD, HIT, INK, LINE, PALE, color, ink_on, series_color
from teachllm_lessons.picture import Picture, axes, log_axis, rectangle
from teachllm_lessons.watch import Watch


def places(runs: Mapping[str, Watch], count: int = PLACES) -> Picture:
    """The places of one batch or more, on one time axis: empty ones are outlined."""
    tables = {name: seats(watch.trace.lines, count) for name, watch in runs.items()}
    width = max(len(table) for table in tables.values())
    figure, ax = axes(8, 0.7 + 0.36 * (count + 1) * len(tables))
    names = [name for name in QUEUE if any((name, True) in row for table in tables.values() for row in table)]
    says, ticks = [], []
    for panel, (title, table) in enumerate(tables.items()):
        top = -panel * (count + 1)
        empty = 0
        for column in range(len(table)):
            for place in range(count):
                x, y, seat = column + 0.04, top - place - 0.92, table[column][place]
                if seat is None:
                    empty += 1
                    rectangle(ax, x, y, 0.92, 0.84, PALE, linestyle=":")
                    continue
                name, is_prompt = seat
                filled = color(names.index(name))
                rectangle(ax, x, y, 0.92, 0.84, filled if is_prompt else (*filled, 0.3))
                ink = ink_on(filled) if is_prompt else INK
                ax.text(column + 0.5, y + 0.42, name, ha="center", va="center", fontsize=8, color=ink)
        head = f"{title}: {len(table)} steps, {empty} of {count * len(table)} places empty"
        ax.text(0.04, top + 0.12, head, fontsize=9, color=INK, va="bottom")
        ticks += [(top - place - 0.5, f"place {place + 1}") for place in range(count)]
        says.append(head)
    ax.set_xlim(0, width)
    ax.set_ylim(-len(tables) * (count + 1) + 0.9, 0.9)
    ax.set_yticks(*zip(*ticks, strict=True))
    ax.set_xticks([0.5 + column for column in range(width)], range(width))
    ax.set_xlabel("step")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return Picture(figure, "; ".join(says))


def roofline(
    batches: Sequence[int] = (1, 4, 16, 64, 256, 1024),
    prompt: int = 2048,
    measured: Mapping[str, MeasuredStep] | None = None,
) -> Picture:
    """Draw steps under an H200's roof: computed ones, which lie on it by construction, and measured ones.

    Args:
        batches: requests of computed decode steps, with 256 tokens each.
        prompt: tokens of a computed step for one prompt.
        measured: drawn as crosses.
    """
    model, roof = model_shape(SHAPE), ceilings()
    figure, ax = axes(8, 3.8)
    ridge = roof.gemm_flops / roof.read_bandwidth
    slope = [0.5 * roof.read_bandwidth / 1e12, roof.gemm_flops / 1e12, roof.gemm_flops / 1e12]
    ax.plot([0.5, ridge, 40_000], slope, color=INK)
    ax.axvline(ridge, color=LINE, linestyle=":")
    ax.text(ridge * 1.06, 1.5, f"the ridge: {ridge:.0f} FLOPs per byte", fontsize=8, color=INK)
    ax.text(0.55, 40, "memory is the limit", fontsize=8, color=INK)
    ax.text(40_000, slope[-1] * 1.3, "arithmetic is the limit", fontsize=8, color=INK, ha="right")
    ax.set_ylim(1, 2500)
    decodes = [(f"{n:,}", StepShape([1] * n, [256] * n, n)) for n in batches]
    prompts = [(f"prompt of {prompt:,}", StepShape([prompt], [prompt], 1))]
    said = []
    for index, (name, step) in enumerate([*decodes, *prompts]):
        work = step_work(model, step)
        flops = work.matrix_flops + work.attention_flops
        x, y = flops / work.num_bytes, flops / work.seconds(roof) / 1e12
        is_decode = index < len(decodes)
        ax.plot([x], [y], marker="o" if is_decode else "s", color=BAR if is_decode else GOOD, markersize=7)
        is_below = is_decode and x > ridge  # above, the line of the ridge would cross it
        at, side = ((0, -15), "left") if is_below else ((-4, 7), "right")
        ax.annotate(name, (x, y), at, textcoords="offset points", fontsize=8, color=INK, ha=side)
        said.append(f"{name} at {x:.0f} FLOPs per byte")
    for name, point in (measured or {}).items():
        work = step_work(model, point.step)
        flops = work.matrix_flops + work.attention_flops
        x, y = flops / work.num_bytes, flops / point.seconds / 1e12
        ax.plot([x], [y], marker="X", color=HIT, markersize=7, linestyle="")
        is_far = x > 1000
        at, side = (-6, -12) if is_far else (6, -10), "right" if is_far else "left"
        ax.annotate(name, (x, y), at, textcoords="offset points", fontsize=8, color=HIT, ha=side)
        share = y / (flops / work.seconds(roof) / 1e12)
        said.append(f"measured {name} at {x:.0f} FLOPs per byte reaches {y:.0f} TFLOP/s, {share:.0%} of the roof")
    log_axis(ax, "x", multiples=(1,))
    log_axis(ax, "y", multiples=(1,))
    ax.set_xlabel("FLOPs per byte that is read")
    ax.set_ylabel("TFLOP/s")
    title = "Qwen3-8B on an H200; computed: decodes of so many requests (circles), a prompt (square); measured: crosses"
    ax.set_title(title, fontsize=9, color=INK, loc="left")
    return Picture(figure, f"{title}: {', '.join(said)}")


def curves(series: Mapping[str, Mapping[int, float]], points: Mapping[str, Mapping[int, float]]) -> Picture:
    """Draw what a batch costs and what it brings: ms per step, and tokens/s, over the size of the batch.

    Args:
        series: seconds of a step for each size; drawn as lines.
        points: the same; drawn as crosses.
    """
    figure, (left, right) = axes(9, 3.4, ncols=2)
    for index, (name, seconds) in enumerate([*series.items(), *points.items()]):
        style: dict[str, Any] = {"marker": "o", "markersize": 3} if name in series else {"marker": "X", "linestyle": ""}
        drawn = series_color(index) if name in series else HIT
        left.plot(list(seconds), [1000 * value for value in seconds.values()], color=drawn, label=name, **style)
        right.plot(list(seconds), [n / value for n, value in seconds.items()], color=drawn, **style)
    for ax, label in ((left, "ms per step: from token to token"), (right, "tokens/s of all together")):
        log_axis(ax, "x", sorted({size for seconds in series.values() for size in seconds})[::2])
        log_axis(ax, "y", multiples=(1, 2, 3, 5) if ax is left else (1, 2, 5))
        ax.set_xlabel("requests in the batch")
        ax.set_ylabel(label)
        ax.grid(color=LINE, linewidth=0.5)
    left.legend(frameon=False, labelcolor=INK, fontsize=8)
    said = []
    for name, seconds in {**series, **points}.items():
        few, many = min(seconds), max(seconds)
        said.append(f"{name}: {1000 * seconds[few]:.2f} ms for {few} and {1000 * seconds[many]:.2f} ms for {many}")
    return Picture(figure, f"ms per step over the size of the batch; {'; '.join(said)}")
