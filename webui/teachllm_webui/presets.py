"""Small runs that show one concept each: settings, requests, and what to look at.

All run the embedded model on a CPU. Where the point is a difference, a preset has two variants, which are shown side by
side: the same requests at the same steps under two settings.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from teachllm.config import EngineConfig
from teachllm.sampling_params import SamplingParams
from teachllm_webui.plan import PlannedRequest

QUESTIONS = (
    *("What is a KV cache?", "What is a token?", "What is paged attention?", "What is a GPU?", "What is prefill?"),
    *("What is preemption?", "What is attention?", "What is continuous batching?", "What is prefix caching?"),
    "What is speculative decoding?",
)
SYSTEM = (
    "You are a patient teacher who explains how language models are served. "
    "Answer in short and simple sentences, give one example, and do not use words that a beginner does not know."
)
LONG = " ".join(f"{i}. A block table maps logical blocks of a sequence to physical blocks." for i in range(1, 22))

NOTES = {  # what an application that looks things up would put before the question
    "What is a KV cache?": "A KV cache keeps the attention keys and values of all tokens a request has already "
    "processed. Each new token then computes only its own key and value and reads the rest, instead of recomputing the "
    "whole sequence.",
    "What is paged attention?": "PagedAttention stores the KV cache in blocks of fixed size that may lie anywhere in "
    "memory. A block table maps each request's logical blocks to physical ones.",
    "What is prefill?": "Prefill is the work of computing the prompt: all its tokens pass through the model together, "
    "and their keys and values fill the KV cache. It ends with the first output token.",
}


@dataclass(frozen=True)
class Variant:
    """One side of a preset.

    Attributes:
        title: over its view.
        settings: of the engine, beside the preset's.
    """

    title: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A run that shows something.

    Attributes:
        name: its key.
        title: in the list.
        look_at: one sentence.
        settings: of the engine.
        axis: of the batch timeline: "steps", or "ms" where the point is how long steps take.
        show_at: a step that shows the point, at which the finished run is opened.
    """

    name: str
    title: str
    look_at: str
    requests: tuple[PlannedRequest, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    variants: tuple[Variant, ...] = (Variant(""),)
    axis: str = "steps"
    show_at: int | None = None

    def config(self, variant: Variant) -> EngineConfig:
        fixed: dict[str, Any] = {"model": "teachlm", "device": "cpu", "async_scheduling": False}
        return EngineConfig(**fixed | self.settings | variant.settings)


def _ask(question: str, max_tokens: int = 80, **more: Any) -> PlannedRequest:
    """A chat message; the greedy answer ends by itself, at the latest after so many tokens."""
    sampling = {name: more.pop(name) for name in ("n", "temperature", "seed") if name in more}
    params = replace(SamplingParams(temperature=0.0, max_tokens=max_tokens), **sampling)
    return PlannedRequest(prompt=question, params=params, is_chat=True, **more)


PRESETS = (
    Preset(
        name="paged",
        title="Contiguous versus paged",
        show_at=20,
        look_at="The same memory. Left, a request holds room for its longest possible output, nearly all of it empty; "
        "right, it takes a block of 16 when it needs one, and all of them run at once.",
        requests=tuple(map(_ask, QUESTIONS[:8])),
        settings={"max_model_len": 128, "max_num_seqs": 8, "enable_prefix_caching": False},
        variants=(
            Variant("contiguous: 3 blocks of 128", {"block_size": 128, "num_gpu_blocks_override": 3}),
            Variant("paged: 24 blocks of 16", {"block_size": 16, "num_gpu_blocks_override": 24}),
        ),
    ),
    Preset(
        name="batching",
        title="Static versus continuous batching",
        show_at=34,
        look_at="Left, no request joins until the whole batch has finished, so short requests leave empty rows behind; "
        "right, the next one takes a row as soon as it is free.",
        requests=tuple(_ask(question, (8, 60, 14, 26)[i % 4]) for i, question in enumerate(QUESTIONS)),
        settings={"max_num_seqs": 4, "max_model_len": 128, "num_gpu_blocks_override": 32},
        variants=(
            Variant("static batch", {"scheduling_policy": "static"}),
            Variant("continuous", {"scheduling_policy": "fcfs"}),
        ),
    ),
    Preset(
        name="chunked",
        title="A long prompt, whole or in chunks",
        show_at=12,
        look_at="At step 10 a long prompt arrives. Left, one step computes all of it, and all requests wait for that "
        "step: the longest pause. Right, the budget of 64 cuts it up, and the others get their token in each step.",
        requests=(
            *map(_ask, QUESTIONS[:4]),
            _ask(LONG + " What is a block table?", at_step=10),
            _ask("Once more: " + LONG + " What is a block?", at_step=24),
        ),
        settings={"max_model_len": 1024, "max_num_seqs": 8, "num_gpu_blocks_override": 96},
        variants=(
            Variant("whole: budget 1024", {"max_num_batched_tokens": 1024, "enable_chunked_prefill": False}),
            Variant("in chunks: budget 64", {"max_num_batched_tokens": 64}),
        ),
        axis="ms",
    ),
    Preset(
        name="prefix",
        title="Shared system prompt",
        show_at=26,
        look_at="All prompts begin with the same words. The first request computes them; the others find its blocks "
        "(striped in the pool, underlined green in Tokens) and compute only their own question.",
        requests=tuple(_ask(question, system=SYSTEM, at_step=6 * i) for i, question in enumerate(QUESTIONS[:7])),
        settings={"max_model_len": 256, "max_num_seqs": 6, "num_gpu_blocks_override": 40},
    ),
    Preset(
        name="preemption",
        title="Pool too small",
        show_at=33,
        look_at="Every request grows, and the blocks run out: the youngest loses its own (crossed in the timeline), "
        "queues again, and computes its tokens a second time when there is room.",
        requests=tuple(map(_ask, QUESTIONS[:6])),
        settings={
            "max_model_len": 128,
            "max_num_seqs": 6,
            "num_gpu_blocks_override": 11,
            "enable_prefix_caching": False,
        },
    ),
    Preset(
        name="priorities",
        title="Priorities",
        show_at=24,
        look_at="Requests of priority 5 fill the rows. Those of priority 0 come at step 12 and go before all who wait, "
        "though they came last.",
        requests=(
            *(_ask(question, priority=5) for question in QUESTIONS[:5]),
            *(_ask(question, 16, at_step=12, priority=0) for question in QUESTIONS[5:8]),
        ),
        settings={
            "scheduling_policy": "priority",
            "max_model_len": 128,
            "max_num_seqs": 3,
            "num_gpu_blocks_override": 32,
        },
    ),
    Preset(
        name="parallel",
        title="Parallel sampling",
        show_at=20,
        look_at="Four completions of one prompt: they share its full blocks and differ from the first token they "
        "sample; each writes into blocks of its own.",
        requests=(
            _ask(QUESTIONS[0], system=SYSTEM, n=4, temperature=2.0, seed=1),
            _ask(QUESTIONS[2], system=SYSTEM, n=4, temperature=2.0, seed=2, at_step=15),
        ),
        settings={"max_model_len": 256, "max_num_seqs": 8, "num_gpu_blocks_override": 48},
    ),
    Preset(
        name="speculation",
        title="Guessed ahead, verified in one step",
        show_at=54,
        look_at="Left, one token per step and request. Right, prompt lookup drafts up to four: solid if accepted, "
        "hatched if computed in vain. The last three prompts hold their answers.",
        requests=(
            *(_ask(question, 48) for question in NOTES),
            *(_ask(question, 48, system=notes) for question, notes in NOTES.items()),
        ),
        settings={"max_model_len": 256, "max_num_seqs": 2, "num_gpu_blocks_override": 32},
        variants=(
            Variant("no drafts"),
            Variant(
                "prompt lookup, 4 drafts",
                {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}},
            ),
        ),
    ),
    Preset(
        name="pipeline",
        title="Two stages and their bubbles",
        show_at=20,
        look_at="Two processes have some of the layers each (Ranks). While one request is alone, either waits for the "
        "other (hatched); those that come at step 12 make two batches that take turns, and both stages work.",
        requests=(_ask(QUESTIONS[0]), *(_ask(question, at_step=12) for question in QUESTIONS[1:8])),
        settings={
            "pipeline_parallel_size": 2,
            "max_num_batched_tokens": 64,
            "max_model_len": 128,
            "max_num_seqs": 8,
            "num_gpu_blocks_override": 48,
        },
    ),
)


def preset(name: str) -> Preset:
    """By its name.

    Raises:
        ValueError: there is none.
    """
    for found in PRESETS:
        if found.name == name:
            return found
    raise ValueError(f"there is no preset {name!r}: choose one of {', '.join(found.name for found in PRESETS)}")
