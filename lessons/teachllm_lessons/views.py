"""The visualizer's views, standing still: the block pool, the block tables and the timeline of a trace.

pool       each block in the colours of its users, filled as far as tokens are computed; dashed: free, yet findable
tables     each request's table, logical block by logical block, with the physical block in it
timeline   a row for each request, a column for each step: how many tokens it computed, or why it waited
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from teachllm.trace.replay import Line, Replay
from teachllm_lessons.palette import HIT, INK, LINE, PALE, color, ink_on
from teachllm_lessons.picture import Picture, axes

_COLUMNS = 24  # of a pool
_WAITS = {
    **{"behind_head": "queue", "token_budget": "budget", "sequence_limit": "limit", "no_free_blocks": "blocks"},
    **{"static_batch": "batch", "preempted": "preempted"},
}


def pool(state: Replay, *, columns: int = _COLUMNS, marked: Sequence[int] = ()) -> Picture:
    """The block pool.

    Args:
        marked: blocks that are framed.
    """
    colors = {name: color(index) for index, name in enumerate(state.requests)}
    count, size = len(state.blocks), state.block_size
    rows = -(-count // columns)
    figure, ax = axes(0.38 * columns, 0.38 * rows + 0.5)
    filled = {
        (name, block_id): min(max(request.num_computed_tokens - place * size, 0), size) / size
        for name, request in state.requests.items()
        for place, block_id in enumerate(request.table)
    }
    for block_id, block in enumerate(state.blocks):
        x, y = block_id % columns, -(block_id // columns)
        owners = list(dict.fromkeys(block.users))
        cached = not owners and block.block_hash is not None
        edge = INK if block_id not in marked else HIT
        _box(ax, x, y, PALE if cached else "none", INK if cached else LINE, "--" if cached else "-")
        for index, name in enumerate(owners):
            width = 0.86 / len(owners)
            level = 0.86 * filled.get((name, block_id), 1.0)
            left = x + 0.07 + index * width
            ax.add_patch(_rectangle(left, y + 0.07, width, 0.86, (*colors[name], 0.25)))
            ax.add_patch(_rectangle(left, y + 0.07, width, level, colors[name]))
        if block_id in marked:
            _box(ax, x, y, "none", edge, "-", 2.0)
        if owners:
            text = owners[0] if len(owners) == 1 else f"{len(owners)}x"
            is_full = filled.get((owners[0], block_id), 1.0) > 0.55
            ink = ink_on(colors[owners[0]]) if is_full else INK
            ax.text(x + 0.5, y + 0.5, text[:4], ha="center", va="center", fontsize=8, color=ink)
        else:
            ax.text(x + 0.5, y + 0.5, str(block_id), ha="center", va="center", fontsize=6, color=INK, alpha=0.7)
    _bare(ax, columns, rows)
    used = sum(bool(block.users) for block in state.blocks)
    findable = sum(not block.users and block.block_hash is not None for block in state.blocks)
    says = f"{count} blocks of {size} tokens: {used} used, {findable} cached, {count - used - findable} free"
    ax.set_title(says, fontsize=9, color=INK, loc="left")
    return Picture(figure, f"the block pool after step {state.step}: {says}")


def tables(state: Replay, names: Sequence[str] = ()) -> Picture:
    """Block tables of live requests, or of those that are named."""
    shown = [name for name, each in state.requests.items() if (name in names if names else each.table)]
    width = max((len(state.requests[name].table) for name in shown), default=1)
    figure, ax = axes(min(1.4 + 0.5 * width, 9), 0.42 * max(len(shown), 1) + 0.5)
    order = list(state.requests)
    for row, name in enumerate(shown):
        request, filled = state.requests[name], color(order.index(name))
        ax.text(-0.2, 0.5 - row, name, ha="right", va="center", fontsize=9, color=INK)
        for place, block_id in enumerate(request.table):
            level = min(max(request.num_computed_tokens - place * state.block_size, 0), state.block_size)
            is_shared = len(set(state.blocks[block_id].users)) > 1
            ax.add_patch(_rectangle(place + 0.04, 0.07 - row, 0.92, 0.86, (*filled, 0.25)))
            share = 0.92 * level / state.block_size
            ax.add_patch(_rectangle(place + 0.04, 0.07 - row, share, 0.86, filled))
            if is_shared:
                _box(ax, place, -row, "none", HIT, "-", 2.0)
            ink = ink_on(filled) if level > state.block_size / 2 else INK
            ax.text(place + 0.5, 0.5 - row, str(block_id), ha="center", va="center", fontsize=8, color=ink)
    ax.set_xlim(-1.2, width + 0.1)
    ax.set_ylim(1 - max(len(shown), 1) - 0.05, 1.05)
    ax.axis("off")
    ax.set_title("physical block at each logical place; framed: shared", fontsize=9, color=INK, loc="left")
    said = "; ".join(f"{name}: {state.requests[name].table}" for name in shown)
    return Picture(figure, f"block tables after step {state.step}: {said}")


def timeline(lines: Sequence[Line], *, first: int = 0, last: int | None = None, numbers: bool = True) -> Picture:
    """Return what each step did with each request.

    Args:
        lines: a trace's, behind its header.
        first, last: steps to show.
        numbers: each request's scheduled tokens in its cell.
    """
    names = [line["request_id"] for line in lines if line["event"] == "arrival"]
    names = list(dict.fromkeys(names))
    steps = [line for line in lines if line["event"] == "step"]
    shown = steps[first : None if last is None else last + 1]
    height, width = len(names), max(len(shown), 1)
    cell = min(0.38, 8.2 / width)
    figure, ax = axes(1.2 + cell * width, 0.9 + 0.34 * height)
    ended: set[str] = set()
    labelled: dict[int, int] = {}  # where a row's last word begins
    for column, step in enumerate(shown):
        for scheduled in step["scheduled"]:
            name = scheduled["request_id"]
            row, filled = names.index(name), color(names.index(name))
            is_prompt = scheduled["phase"] == "prefill"
            ax.add_patch(_rectangle(column + 0.04, 0.08 - row, 0.92, 0.84, filled if is_prompt else (*filled, 0.5)))
            if numbers and cell > 0.2:
                held = f"{scheduled['num_accepted']}/{scheduled['num_draft']}" if "num_draft" in scheduled else None
                text = held or str(scheduled["num_tokens"])
                ink = ink_on(filled) if is_prompt else INK
                ax.text(column + 0.5, 0.5 - row, text, ha="center", va="center", fontsize=7, color=ink)
        for name, (reason, _) in step["waiting"].items():
            row = names.index(name)
            ax.add_patch(_rectangle(column + 0.04, 0.4 - row, 0.92, 0.2, PALE))
            is_new = column == 0 or reason != shown[column - 1]["waiting"].get(name, ("",))[0]
            if is_new and (column - labelled.get(row, -99)) * cell > 0.35:  # inches, which a word takes
                labelled[row] = column
                text = _WAITS.get(reason, reason)
                ax.text(column + 0.1, 0.68 - row, text, va="bottom", fontsize=6, color=INK, clip_on=True)
        ended |= set(step["finished"])
    ax.set_xlim(0, width)
    ax.set_ylim(1 - height - 0.1, 1.1)
    ax.set_yticks([0.5 - row for row in range(height)], names)
    every = max(1, round(width / 20))
    ax.set_xticks([0.5 + column for column in range(0, width, every)], range(first, first + width, every))
    ax.set_xlabel("step")
    ax.tick_params(length=0)
    ax.spines["left"].set_visible(False)
    says = f"{len(names)} requests in {len(steps)} steps; {len(ended)} ended in steps {first} to {first + width - 1}"
    ax.set_title("full colour: prompt tokens; pale: one output token; grey: waiting", fontsize=9, color=INK, loc="left")
    return Picture(figure, says)


def _rectangle(x: float, y: float, width: float, height: float, filled: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=filled, edgecolor="none")


def _box(ax: Any, x: float, y: float, filled: str, edge: str, style: str, width: float = 0.8) -> None:
    from matplotlib.patches import Rectangle

    box = Rectangle((x + 0.05, y + 0.05), 0.9, 0.9, facecolor=filled, edgecolor=edge, linestyle=style, linewidth=width)
    ax.add_patch(box)


def _bare(ax: Any, columns: int, rows: int) -> None:
    ax.set_xlim(0, columns)
    ax.set_ylim(1 - rows, 1)
    ax.set_aspect("equal")
    ax.axis("off")
