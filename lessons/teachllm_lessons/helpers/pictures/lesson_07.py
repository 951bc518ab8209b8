"""Lesson 07: pictures of probabilities, of one draw stage by stage, and of answers at several temperatures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from teachllm_kernels.sampling.random_sample import gumbel_scores_reference
from teachllm_lessons.helpers.lesson_07 import filtered
from teachllm_lessons.palette import BAR, GOOD, INK, LINE, OTHER_BAR, series_color
from teachllm_lessons.picture import Picture, axes, log_axis, short

_SHOWN = 7  # tokens of a distribution that are drawn by name
_WIDTH = 9.0  # inches
_CUT = series_color(5)  # a grey that small text can have


def hot_and_cold(logits: torch.Tensor, word: Callable[[int], str], temperatures: Sequence[float]) -> Picture:
    """One row's probabilities at some temperatures: the likeliest tokens, and all others together."""
    order = logits.argsort(descending=True)[:_SHOWN].tolist()
    figure, ax = axes(_WIDTH, 2.7, ncols=len(temperatures), sharey=True)
    says = []
    for panel, temperature in zip(ax, temperatures, strict=True):
        p = (logits / temperature).softmax(dim=0)
        shares = [*p[order].tolist(), 1.0 - float(p[order].sum())]
        _panel(panel, _names(order, word, len(logits)), shares, [BAR] * _SHOWN + [OTHER_BAR])
        panel.set_title(f"temperature {temperature:g}", fontsize=9, color=INK, loc="left")
        says.append(f"at temperature {temperature:g} the {len(logits) - _SHOWN:,} others have {shares[-1]:.0%}")
    return Picture(figure, "probabilities of the likeliest tokens; " + ", ".join(says))


def draw(
    logits: torch.Tensor,
    word: Callable[[int], str],
    *,
    seed: int,
    output_index: int,
    temperature: float = 1.0,
    **filters: Any,
) -> Picture:
    """One draw, stage by stage: what the model says, what temperature and filters make of it, and the noise."""
    order = logits.argsort(descending=True)[:_SHOWN].tolist()
    names = _names(order, word, len(logits))
    left = filtered(logits, temperature, **filters)
    named = torch.tensor([seed]), torch.tensor([output_index]), torch.tensor([0])
    scores = gumbel_scores_reference(left[None], torch.tensor([temperature]), *named)[0]
    chosen = int(scores.argmax())
    is_kept = (left > -math.inf).tolist()
    others = [i for i in range(len(logits)) if i not in order]
    best_other = max(others, key=lambda i: float(scores[i]))
    marks = [GOOD if i == chosen else BAR if is_kept[i] else OTHER_BAR for i in order]
    marks.append(GOOD if chosen in others else BAR if any(is_kept[i] for i in others) else OTHER_BAR)

    asked = ", ".join(f"{name} {value:g}" for name, value in filters.items())
    figure, ax = axes(_WIDTH, 2.9, ncols=4, sharey=True)
    for panel, title, p in (
        (ax[0], "what the model says", logits.softmax(dim=0)),
        (ax[1], f"temperature {temperature:g}", (logits / temperature).softmax(dim=0)),
        (ax[2], f"{asked}: {sum(is_kept):,} left" if asked else "no filter", (left / temperature).softmax(dim=0)),
    ):
        shares = [*p[order].tolist(), float(p[others].sum())]
        _panel(panel, names, shares, marks if panel is ax[2] else [BAR] * len(names))
        panel.set_title(title, fontsize=9, color=INK, loc="left")
    found = [float(scores[i]) for i in (*order, best_other)]
    _scores(ax[3], names, found, marks)
    says = f"kept: {sum(is_kept):,} of {len(logits):,} tokens; the noise decides for {word(chosen)!r}"
    told = ", ".join(f"{name} {_score(value)}" for name, value in zip(names, found, strict=True))
    return Picture(figure, f"{says}; logit / temperature + noise: {told} (of the others, the best)")


def _scores(ax: Any, names: Sequence[str], found: Sequence[float], colors: Sequence[str]) -> None:
    """Draw a dot per score, as scores have no zero; a token that is cut has none."""
    for name, value, filled in zip(names, found, colors, strict=True):
        if value > -math.inf:
            ax.plot(value, name, "o", color=filled, markersize=6)
            ax.annotate(_score(value), (value, name), (7, 0), textcoords="offset points", va="center", **_small(INK))
        else:
            ax.text(0.03, name, _score(value), transform=ax.get_yaxis_transform(), va="center", **_small(_CUT))
    ax.set_title("logit / temperature + noise", fontsize=9, color=INK, loc="left")
    ax.grid(axis="x", color=LINE, linewidth=0.5, alpha=0.5)
    ax.margins(x=0.3)


def _score(value: float) -> str:
    return f"{value:.1f}" if value > -math.inf else "cut"


def _small(ink: str) -> dict[str, Any]:
    return {"color": ink, "fontsize": 8}


def _names(order: Sequence[int], word: Callable[[int], str], size: int) -> list[str]:
    seen: dict[str, int] = {}
    names = []
    for token_id in order:
        name = word(token_id).replace("$", r"\$")
        seen[name] = seen.get(name, 0) + 1
        names.append(f"`{name}`" + "'" * (seen[name] - 1))
    return [*names, f"{size - len(order):,} others"]


def _panel(ax: Any, names: Sequence[str], values: Sequence[float], colors: Sequence[str]) -> None:
    labels = ["<1%" if 0.0 < value < 0.005 else f"{value:.0%}" for value in values]
    for text, filled in zip(ax.bar_label(ax.barh(names, values, color=colors), labels, padding=3), colors, strict=True):
        text.set(**_small(_CUT if filled == OTHER_BAR and text.get_text() == "0%" else INK))
    if not ax.yaxis_inverted():
        ax.invert_yaxis()
    ax.set_xticks([])
    ax.set_xlim(0, 1.25)


def against_temperature(found: Mapping[str, Mapping[float, tuple[float, int]]], num: int) -> Picture:
    """By filter and temperature: perplexity of what was drawn, and how many answers of `num` differ."""
    figure, ax = axes(_WIDTH, 3.2, ncols=2)
    for index, (name, points) in enumerate(found.items()):
        for panel, which in zip(ax, (0, 1), strict=True):
            ys = [point[which] for point in points.values()]
            panel.plot(list(points), ys, marker="os^D"[index % 4], markersize=4, color=series_color(index), label=name)
    log_axis(ax[0], "y", (1, 10, 100, 1_000, 10_000))
    ax[0].set_ylabel("perplexity of the tokens drawn")
    ax[1].set_ylabel(f"different answers of {num}")
    for panel in ax:
        panel.set_xlabel("temperature")
        panel.grid(color=LINE, linewidth=0.5)
    ax[0].legend(frameon=False, labelcolor=INK, fontsize=9)
    last = {name: list(points.values())[-1] for name, points in found.items()}
    said = ", ".join(
        f"{name}: perplexity {short(perplexity)}, {number} different" for name, (perplexity, number) in last.items()
    )
    return Picture(figure, f"perplexity and number of different answers of {num}; at the highest temperature {said}")
