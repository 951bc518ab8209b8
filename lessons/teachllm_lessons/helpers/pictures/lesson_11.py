"""Lesson 11: pictures of grids, of speeds, and of losses beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from teachllm_lessons.helpers.lesson_11 import QUESTION, own, weights
from teachllm_lessons.palette import BAD, BAR, INK, LINE, OTHER_BAR, PAPER, series_color
from teachllm_lessons.picture import Picture, axes, log_axis, short
from teachllm_lessons.watch import Watch


def draw_grids(name: str, output: int, first: int, count: int, bits: int) -> Picture:
    """Draw some weights of an output, and the values that they can be rounded to, with a scale for ever fewer weights.

    Args:
        name: the name of a linear layer.
        first, count: the inputs whose weights are drawn; they are the smallest group.
    """
    weight = weights()[f"{name}.weight"]
    row = weight[output : output + 1]
    part = row[:, first : first + count]
    ranges = {"the weight": weight.reshape(1, -1), "the output": row, f"these {count}": part}
    figure, ax = axes(9, 0.7 + 0.72 * len(ranges))
    said = []
    for place, (what, group) in enumerate(ranges.items()):
        _, scales, zeros = own(group, bits, group.shape[1])
        step, zero = float(scales), int(zeros)
        levels = [(value - zero) * step for value in range(1 << bits)]
        ax.plot([levels[0], levels[-1]], [-place, -place], color=LINE, linewidth=1)
        ax.plot(levels, [-place] * len(levels), "|", color=BAD, markersize=17, markeredgewidth=1.4)
        ax.plot(part[0].tolist(), [-place] * count, "o", color=BAR, markersize=4)
        used = len({round(min(max(float(x) / step + zero, 0), len(levels) - 1)) for x in part[0]})
        said.append(f"one scale for {what}: a step of {step:.4f}, and these weights use {used} of {1 << bits} values")
        text = f"a step is {step:.3f}: {used} of {1 << bits} values"
        ax.text(levels[-1], 0.26 - place, text, ha="right", fontsize=8, color=INK)
    ax.set_yticks([-place for place in range(len(ranges))], [f"one scale for\n{what}" for what in ranges])
    ax.set_ylim(0.7 - len(ranges), 0.7)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("value of a weight")
    ax.set_title(f"dots: {count} weights; lines: what {bits} bits can stand for", fontsize=9, color=INK, loc="left")
    return Picture(figure, "; ".join(said))


def bits_per_weight(bits: int, group_size: int) -> float:
    """Return the bits of a value with its part of the group's scale, of 16 bits, and of its zero."""
    return bits + (16 + bits) / group_size


def draw_trade(panels: Mapping[str, Mapping[tuple[int, int], tuple[float, float]]]) -> Picture:
    """Draw what rounding costs over the bits that it takes.

    Args:
        panels: by model: {(bits, group size): (nats per token, standard error)}.
    """
    figure, both = axes(9, 3.4, ncols=len(panels), sharex=True, sharey=True, squeeze=False)
    told = []
    box = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.5}  # beyond an error bar, and off the lines
    label: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 7, "color": INK, "bbox": box}
    for ax, (model, found) in zip(both[0], panels.items(), strict=True):
        for index, bits in enumerate(sorted({bits for bits, _ in found}, reverse=True)):
            sizes = [size for each, size in found if each == bits]
            xs = [bits_per_weight(bits, size) for size in sizes]
            ys, errors = zip(*(found[bits, size] for size in sizes), strict=True)
            named = f"{bits} bits"
            ax.errorbar(
                xs, ys, errors, marker="os^"[index % 3], markersize=4, capsize=2, color=series_color(index), label=named
            )
            for x, y, error, size in zip(xs, ys, errors, sizes, strict=True):
                end, offset = (max(y - error, y / 20), (0, -4)) if index == 0 else (y + error, (0, 4))
                ax.annotate(str(size), (x, end), offset, va="top" if index == 0 else "bottom", **label)
            losses = ", ".join(f"{short(y)} in groups of {size}" for y, size in zip(ys, sizes, strict=True))
            told.append(f"{model}, {named}: {losses}")
        log_axis(ax, "y")
        ax.set_xlabel("bits per weight, scales and zeros included")
        ax.set_title(f"{model} (numbers: the group's size)", fontsize=9, color=INK, loc="left")
        ax.grid(color=LINE, linewidth=0.5)
        ax.margins(x=0.12)
        ax.legend(frameon=False, labelcolor=INK, fontsize=8)
    both[0][0].set_ylabel("KL divergence, nats per token")
    return Picture(figure, f"KL divergence, nats per token. {'; '.join(told)}")


