"""Lesson 13, the ladder: a small workload for every rung, the settings to find, and a fault that one rung betrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from teachllm.bench.ladder import RUNGS, Size
from teachllm_lessons.exercise import Exercise, require
from teachllm_lessons.palette import BAR, INK, OTHER_BAR
from teachllm_lessons.picture import Picture, axes, short
from teachllm_lessons.watch import Watch

SMALL = Size(8, (8, 24), (80, 120), (6, 16), 48, 192, 3 * 192, 8, 64)  # the laptop's ladder, in less than half a minute
NUM_SLOTS, MAX_LEN = SMALL.num_slots, SMALL.max_len
INSTRUCTIONS = (
    "You teach how language models are served. Answer in one short sentence, and give one example each time. "
)
QUESTIONS = ("a block", "a token", "a batch", "a prompt", "prefill", "decode", "the queue", "a draft")
MOST_TOKENS, MOST_STEPS = 320, 28

Settings = Mapping[str, Any]


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


def contract_settings(piece: Callable[[], Settings]) -> int:
    """Check what may be turned and how far; nothing runs yet."""
    from teachllm.config import EngineConfig

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


def draw_ladder(rungs: Sequence[Mapping[str, Any]], title: str) -> Picture:
    """Tokens per second and the fraction of the ceiling of each rung that ran.

    Args:
        rungs: as `bench.ladder.as_json` gives them.
    """
    from matplotlib.ticker import NullFormatter

    ran = [rung for rung in rungs if rung["figures"] is not None]
    names = [rung["name"] for rung in ran]
    rates = [rung["figures"]["output_tokens_per_s"] for rung in ran]
    shares = [100 * rung["figures"]["of_ceiling"] for rung in ran]
    figure, both = axes(9, 0.8 + 0.34 * len(ran), ncols=2, sharey=True)
    lossless = {rung.name for rung in RUNGS if rung.is_lossless}
    colors = [BAR if name in lossless else OTHER_BAR for name in names]
    for ax, values, label in ((both[0], rates, "output tokens/s"), (both[1], shares, "% of the ceiling")):
        drawn = ax.barh(names, values, color=colors)
        ax.bar_label(drawn, [short(value) for value in values], padding=4, color=INK, fontsize=9)
        ax.set_xscale("log")
        ax.xaxis.set_minor_formatter(NullFormatter())  # they would lie on each other
        ax.set_xlabel(label)
        ax.margins(x=0.25)
    both[0].invert_yaxis()
    figure.suptitle(title + ("\ngrey: may change tokens" if OTHER_BAR in colors else ""), color=INK, fontsize=10)
    said = ", ".join(f"{name} {short(rate)} tokens/s" for name, rate in zip(names, rates, strict=True))
    return Picture(figure, f"{title}: {said}")
