"""The lessons: which concept each is about, where the engine has it, and who described it first.

`python -m teachllm_lessons.index` writes `lessons/README.md` from this list; a test holds the two together, and looks
whether the files are there and name their lesson.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from teachllm_lessons.faults import ROOT

FOLDER = ROOT / "lessons"
PAGE = FOLDER / "README.md"


@dataclass(frozen=True)
class Lesson:
    """One notebook.

    Attributes:
        name: of its file, without the ending.
        concept: what it is about.
        question: what it answers.
        sources: files of the engine, best first; the docstring of each names the lesson.
        papers: who described it, and when.
        preset: the visualizer's preset that shows it; "": the page as it opens.
        viz_flags: further flags of `teachllm viz`.
        viz_shows: what to look at there.
    """

    name: str
    concept: str
    question: str
    sources: tuple[str, ...]
    papers: tuple[str, ...]
    preset: str
    viz_shows: str
    viz_flags: str = ""

    @property
    def source_labels(self) -> list[str]:
        """Return what the sources are called: their file's name, with its folder where two have the same."""
        names = [source.rpartition("/")[2] for source in self.sources]
        pairs = zip(names, self.sources, strict=True)
        return [name if names.count(name) == 1 else "/".join(source.split("/")[-2:]) for name, source in pairs]

    @property
    def viz_link(self) -> str:
        """Return where the documentation shows the preset, relative to the notebook."""
        return f"../docs/visualizer.md#{_anchor(self.preset)}"

    @property
    def number(self) -> str:
        return self.name[:2]

    @property
    def notebook(self) -> Path:
        return FOLDER / f"{self.name}.ipynb"


LESSONS = (
    Lesson(
        "00_first_token",
        "tokens, logits, decoding",
        "How does text become the next word?",
        ("teachllm/models/decoder.py", "teachllm/engine/text/detokenizer.py"),
        ("Vaswani et al., Attention Is All You Need, 2017",),
        preset="batching",
        viz_shows="each answer's text as it grows, token by token",
    ),
    Lesson(
        "01_kv_cache",
        "attention, KV cache",
        "What is computed again for every token, and why are K and V kept, but not Q?",
        ("kernels/teachllm_kernels/attention/paged_attention.py", "teachllm/core/memory.py"),
        ("Shazeer, Fast Transformer Decoding (multi-query attention), 2019", "Ainslie et al., GQA, 2023"),
        preset="paged",
        viz_shows="a pool of blocks that fill as K and V are written",
    ),
    Lesson(
        "02_paged_blocks",
        "paged KV cache",
        "Why does most of a reserved cache stay empty?",
        ("teachllm/core/block_pool.py", "teachllm/core/kv_cache_manager.py", "teachllm/layers/attention.py"),
        ("Kwon et al., PagedAttention, SOSP 2023",),
        preset="paged",
        viz_shows="the same memory in slots and in blocks",
    ),
    Lesson(
        "03_continuous_batching",
        "continuous batching",
        "Why wait for the slowest of a batch?",
        ("teachllm/core/scheduler.py", "teachllm/core/policy.py"),
        ("Yu et al., Orca, OSDI 2022",),
        preset="batching",
        viz_shows="the same queue, static and continuous",
    ),
    Lesson(
        "04_chunked_prefill",
        "token budget, chunked prefill",
        "Why does all text stop when a long prompt comes?",
        ("teachllm/core/scheduler.py",),
        ("Agrawal et al., Sarathi-Serve, OSDI 2024",),
        preset="chunked",
        viz_shows="a long prompt, whole and in chunks",
    ),
    Lesson(
        "05_prefix_caching",
        "prefix caching",
        "Why compute the same beginning for every request?",
        ("teachllm/core/prefix_cache.py", "teachllm/core/kv_cache_manager.py"),
        ("Zheng et al., SGLang, 2024",),
        preset="prefix",
        viz_shows="a system prompt that is computed once",
    ),
    Lesson(
        "06_preemption",
        "preemption, priorities, fairness",
        "Which request gives way when memory runs out?",
        ("teachllm/core/scheduler.py", "teachllm/core/policy.py"),
        ("Kwon et al., PagedAttention, SOSP 2023", "Sheng et al., Fairness in Serving Large Language Models, 2024"),
        preset="preemption",
        viz_shows="a pool that is too small, and who gives way",
    ),
    Lesson(
        "07_sampling",
        "sampling",
        "How do 150,000 numbers become one token?",
        ("teachllm/sampling/sampler.py", "teachllm/sampling/filters.py", "kernels/teachllm_kernels/sampling/philox.py"),
        ("Holtzman et al., The Curious Case of Neural Text Degeneration, 2019", "Salmon et al., Philox, SC 2011"),
        preset="parallel",
        viz_shows="four completions of one prompt",
    ),
    Lesson(
        "08_triton_attention",
        "attention kernels",
        "How is attention computed without ever writing down its scores?",
        (
            "kernels/teachllm_kernels/attention/decode_tile.py",
            "kernels/teachllm_kernels/attention/paged_decode.py",
            "kernels/teachllm_kernels/attention/merge_splits.py",
        ),
        ("Dao et al., FlashAttention, 2022", "Milakov and Gimelshein, Online normalizer for softmax, 2018"),
        preset="paged",
        viz_shows="the block tables that the kernel walks",
    ),
    Lesson(
        "09_graphs_and_async",
        "CUDA graphs, asynchronous scheduling",
        "Why does a fast GPU wait for Python?",
        ("teachllm/worker/gpu/cuda_graphs.py", "teachllm/engine/engine_core.py", "teachllm/core/in_flight.py"),
        ("NVIDIA, CUDA graphs, 2018", "Zhu et al., NanoFlow, 2024"),
        preset="",
        viz_shows="the host's share of each step",
        viz_flags=" --async-scheduling",
    ),
    Lesson(
        "10_speculation",
        "speculative decoding",
        "How can one pass give several tokens, and change none?",
        (
            "kernels/teachllm_kernels/speculation/rejection_reference.py",
            "teachllm/core/drafts.py",
            "teachllm/spec_decode/ngram.py",
        ),
        ("Leviathan et al., ICML 2023", "Chen et al., 2023", "Cai et al., Medusa, 2024", "Li et al., EAGLE, 2024"),
        preset="speculation",
        viz_shows="drafts, accepted and rejected",
    ),
    Lesson(
        "11_quantization",
        "quantization",
        "How few bits can a weight have?",
        (
            "teachllm/layers/weights/scheme.py",
            "teachllm/quantization/formats/gptq.py",
            "teachllm/quantization/algorithms/gptq.py",
        ),
        ("Frantar et al., GPTQ, 2022", "Lin et al., AWQ, 2023", "Cheng et al., AutoRound, 2023"),
        preset="",
        viz_shows="the bytes of each step",
        viz_flags=" --quantization int4",
    ),
    Lesson(
        "12_parallelism",
        "tensor, pipeline, expert and data parallelism",
        "What does a second GPU buy, and what does it cost?",
        ("teachllm/layers/linear.py", "teachllm/distributed/group.py", "teachllm/engine/replicas/data_parallel.py"),
        ("Shoeybi et al., Megatron-LM, 2019", "Huang et al., GPipe, 2018", "Lepikhin et al., GShard, 2020"),
        preset="pipeline",
        viz_shows="two stages and their bubbles",
    ),
    Lesson(
        "13_ladder",
        "where the speed comes from",
        "What did each lesson bring?",
        ("teachllm/bench/ladder.py", "teachllm/config.py"),
        ("Williams et al., Roofline, 2009",),
        preset="batching",
        viz_shows="two rungs of the ladder side by side",
    ),
)

