"""Lesson 00, the first token: a look inside one pass, what is judged, and what planted faults look like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from teachllm.engine.overrides import EngineOverrides
from teachllm.engine.text.detokenizer import IncrementalDetokenizer
from teachllm.engine.text.tokenizer import Tokenizer
from teachllm.layers.attention import AttentionMetadata
from teachllm.sampling.sampler import Sampler, SamplerOutput
from teachllm.sampling.shared_vocabulary import Columns
from teachllm.sampling_params import SamplingParams
from teachllm_lessons.exercise import Exercise, require, run_with
from teachllm_lessons.palette import HIT, INK, LINE, PALE, Color, color, ink_on
from teachllm_lessons.picture import Picture, axes, rectangle
from teachllm_lessons.predict import Prediction
from teachllm_lessons.watch import Watch

Choose = Callable[[torch.Tensor], torch.Tensor]

FORESEEN = Prediction(
    asks="Of the first 24 predictions, A's tokens",
    answer=24,
    because="A position's state depends on the tokens up to it and on none after it (*causal* attention), so it makes "
    "no difference whether the rest is there already: each position predicts what it predicted when it was the last "
    "one. *Checking* 24 tokens takes one pass; *finding* them takes 24. Speculative decoding (lesson 10) lives on that "
    "difference. (Rounding may differ in the last digits between one pass and 24, so two tokens that are all but "
    "equally likely can change places. Here none did.)",
    traps={
        0: "A position predicts the token after it, not itself: the prompt's last one predicts A's first.",
        1: "Only the first would be right if a pass predicted for its last position alone. It does so for each.",
        23: "The prompt's last position predicts A's first token, so 24 positions predict 24 tokens. The answer's last "
        "token goes in as well, and its prediction would be token 25.",
    },
)

# -- a look inside ---------------------------------------------------------------------------------------------


def shown(text: str) -> str:
    """A token's text where spaces and line ends would not be seen."""
    return text.replace("\n", "\\n").replace(" ", "·")


