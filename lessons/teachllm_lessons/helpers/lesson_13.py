"""Lesson 13, the ladder: a small workload for every rung, the settings to find, and a fault that shows at one rung."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median_low
from typing import Any

from teachllm.bench.ladder import RUNGS, Result, Size, climb
from teachllm.config import EngineConfig
from teachllm.roofline import Ceilings
from teachllm_lessons.exercise import Exercise, require
from teachllm_lessons.palette import BAR, INK, LINE, OTHER_BAR
from teachllm_lessons.picture import Picture, axes, log_axis, short
from teachllm_lessons.predict import Prediction
from teachllm_lessons.watch import Watch

SMALL = Size(8, (8, 24), (80, 120), (6, 16), 48, 192, 3 * 192, 8, 64)  # the laptop's ladder, in less than half a minute
NUM_SLOTS, MAX_LEN = SMALL.num_slots, SMALL.max_len
INSTRUCTIONS = (
    "You teach how language models are served. Answer in one short sentence, and give one example each time. "
)
QUESTIONS = ("a block", "a token", "a batch", "a prompt", "prefill", "decode", "the queue", "a draft")
MOST_TOKENS, MOST_STEPS = 320, 28

Settings = Mapping[str, Any]

COMPUTED_AT_THE_TOP = Prediction(
    asks="Tokens computed at the top",
    answer=216,
    because="The first prompt is computed whole, 60 tokens. The 48 tokens that all begin with are three full blocks, "
    "so each of the seven others computes 12: 144 prompt tokens in all. Of ten output tokens nine are computed again "
    "as inputs, as the last one ends the request: 8 * 9 = 72. Without a prefix cache it would be {uncached:,} tokens, "
    "and without any cache {bottom:,}: that rung computes the whole sequence for every token, {times:.0f} times as "
    "much as the top. How much faster it is, is another question: a step costs more than its tokens.",
    unit=" tokens",
    traps={
        552: "That is without the prefix cache: seven of eight prompts compute 48 tokens that are there already.",
        224: "Each answer's last token is sampled and never computed: nothing comes after it.",
        264: "The second prompt begins in the step of the first, and finds its full blocks already: it computes 12 "
        "tokens, not 60.",
        144: "Those are the prompts. Output tokens are computed, too, when they are read.",
        152: "That has one output token per request. Nine of ten are computed, one per step.",
    },
)
NUM_SHARED, NUM_OWN, NUM_OUTPUT = 48, 12, 10


def bottom() -> dict[str, Any]:
    """The settings of the ladder's first rung with a cache: one request at a time, each in room for the longest."""
    return {
        **{"block_size": MAX_LEN, "num_gpu_blocks_override": NUM_SLOTS // MAX_LEN, "max_model_len": MAX_LEN},
        **{"max_num_seqs": 1, "scheduling_policy": "static", "max_num_batched_tokens": MAX_LEN},
        **{"enable_chunked_prefill": False, "enable_prefix_caching": False},
    }


def top() -> dict[str, Any]:
    """Settings as the ladder's upper rungs have them."""
    settings = bottom()
    for rung in RUNGS:
        if rung.why_not("cpu", 0) is None and rung.stays and rung.name != "recompute":
            settings |= rung.settings(SMALL)
    return settings


@dataclass(frozen=True)
class Served:
    """Describe what it took to serve the workload.

    Attributes:
        steps: turns of the loop in which something was computed.
        computed: tokens that were computed, prompts' and answers'.
        watch: the engine, closed.
    """

    steps: int
    computed: int
    tokens: dict[str, list[int]]
    watch: Watch


def serve(settings: Settings) -> Served:
    """Eight questions behind the same instructions, one of them with a long text, all at once."""
    with Watch(**settings) as watch:
        for index, topic in enumerate(QUESTIONS):
            text = INSTRUCTIONS + f"What is {topic}?"
            if index == 3:
                text += " Explain paged attention, continuous batching and chunked prefill to me." * 3
            watch.add("ABCDEFGH"[index], text, max_tokens=6 + 2 * index)
        watch.run()
        steps = watch.trace.steps
        computed = sum(scheduled["num_tokens"] for step in steps for scheduled in step["scheduled"])
        return Served(len(steps), computed, watch.all_tokens, watch)


def tokens_of_eight(settings: Settings) -> int:
    """Return how many tokens an engine computes for eight requests that begin alike, given all at once."""
    with Watch(**settings) as watch:
        shared = [100 + number for number in range(NUM_SHARED)]
        for index in range(8):
            own = [1000 + NUM_OWN * index + number for number in range(NUM_OWN)]
            watch.add("ABCDEFGH"[index], shared + own, NUM_OUTPUT)
        steps = watch.run().trace.steps
        return sum(scheduled["num_tokens"] for step in steps for scheduled in step["scheduled"])


@dataclass(frozen=True)
class Climbed:
    """Several passes up the ladder.

    Attributes:
        results: of each rung the pass with the median of tokens per second.
        rates: tokens per second of each rung that ran, of every pass.
    """

    results: list[Result]
    rates: dict[str, list[float]]

    @property
    def spread(self) -> dict[str, tuple[float, float]]:
        """Return the least and the most tokens per second of each rung."""
        return {name: (min(rates), max(rates)) for name, rates in self.rates.items()}


def climb_often(engine: EngineConfig, ceilings: Ceilings, num_passes: int = 3) -> Climbed:
    """Climb the whole ladder so many times, since one pass of a second says little on a machine with other work."""
    passes = [list(climb(engine, SMALL, ceilings, num_devices=0, num_passes=1)) for _ in range(num_passes)]
    results, rates = list[Result](), dict[str, list[float]]()
    for tried in zip(*passes, strict=True):
        runs = {each.run.figures.output_tokens_per_s: each for each in tried if each.run is not None}
        if not runs:
            results.append(tried[0])
            continue
        rates[tried[0].rung.name] = [each.run.figures.output_tokens_per_s for each in tried if each.run is not None]
        results.append(runs[median_low(runs)])
    return Climbed(results, rates)


def contract_settings(piece: Callable[[], Settings]) -> int:
    """Check what may be turned and how far; nothing runs yet."""
    settings = piece()
    require(isinstance(settings, Mapping), f"settings() is {settings!r}: give a dict of EngineConfig's fields")
    try:
        config = EngineConfig(device="cpu", **settings).resolve(MAX_LEN)
    except (TypeError, ValueError) as error:
        require(False, f"EngineConfig refuses it: {error}")
    blocks = config.num_gpu_blocks_override
    require(blocks is not None, "num_gpu_blocks_override is not set: say how many blocks the KV cache has")
    slots = (blocks or 0) * config.block_size
    require(
        slots <= NUM_SLOTS,
        f"{blocks} blocks of {config.block_size} are {slots} slots, and the memory has room for {NUM_SLOTS}",
    )
    require(config.max_model_len == MAX_LEN, f"max_model_len must stay {MAX_LEN}: the requests may be that long")
    return 4


@cache
def _at_the_bottom() -> Served:
    return serve(bottom())


def live_settings(piece: Callable[[], Settings]) -> str:
    expected, found = _at_the_bottom(), serve(piece())
    for name, tokens in expected.tokens.items():
        require(found.tokens[name] == tokens, f"changes what request {name} is answered: that must never happen")
    require(
        found.computed <= MOST_TOKENS,
        f"computes {found.computed} tokens, {MOST_TOKENS} are enough: all eight prompts begin alike",
    )
    require(
        found.steps <= MOST_STEPS,
        f"takes {found.steps} steps, {MOST_STEPS} are enough: each reads all weights, however few tokens are in it",
    )
    times = expected.steps / found.steps
    return (
        f"The engine answers the same with it, in {found.steps} steps in place of {expected.steps} ({times:.1f} times "
        f"fewer), and computes {found.computed} tokens in place of {expected.computed}."
    )


SETTINGS = Exercise(
    lesson="13",
    name="settings",
    contract=contract_settings,
    live=live_settings,
    reference=top,
    hints=(
        "Steps and tokens are two wastes. Which lesson made several requests share a step, which let more of them fit "
        "into the same memory, and which computes an equal beginning once?",
        "Memory is `num_gpu_blocks_override * block_size` slots. Small blocks let all eight requests in; then "
        "`max_num_seqs`, `scheduling_policy` and `enable_prefix_caching` decide.",
        f"Start from `bottom()` and change: `block_size=16`, `num_gpu_blocks_override={NUM_SLOTS} // 16`, "
        "`max_num_seqs=8`, `scheduling_policy='fcfs'`, `enable_prefix_caching=True`.",
    ),
)


def which_rung() -> None:
    """The answers of every rung from the KV cache on, against those of the first of them."""
    settings, first = bottom() | {"check_invariants": False}, dict[str, list[int]]()
    for rung in RUNGS[1:]:
        if rung.why_not("cpu", 0) is not None:
            continue
        here = settings | rung.settings(SMALL)
        try:
            tokens = serve(here).tokens
        except Exception as error:  # a fault may do anything
            print(f"{rung.name:20} ends: {error!r}")
            continue
        first = first or tokens
        wrong = [name for name in tokens if tokens[name] != first[name]]
        print(f"{rung.name:20} {'the same answers' if not wrong else f'{len(wrong)} of {len(tokens)} answers differ'}")
        if rung.stays:
            settings = here


def told_ladder(rungs: Sequence[Mapping[str, Any]]) -> str:
    """Return throughput, steps and latencies of each rung that ran, as a table of plain text."""
    rows = [f"{'':22} tokens/s   steps   TTFT, mean   gaps, median      p99"]
    for rung in rungs:
        if (found := rung["figures"]) is None:
            continue
        ms = [1000 * each for each in (found["ttft"]["mean"], found["itl"]["p50"], found["itl"]["p99"])]
        rate, steps = found["output_tokens_per_s"], found["num_steps"]
        rows.append(f"{rung['name']:22} {rate:8,.0f} {steps:7,} {ms[0]:9,.0f} ms {ms[1]:11.2f} ms {ms[2]:5.1f} ms")
    return "\n".join(rows)


def draw_ladder(
    rungs: Sequence[Mapping[str, Any]], title: str, spread: Mapping[str, tuple[float, float]] | None = None
) -> Picture:
    """Draw throughput, time to a first token and gaps of each rung that ran, as dots on logarithmic axes.

    Args:
        rungs: as `bench.ladder.as_json` gives them.
        spread: the least and the most tokens per second of each rung, where it ran several times.
    """
    ran = {rung["name"]: rung["figures"] for rung in rungs if rung["figures"] is not None}
    names = list(ran)
    rates = [found["output_tokens_per_s"] for found in ran.values()]
    first, p50, p99 = (
        [1000 * found[which][key] for found in ran.values()]
        for which, key in (("ttft", "mean"), ("itl", "p50"), ("itl", "p99"))
    )
    lossless = {rung.name for rung in RUNGS if rung.is_lossless}
    colors = [BAR if name in lossless else OTHER_BAR for name in names]
    shares = [f"{short(rate)} ({found['of_ceiling']:.1%})" for rate, found in zip(rates, ran.values(), strict=True)]
    style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8, "color": INK}
    figure, panels = axes(9, 1.0 + 0.34 * len(ran), ncols=3, sharey=True, width_ratios=(1.4, 1, 1))
    for ax, values, labels, label in (
        (panels[0], rates, shares, "output tokens/s (of the ceiling)"),
        (panels[1], first, [short(value) for value in first], "mean time to first token, ms"),
        (panels[2], p99, [short(value) for value in p99], "gaps: o median, dot p99, ms"),
    ):
        ax.scatter(values, names, s=30, color=colors, zorder=3)
        for name, value, text in zip(names, values, labels, strict=True):
            end = (spread or {}).get(name, (value, value))[1] if ax is panels[0] else value
            ax.annotate(text, (end, name), (6, 0), **style)
        log_axis(ax, "x", multiples=(1,) if max(values) > 100 * min(values) else (1, 2, 5))
        ax.grid(axis="y", color=LINE, linewidth=0.5)
        ax.set_xlabel(label, fontsize=9)
        ax.margins(x=0.3 if ax is panels[1] else 0.45)
    panels[2].scatter(p50, names, s=30, facecolors="none", edgecolors=colors, zorder=3)
    for name, value in zip(names, p50, strict=True):
        panels[2].annotate(short(value), (value, name), (-6, 0), ha="right", **style)
    for name, (least, most) in (spread or {}).items():
        panels[0].plot([least, most], [name, name], color=BAR, linewidth=2, solid_capstyle="butt")
    panels[0].invert_yaxis()
    grey = "\ngrey: may change tokens" if OTHER_BAR in colors else ""
    figure.suptitle(title + grey, color=INK, fontsize=10)
    told = "; ".join(
        f"{name}: {short(rate)} tokens/s, first token after {short(ttft)} ms, gaps of {short(half)} ms (median) "
        f"and {short(gap)} ms (p99)"
        for name, rate, ttft, half, gap in zip(names, rates, first, p50, p99, strict=True)
    )
    return Picture(figure, f"{title}: {told}")
