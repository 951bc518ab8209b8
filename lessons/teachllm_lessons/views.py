"""The visualizer's views, standing still: the block pool, the block tables and the timeline of a trace.

pool       each block in its users' colors, filled as far as tokens are computed; dashed: not in use, still findable
tables     each request's table, logical block by logical block, with the physical block in it
timeline   a row for each request, a column for each step: how many tokens it computed, or why it waited
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from teachllm.trace.replay import Line, Replay
from teachllm_lessons.palette import HIT, INK, LINE, PALE, PAPER, Color, color, ink_on
from teachllm_lessons.picture import Picture, axes, rectangle

_COLUMNS = 24  # of a pool
_PALE_SHARE = 0.3  # how much of a request's color is in what is pale
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
            rectangle(ax, left, y + 0.07, width, 0.86, (*colors[name], _PALE_SHARE), edge="none")
            rectangle(ax, left, y + 0.07, width, level, colors[name], edge="none")
        if block_id in marked:
            _box(ax, x, y, "none", edge, "-", 2.0)
        if owners:
            text = owners[0] if len(owners) == 1 else f"{len(owners)}x"
            is_of_one_color = len(owners) == 1 and filled.get((owners[0], block_id), 1.0) == 1.0
            _label(ax, x + 0.5, y + 0.5, text[:4], colors[owners[0]] if is_of_one_color else None)
        else:
            ax.text(x + 0.5, y + 0.5, str(block_id), ha="center", va="center", fontsize=6, color=INK)
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
    figure, ax = axes(min(max(1.4 + 0.5 * width, 4.4), 9), 0.42 * max(len(shown), 1) + 0.5)
    order = list(state.requests)
    for row, name in enumerate(shown):
        request, filled = state.requests[name], color(order.index(name))
        ax.text(-0.2, 0.5 - row, name, ha="right", va="center", fontsize=9, color=INK)
        for place, block_id in enumerate(request.table):
            level = min(max(request.num_computed_tokens - place * state.block_size, 0), state.block_size)
            is_shared = len(set(state.blocks[block_id].users)) > 1
            rectangle(ax, place + 0.05, 0.05 - row, 0.9, 0.9, (*filled, _PALE_SHARE), edge="none")
            rectangle(ax, place + 0.05, 0.05 - row, 0.9 * level / state.block_size, 0.9, filled, edge="none")
            _box(ax, place, -row, "none", HIT if is_shared else LINE, "-", 2.0 if is_shared else 0.8)
            _label(ax, place + 0.5, 0.5 - row, str(block_id), filled if level == state.block_size else None)
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
            shade = filled if is_prompt else (*filled, _PALE_SHARE)
            rectangle(ax, column + 0.04, 0.08 - row, 0.92, 0.84, shade)
            if numbers and cell > 0.2:
                held = f"{scheduled['num_accepted']}/{scheduled['num_draft']}" if "num_draft" in scheduled else None
                text = held or str(scheduled["num_tokens"])
                ink = ink_on(filled) if is_prompt else INK
                ax.text(column + 0.5, 0.5 - row, text, ha="center", va="center", fontsize=7, color=ink)
        for name, (reason, _) in step["waiting"].items():
            row = names.index(name)
            rectangle(ax, column, 0.4 - row, 1, 0.2, LINE, edge="none")
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


def _label(ax: Any, x: float, y: float, text: str, filled: Color | None) -> None:
    """Write a block's label on the color that fills it, or, where it has several, on paper of its own."""
    paper: Any = None if filled else {"facecolor": PAPER, "edgecolor": "none", "pad": 1.0}
    ink = ink_on(filled) if filled else INK
    ax.text(x, y, text, ha="center", va="center", fontsize=8, color=ink, bbox=paper)


def _box(ax: Any, x: float, y: float, filled: str, edge: str, style: str, width: float = 0.8) -> None:
    rectangle(ax, x + 0.05, y + 0.05, 0.9, 0.9, filled, edge=edge, linestyle=style, linewidth=width)


def _bare(ax: Any, columns: int, rows: int) -> None:
    ax.set_xlim(0, columns)
    ax.set_ylim(1 - rows, 1)
    ax.set_aspect("equal")
    ax.axis("off")