def strip(tokenizer: Tokenizer, token_ids: Sequence[int], per_row: int = 16) -> Picture:
    """Tokens as boxes: the text of each, and its id."""
    rows = -(-len(token_ids) // per_row)
    figure, ax = axes(0.72 * min(per_row, len(token_ids)), 0.62 * rows)
    for index, token_id in enumerate(token_ids):
        x, y = index % per_row, -(index // per_row)
        is_special = token_id in tokenizer.special_ids
        _box(ax, x, y, 1, 1, PALE if is_special else color(index))
        ink = INK if is_special else ink_on(color(index))
        text = shown(tokenizer.token_text(token_id))
        ax.text(x + 0.5, y + 0.62, text, ha="center", va="center", fontsize=9 if len(text) < 8 else 6, color=ink)
        ax.text(x + 0.5, y + 0.25, str(token_id), ha="center", va="center", fontsize=7, color=ink)
    ax.set_xlim(0, min(per_row, len(token_ids)))
    ax.set_ylim(1 - rows, 1.02)
    ax.axis("off")
    texts = [shown(tokenizer.token_text(token_id)) for token_id in token_ids]
    return Picture(figure, f"{len(token_ids)} tokens: {' | '.join(texts)}")


@dataclass(frozen=True)
class Inside:
    """Describe what one pass over a sequence computes, position by position.

    Attributes:
        token_ids: that went in.
        residuals: [1 + num_layers, num_tokens, hidden_size], the sum that travels through the layers: after the
            embedding, and after each layer; after the last one normalized.
        logits: [1 + num_layers, num_tokens, vocab_size], what the output head makes of each of them.
    """

    tokenizer: Tokenizer
    token_ids: list[int]
    residuals: torch.Tensor
    logits: torch.Tensor

    def predictions(self) -> list[int]:
        """After the last layer: of each position, the token that is to come next."""
        return self.logits[-1].argmax(dim=-1).tolist()

    def lens(self, last: int = 8) -> Picture:
        """Return the output head's best tokens for each state of the last positions, as if the model ended there."""
        best = self.logits[:, -last:].softmax(dim=-1).max(dim=-1)
        num_rows, num_columns = best.values.shape
        figure, ax = axes(1.6 + 1.05 * num_columns, 0.9 + 0.42 * num_rows)
        for row in range(num_rows):
            for column in range(num_columns):
                probability = float(best.values[row, column])
                is_answer = row == num_rows - 1 and column == num_columns - 1
                filled = shade(probability)
                _box(ax, column, row, 1, 1, filled, edge=HIT if is_answer else None)
                text = shown(self.tokenizer.token_text(int(best.indices[row, column])))
                ink = ink_on(filled)
                ax.text(column + 0.5, row + 0.5, text[:12], ha="center", va="center", fontsize=8, color=ink)
        ax.set_xlim(0, num_columns)
        ax.set_ylim(0, num_rows)
        names = [shown(self.tokenizer.token_text(token_id))[:12] for token_id in self.token_ids[-last:]]
        ax.set_xticks([0.5 + column for column in range(num_columns)], names)
        ax.set_yticks(
            [0.5 + row for row in range(num_rows)], ["embedding", *(f"layer {n}" for n in range(1, num_rows))]
        )
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        ax.set_xlabel("token that went in")
        ax.set_title("the most likely next token, read after each layer; darker: surer", fontsize=9, color=INK)
        says = [shown(self.tokenizer.token_text(token_id)) for token_id in self.predictions()[-last:]]
        pairs = ", ".join(f"{name} {said}" for name, said in zip(names, says, strict=True))
        surest = f"{says[-1]}, with probability {float(best.values[-1, -1]):.2f}"
        return Picture(figure, f"after the last layer each position predicts ({pairs}); the last one: {surest}")


@torch.inference_mode()
def look_inside(watch: Watch, token_ids: Sequence[int]) -> Inside:
    """The engine's model over one sequence, all of it in one pass, with a KV cache of its own."""
    runner: Any = watch.engine.core.executor
    model, config = runner._runner.model, watch.engine.model_config
    ids, length = torch.tensor(token_ids), len(token_ids)
    shape = (1, length, config.num_kv_heads, config.head_size)
    caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.num_layers)]
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, length], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.zeros((1, 1), dtype=torch.int32),
        slot_mapping=torch.arange(length),
        query_lens=[length],
        kv_lens=[length],
    )
    residuals: dict[int, torch.Tensor] = {}

    def aux_out(layer: int) -> Callable[[torch.Tensor], None]:
        return lambda residual: residuals.__setitem__(layer, residual.clone())

    hidden = model(
        ids, torch.arange(length), caches, metadata, aux_hidden_states={n: aux_out(n) for n in range(config.num_layers)}
    )
    normed = [model.norm(residuals[layer].clone(), None)[0] for layer in range(config.num_layers)]
    logits = torch.stack([model.logits(each) for each in (*normed, hidden)])
    tokenizer = watch.engine.tokenizer
    assert tokenizer is not None
    return Inside(tokenizer, list(token_ids), torch.stack([*residuals.values(), hidden]), logits)


def life_of_a_request() -> Picture:
    """Draw which part of the engine has a request when, from the HTTP call to the words of the answer."""
    lanes = ("API server: HTTP and text", "engine core: what runs next", "worker: model and KV cache")
    figure, ax = axes(10, 4.6)
    for lane, name in enumerate(lanes):
        _box(ax, 3 * lane + 0.04, -7.7, 2.92, 8.3, PALE)
        ax.text(3 * lane + 1.5, 0.2, name, ha="center", va="center", fontsize=9, color=INK)
    _box(ax, 3.12, -6.6, 5.76, 4.0, "none", edge=HIT)
    loop = "once per step: no token amid a prompt, usually one, several with speculation"
    ax.text(6.0, -6.95, loop, ha="center", va="center", fontsize=8, color=HIT)
    stations = (
        (0, -0.7, "POST /v1/chat/completions", "server/openai/chat.py"),
        (0, -1.9, "template, tokenizer: token ids", "engine/input_processor.py"),
        (1, -1.9, "waits in the queue", "core/scheduler.py: add"),
        (1, -3.3, "plan: which tokens of which request", "core/scheduler.py: schedule"),
        (2, -3.3, "plan to flat tensors", "worker/cpu/input_batch.py: prepare"),
        (2, -4.6, "layers; last position's logits", "worker/cpu/model_runner.py: execute"),
        (2, -5.9, "logits to one token id", "sampling/sampler.py: sample"),
        (1, -5.9, "token appended; has it ended?", "core/scheduler.py: update"),
        (0, -5.9, "ids to text, whole characters", "engine/text/detokenizer.py: append"),
        (0, -7.1, "one event of the stream", "server/http/sse.py"),
    )
    for lane, y, what, where in stations:
        x, ink = 3 * lane + 0.25, ink_on(color(lane))
        _box(ax, x, y - 0.42, 2.5, 0.84, color(lane))
        ax.text(x + 1.25, y + 0.16, what, ha="center", va="center", fontsize=8, color=ink)
        ax.text(x + 1.25, y - 0.2, where, ha="center", va="center", fontsize=6.5, color=ink, family="monospace")
    for (from_lane, from_y, *_), (to_lane, to_y, *_) in pairwise(stations):
        if from_lane == to_lane:
            x = 3 * from_lane + 1.5
            _arrow(ax, (x, from_y - 0.42), (x, to_y + 0.42))
        else:
            start, end = (2.75, 0.25) if to_lane > from_lane else (0.25, 2.75)
            _arrow(ax, (3 * from_lane + start, from_y), (3 * to_lane + end, to_y))
    for x, y, carries in ((3, -1.9, "ids"), (6, -3.3, "executor"), (6, -5.9, "ids"), (3, -5.9, "ids")):
        ax.text(x, y + 0.1, carries, ha="center", va="bottom", fontsize=7, color=INK)
    _arrow(ax, (4.5, -5.48), (4.5, -3.72))
    ax.text(4.56, -4.6, "no: the next plan", ha="left", va="center", fontsize=7.5, color=INK)
    ax.set_xlim(0, 9)
    ax.set_ylim(-7.75, 0.7)
    ax.axis("off")
    said = "; ".join(f"{what} ({where})" for _, _, what, where in stations)
    return Picture(figure, f"a request's way: {said}; from the plan to the appended token {loop}")