_HEAD = """# Lessons

Step through the engine that serves, one concept at a time. Every notebook asks a question, shows the source that
answers it, steps the engine, has you predict a number and write a piece that the running engine takes, plants a fault
to find, and measures what it brought. They are shown here with their outputs; to run them:

```console
$ make lessons                # starts Jupyter
$ teachllm lesson list
$ teachllm lesson open 05     # one of them
$ teachllm lesson check 05    # what you have written in it: runs your saved notebook, and says which pieces hold
```

Every lesson runs on a laptop's CPU in about half a minute. Read them in order, or start where your question is; each
says what it needs. [GLOSSARY.md](GLOSSARY.md) has the terms, with the Chinese ones beside them.

| lesson | concept | question | source | described in |
|---|---|---|---|---|
"""


def page() -> str:
    """The index, as Markdown."""
    rows = []
    for lesson in LESSONS:
        name = lesson.name[3:].replace("_", " ")
        labelled = zip(lesson.source_labels, lesson.sources, strict=True)
        sources = "<br>".join(f"[`{label}`](../{source})" for label, source in labelled)
        papers = "<br>".join(lesson.papers)
        link = f"[{lesson.number} {name}]({lesson.name}.ipynb)"
        rows.append(f"| {link} | {lesson.concept} | {lesson.question} | {sources} | {papers} |")
    return _HEAD + "\n".join(rows) + "\n"


def _anchor(preset: str) -> str:
    """Return the heading's anchor in the documentation of a preset's title."""
    from teachllm_webui.presets import preset as find_preset

    title = find_preset(preset).title if preset else "What it shows"
    return "".join(each for each in title.lower().replace(" ", "-") if each.isalnum() or each == "-")


def find(number: str) -> Lesson:
    """The lesson of a number, "5" or "05".

    Raises:
        ValueError: there is none.
    """
    for lesson in LESSONS:
        if lesson.number == number.zfill(2):
            return lesson
    raise ValueError(f"there is no lesson {number!r}: choose one of {', '.join(each.number for each in LESSONS)}")


if __name__ == "__main__":
    sys.exit(PAGE.write_text(page(), encoding="utf-8") and 0)