def draw_speeds(ways: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Picture:
    """Draw the speed of one request and of many prompts, by the dtype of the stored weights."""
    names = [name for name in ("bf16", "fp8", "int8", "int4") if name in ways]
    figure, both = axes(9, 2.2, ncols=2, sharey=True)
    figures = (
        ("one request: ms per token (less is better)", [ways[name]["single"]["tpot_ms"] for name in names]),
        ("64 prompts: tokens/s (more is better)", [ways[name]["batch64"]["prefill_tok_s"] for name in names]),
    )
    for ax, (label, values) in zip(both, figures, strict=True):
        drawn = ax.barh(names, values, color=[OTHER_BAR if name == "bf16" else BAR for name in names])
        ax.bar_label(drawn, [short(value) for value in values], padding=4, color=INK, fontsize=9)
        ax.set_xlabel(label)
        ax.margins(x=0.18)
    both[0].invert_yaxis()
    told = (f"{label}: {', '.join(map(short, values))}" for label, values in figures)
    return Picture(figure, f"{', '.join(names)}. {'; '.join(told)}")


class Together:
    """Some engines that answer the same question, stepped together.

    Args:
        models: {name: model}.
    """

    def __init__(self, models: Mapping[str, str], question: str = QUESTION, max_tokens: int = 24) -> None:
        self.watches = {
            name: Watch(model, num_gpu_blocks_override=24, max_model_len=192, dtype="float32")
            for name, model in models.items()
        }
        for watch in self.watches.values():
            watch.add("A", question, max_tokens, logprobs=1)

    def step(self, steps: int = 1) -> Together:
        """Step all of them."""
        for watch in self.watches.values():
            watch.run(steps)
        return self

    def run(self) -> Together:
        """Run until all have answered."""
        for watch in self.watches.values():
            watch.run()
            watch.close()
        return self

    def said(self) -> Iterator[tuple[str, list[tuple[str, float]]]]:
        """Return each token of each model's answer, and the probability that the model gave it."""
        for name, watch in self.watches.items():
            output = watch.outputs["A"].outputs[0]
            found = []
            for token_id, entries in zip(output.token_ids, output.logprobs or (), strict=True):
                entry = entries[token_id]
                found.append((entry.decoded_token or "", float(torch.tensor(entry.logprob).exp())))
            yield name, found

    def _repr_markdown_(self) -> str:
        rows = []
        for name, said in self.said():
            tokens = " ".join(f"`{token}` {probability:.0%}" for token, probability in said[-6:])
            rows.append(f"| {name} | {len(said)} | {tokens} |")
        return "| model | tokens | the last ones, and how sure it was |\n|---|---|---|\n" + "\n".join(rows)

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {''.join(token for token, _ in said)}" for name, said in self.said())

    def sure(self) -> Picture:
        """Return how sure each model was of each token that it said."""
        figure, ax = axes(9, 2.6)
        for index, (name, said) in enumerate(self.said()):
            ax.plot(
                [100 * probability for _, probability in said],
                marker="o",
                markersize=4,
                label=name,
                color=series_color(index),
            )
        ax.set_xlabel("output token")
        ax.set_ylabel("its probability, %")
        ax.set_ylim(0, 105)
        ax.grid(color=LINE, linewidth=0.5)
        ax.legend(frameon=False, labelcolor=INK, fontsize=9)
        least = {name: min((p, at) for at, (_, p) in enumerate(said)) for name, said in self.said()}
        told = (f"{name}: at least {p:.0%}, at token {at}" for name, (p, at) in least.items())
        return Picture(figure, f"probability of each token that the model said; {'; '.join(told)}")