def _box(ax: Any, x: float, y: float, width: float, height: float, filled: Any, *, edge: str | None = None) -> None:
    x, y, width, height = x + 0.03, y + 0.03, width - 0.06, height - 0.06
    rectangle(ax, x, y, width, height, filled, edge=edge or LINE, linewidth=2.0 if edge else 0.6)


def shade(share: float) -> Color:
    """From nearly white to a full blue."""
    pale, full = (0.90, 0.94, 0.97), color(4)
    red, green, blue = (p + share * (f - p) for p, f in zip(pale, full, strict=True))
    return red, green, blue


def _arrow(ax: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "color": INK, "linewidth": 1.0})


def streamed(tokenizer: Tokenizer, text: str) -> list[tuple[str, str, str]]:
    """Return, per token of a text as it arrives, its bytes' text alone, all ids decoded at once, and what is shown."""
    detokenizer = IncrementalDetokenizer(tokenizer, [], SamplingParams(max_tokens=None))
    token_ids = tokenizer.encode(text)
    rows = []
    for count, token_id in enumerate(token_ids, start=1):
        detokenizer.append([token_id])
        rows.append((tokenizer.decode([token_id]), tokenizer.decode(token_ids[:count]), detokenizer.text))
    return rows


def seconds_per_token(watch: Watch, lengths: Sequence[int], steps: int = 2) -> list[float]:
    """Return how long the engine takes for one more token after so many, the fastest of a few steps."""
    some = watch.ids("Why does one more token take as long as it does?") * (1 + max(lengths) // 16)
    found = []
    for length in lengths:
        before = len(watch.trace.lines)
        watch.add(f"of {length}", some[:length], max_tokens=1 + steps)
        watch.run()
        lines = [line for line in watch.trace.lines[before:] if line["event"] == "step"]
        found.append(min(line["end"] - line["time"] for line in lines[1:]))
    return found


# -- what is judged --------------------------------------------------------------------------------------------


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The engine's own choice for requests without a temperature."""
    return Columns(logits.shape[-1]).argmax(logits)


def sampler_of(choose: Choose) -> Callable[..., Sampler]:
    """Build the engine's sampler with the reader's choice for greedy requests, for `EngineOverrides.make_sampler`."""

    class Choosing(Sampler):
        def sample(self, logits: torch.Tensor, rows: list[int], *more: Any) -> SamplerOutput:
            if not self.is_plain_greedy(rows):
                return super().sample(logits, rows, *more)
            return SamplerOutput(choose(logits))

    return Choosing


def contract_choose(piece: Choose) -> int:
    """Check that each row gives one id: that of its largest logit, and the lowest id of equally large ones."""
    inf = float("inf")
    rows_and_ids: tuple[tuple[list[list[float]], list[int], str], ...] = (
        ([[0.5]], [0], "one row, one token: there is no choice"),
        ([[0.0, 1.0]], [1], "the id is the place of the largest number, not the number"),
        ([[1.0, 0.0]], [0], "the id is the place of the largest number"),
        ([[-5.0, -2.0, -9.0]], [1], "logits may all be negative; the largest counts, not the one farthest from zero"),
        ([[0.0, 1.0], [3.0, 2.0]], [1, 0], "each row is a request of its own"),
        ([[0.0, 9.0], [3.0, 2.0], [0.0, 1.0]], [1, 0, 1], "each row is a request of its own, as many as there are"),
        ([[2.0, 2.0]], [0], "of equals the lowest id, or two runs of one prompt may differ"),
        ([[1.0, 3.0, 3.0, 3.0]], [1], "of equals the lowest id, or two runs of one prompt may differ"),
        ([[-inf, -3.0, -inf]], [1], "a token that is not allowed has -inf"),
        ([[1000.0, 2000.0, 1500.0]], [1], "exp(1000.0) is more than a float holds: the largest logit needs no softmax"),
        ([[1e-6, 2e-6]], [1], "a small difference is a difference"),
    )
    for logits, expected, why in rows_and_ids:
        _require_ids(piece, torch.tensor(logits), expected, why)
    generator = torch.Generator().manual_seed(0)
    many_rows = (1, 2, 3, 8, 33)
    for num_rows in many_rows:
        logits_of_many = torch.randn((num_rows, 4096), generator=generator).mul_(4).round_()  # so many are equal
        many = [row.index(max(row)) for row in logits_of_many.tolist()]
        _require_ids(piece, logits_of_many, many, "the vocabulary has 4,096 tokens, and many of these are equal")
    return len(rows_and_ids) + len(many_rows)


def _require_ids(piece: Choose, logits: torch.Tensor, expected: list[int], why: str) -> None:
    found = piece(logits.clone())
    given = f"choose({logits.tolist()})" if logits.numel() < 9 else f"choose(logits of shape {list(logits.shape)})"
    require(isinstance(found, torch.Tensor), f"{given} is {found!r}: give a tensor of ids")
    shape = list(found.shape)
    require(shape == [len(expected)], f"{given} has shape {shape}: give [{len(expected)}], one id a row")
    require(not found.dtype.is_floating_point, f"{given} is {found.tolist()}, of {found.dtype}: ids are integers")
    if (ids := found.tolist()) != expected:
        row = next(index for index, (one, other) in enumerate(zip(ids, expected, strict=True)) if one != other)
        at = f"row {row} of {given} is {ids[row]}, and should be {expected[row]}" if len(expected) > 1 else ""
        require(False, f"{at or f'{given} is {ids}, and should be {expected}'}: {why}.")


def live_choose(piece: Choose) -> str:
    watch = run_with(EngineOverrides(make_sampler=sampler_of(piece)))
    count = sum(map(len, watch.all_tokens.values()))
    return f"The engine ran with it: each of {2 * count} tokens is the one that its own sampler takes."


CHOOSE = Exercise(
    lesson="00",
    name="choose",
    contract=contract_choose,
    live=live_choose,
    reference=greedy,
    hints=(
        "Each row has one number for each token of the vocabulary, and the place of a number is its token's id. You "
        "look for the place of the largest, row by row.",
        "`torch.argmax` finds places. Without `dim` it looks for one place in all rows together; rows are dimension 0, "
        "and what you search along is the other one.",
        "`logits.argmax(dim=-1)` gives [R], and of equal numbers the first. The engine's own does no more.",
    ),
)


# -- what planted faults look like -----------------------------------------------------------------------------


def first_tokens() -> None:
    """Print the first tokens of some answers."""
    with Watch(num_gpu_blocks_override=48, max_model_len=128) as watch:
        for name, question in (("A", "What is a KV cache?"), ("B", "What is a block table?")):
            watch.add(name, question, 9)
            watch.run()
            tokenizer = watch.engine.tokenizer
            assert tokenizer is not None
            print(f"{name}: " + " | ".join(shown(tokenizer.token_text(token_id)) for token_id in watch.tokens(name)))


def a_stream() -> None:
    """Print what a reader sees while a text with long characters arrives."""
    tokenizer = Tokenizer.load("teachllm/assets/teachlm")
    for _, _, text in streamed(tokenizer, "naïve café"):
        print(repr(text))
