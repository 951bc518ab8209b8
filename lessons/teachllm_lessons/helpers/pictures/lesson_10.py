"""Lesson 10: pictures of a verification and of where its tokens come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from teachllm_lessons.palette import BAD, GOOD, HIT, INK, LINE, PALE, PAPER
from teachllm_lessons.picture import Picture, axes, rectangle

_USELESS = "of no use"


def draw_verification(newest: list[str], drafts: list[str], tokens: list[str], num_held: int) -> Picture:
    """The four rows of a step that verifies drafts."""
    width = 1 + len(drafts)
    figure, ax = axes(1.6 + 1.2 * (width + 1), 2.3)
    rows = ("newest token", "drafts", "the model's own", "gained")
    for row, label in enumerate(rows):
        ax.text(-0.1, 0.5 - row, label, ha="right", va="center", fontsize=9, color=INK)
    _cell(ax, 0, 0, newest[0], PALE)
    for at, word in enumerate(drafts):
        is_known = at <= num_held
        filled = GOOD if at < num_held else BAD if at == num_held else PALE
        _cell(ax, at + 1, 1, word, filled, faint=not is_known or at >= num_held)
    for at in range(width):
        word = tokens[at] if at < len(tokens) else _USELESS
        _cell(ax, at + 1, 2, word, HIT if at == num_held else GOOD if at < num_held else "none", faint=at > num_held)
    for at, word in enumerate(tokens):
        _cell(ax, at + 1, 3, word, HIT if at == num_held else GOOD)
    ax.set_xlim(-1.3, width + 1.05)
    ax.set_ylim(-3.05, 1.05)
    ax.axis("off")
    kind = "bonus" if num_held == len(drafts) else "recovered"
    says = f"{num_held} of {len(drafts)} drafts accepted; the step gives {len(tokens)} tokens, the last is {kind}"
    ax.set_title(says, fontsize=9, color=INK, loc="left")
    return Picture(figure, f"{says}: drafts {drafts}, gained {tokens}")


def _cell(ax: Any, x: float, row: int, word: str, filled: str, *, faint: bool = False) -> None:
    is_plain = filled in ("none", PALE)
    face = filled if is_plain or not faint else "none"
    edge = LINE if is_plain else filled
    style = "--" if faint else "-"
    rectangle(ax, x + 0.04, 0.1 - row, 0.92, 0.8, face, edge=edge, linestyle=style, linewidth=1.0)
    ink = INK if is_plain or faint else PAPER
    size, slant = (7, "italic") if word == _USELESS else (9, "normal")
    ax.text(
        x + 0.5, 0.5 - row, word.replace("$", r"\$"), ha="center", va="center", fontsize=size, color=ink, style=slant
    )


def where_it_comes_from(p: Sequence[float], q: Sequence[float]) -> Picture:
    """Draw the proof: how much of each token's probability accepted drafts and recovered tokens contribute."""
    figure, ax = axes(8, 3.0)
    names = [f"token {chr(ord('a') + index)}" for index in range(len(p))]
    both = [min(a, b) for a, b in zip(p, q, strict=True)]
    lacking = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    surplus = [max(b - a, 0.0) for a, b in zip(p, q, strict=True)]
    ax.bar(names, both, color=GOOD, width=0.5, label="min(p, q): drafted and accepted")
    ax.bar(names, lacking, bottom=both, color=HIT, width=0.5, label="p - q: drafted too rarely, recovered")
    rest = [(name, more, below) for name, more, below in zip(names, surplus, both, strict=True) if more]
    xs, heights, bottoms = zip(*rest, strict=True)
    says = "q - p: drafted too often, rejected"
    ax.bar(xs, heights, bottom=bottoms, color="none", edgecolor=BAD, hatch="///", width=0.5, label=says)
    for index, share in enumerate(p):
        ax.plot([index - 0.3, index + 0.3], [share, share], color=INK, linewidth=1.5)
        ax.text(index + 0.33, share, f"p = {share:g}", color=INK, fontsize=8, va="center", ha="left")
    ax.set_xlim(-0.5, len(p) - 0.3)
    ax.set_ylabel("probability")
    ax.legend(frameon=False, labelcolor=INK, fontsize=8, loc="lower left", bbox_to_anchor=(0.0, 1.08), ncols=3)
    says = f"{sum(both):.0%} of drafts are accepted; rejected {sum(surplus):.0%}, recovered {sum(lacking):.0%}"
    ax.set_title(says, fontsize=9, color=INK, loc="left")
    told = (f"{name}: {a:g} of {b:g} drafted" for name, a, b in zip(names, both, q, strict=True))
    return Picture(
        figure, f"accepted and recovered shares add up to p, whatever q is: {says}. Accepted {', '.join(told)}"
    )
