"""The ladder (lesson 13): one workload, from recomputing everything to the full engine, one setting a rung.

    rung                  what it changes                        what was wasted before
    recompute             nothing is kept                        -
    KV cache              K and V of earlier tokens are kept     computing them again for every token
    static batching       several requests at once               reading all weights for one token
    continuous batching   who waits joins as soon as one ends    rows of a batch that have finished
    paged blocks          memory in blocks of 16 tokens          room for the longest answer, held by each
    chunked prefill       a prompt is computed in pieces         the others' time while a long prompt is computed
    prefix caching        equal beginnings share blocks          computing the same prompt for each
    graphs, running ahead launches recorded, plans made early    a device that waits for its host
    speculation           drafts, verified together              reading all weights for one token, still
    8-bit weights         half of the bytes to read              bits; not lossless
    two GPUs              each layer is shared                   another GPU

All rungs have the same memory for KV. None but the last but one may change a greedy token.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from teachllm.bench.batch import Batch
from teachllm.bench.floor import floor_seconds, schedule
from teachllm.bench.lossless import Difference, Judge, first_difference
from teachllm.config import EngineConfig
from teachllm.roofline import Ceilings
from teachllm.sampling_params import SamplingParams
from teachllm.trace.figures import Figures, figures

if TYPE_CHECKING:
    from teachllm.engine.llm_engine import Engine
    from teachllm.engine.text.tokenizer import Tokenizer

BLOCK_SIZE = 16
_FIRST = "You teach how language models are served. Answer in short sentences, and give one example each time. "
_WORDS = ("block", "cache", "batch", "queue", "prompt", "kernel", "thread", "memory", "draft", "layer", "graph", "head")
_MAX_PASSES, _NO_FASTER, _LONG_PASS = 10, 0.95, 3.0  # of warm-ups; the last in seconds
_MEASURED = 3  # passes
_NUM_LONG = 4  # of the requests one in so many has a long prompt


@dataclass(frozen=True)
class Size:
    """Describe how much the workload is, so that the slowest rung takes a minute or two.

    Attributes:
        num_requests: all at once.
        short, long: tokens of prompts behind the part that all share.
        outputs: tokens of an answer: the shortest and the longest.
        num_shared: tokens that all prompts begin with.
        max_len: of a sequence; what a contiguous cache holds for each.
        num_slots: tokens that the KV cache has room for.
        max_num_seqs: at once, where memory allows.
        budget: tokens of a step where prompts are cut.
    """

    num_requests: int
    short: tuple[int, int]
    long: tuple[int, int]
    outputs: tuple[int, int]
    num_shared: int
    max_len: int
    num_slots: int
    max_num_seqs: int
    budget: int


LAPTOP = Size(16, (8, 40), (120, 200), (8, 48), 48, 384, 4 * 384, 16, 96)
GPU = Size(48, (32, 160), (480, 800), (16, 96), 192, 1536, 16 * 1536, 48, 384)


@dataclass(frozen=True)
class Rung:
    """A step up.

    Attributes:
        settings: that change; those of the rungs below stay.
        is_lossless: greedy tokens are those of the rungs below.
        why_not: of a device and a number of them, why it cannot be here; None: it can.
        stays: whether the rungs above have its settings, too.
    """

    name: str
    settings: Callable[[Size], dict[str, Any]]
    is_lossless: bool = True
    why_not: Callable[[str, int], str | None] = lambda device, count: None
    stays: bool = True


def _needs_gpu(why: str) -> Callable[[str, int], str | None]:
    return lambda device, count: None if device == "cuda" else why


def _needs_two(device: str, count: int) -> str | None:
    if device != "cuda":
        return "two ranks would share this CPU's cores"
    return None if count > 1 else "there is one GPU"


RUNGS = (
    Rung("recompute", lambda size: {"enable_kv_cache": False}),
    Rung("KV cache", lambda size: {"enable_kv_cache": True}),
    Rung("static batching", lambda size: {"max_num_seqs": size.max_num_seqs}),
    Rung("continuous batching", lambda size: {"scheduling_policy": "fcfs"}),
    Rung(
        "paged blocks",
        lambda size: {"block_size": BLOCK_SIZE, "num_gpu_blocks_override": size.num_slots // BLOCK_SIZE},
    ),
    Rung("chunked prefill", lambda size: {"enable_chunked_prefill": True, "max_num_batched_tokens": size.budget}),
    Rung("prefix caching", lambda size: {"enable_prefix_caching": True}),
    Rung(
        "graphs, running ahead",
        lambda size: {"enforce_eager": False, "async_scheduling": True},
        why_not=_needs_gpu("a CPU computes itself what a GPU would wait for"),
    ),
    Rung("speculation", lambda size: {"speculative_config": {"method": "ngram"}}, stays=False),
    Rung(
        "8-bit weights",
        lambda size: {"quantization": "fp8"},
        is_lossless=False,
        why_not=_needs_gpu("a CPU multiplies dequantized weights"),
        stays=False,
    ),
    Rung("two GPUs", lambda size: {"tensor_parallel_size": 2}, why_not=_needs_two),
)


@dataclass(frozen=True)
class Run:
    """Hold a run of the workload on one rung.

    Attributes:
        of_ceiling: tokens per second, of those that the machine's ceilings allow all requests at once.
        prompts, tokens: of each request.
        path, dtype: of the model.
    """

    figures: Figures
    of_ceiling: float
    prompts: Sequence[Sequence[int]]
    tokens: Sequence[Sequence[int]]
    path: str
    dtype: str


@dataclass(frozen=True)
class Result:
    """Describe what came of a rung: a run, or why there is none."""

    rung: Rung
    run: Run | None = None
    why_not: str | None = None


@dataclass(frozen=True)
class Verdict:
    """On the tokens of a rung.

    Attributes:
        is_good: they are as they have to be.
    """

    text: str
    is_good: bool = True


def workload(size: Size, tokenizer: Tokenizer | None, vocab_size: int) -> Batch:
    """Return the same for every rung: text where there is a tokenizer, else its bytes."""
    rng = random.Random(0)

    def encode(text: str) -> list[int]:
        ids = [byte % vocab_size for byte in text.encode()] if tokenizer is None else tokenizer.encode(text)
        return list(ids)

    def words(num_tokens: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < num_tokens:
            ids += encode(" " + rng.choice(_WORDS))
        return ids[:num_tokens]

    shared = encode(_FIRST)
    shared = (shared * (size.num_shared // len(shared) + 1))[: size.num_shared]
    prompts, output_lens = [], []
    for index in range(size.num_requests):
        lengths = size.long if index % _NUM_LONG == 1 else size.short
        prompts.append(shared + words(rng.randint(*lengths)))
        output_lens.append(rng.randint(*size.outputs))
    return Batch(prompts, output_lens, num_shared=size.num_shared)


def climb(
    engine: EngineConfig, size: Size, ceilings: Ceilings, num_devices: int, num_passes: int = _MEASURED
) -> Iterator[Result]:
    """Run the workload on every rung, from the lowest one up.

    Args:
        engine: the model, dtype and device; the rungs set the rest.
        num_devices: GPUs that there are.
        num_passes: of each rung; the median counts. A long one is measured once.
    """
    device = kind_of_device(engine)
    settings: dict[str, Any] = {
        **{"max_model_len": size.max_len, "block_size": size.max_len, "max_num_seqs": 1},
        **{"num_gpu_blocks_override": size.num_slots // size.max_len, "scheduling_policy": "static"},
        **{"enable_prefix_caching": False, "enable_chunked_prefill": False},
        **{"enforce_eager": True, "async_scheduling": False, "speculative_config": None},
        **{"max_num_batched_tokens": size.max_len},
    }
    for rung in RUNGS:
        why_not = rung.why_not(device, num_devices)
        if why_not is not None:
            yield Result(rung, why_not=why_not)
            continue
        here = settings | rung.settings(size)
        yield Result(rung, _run(replace(engine, **here), size, ceilings, num_passes))
        if rung.stays:
            settings = here


def kind_of_device(engine: EngineConfig) -> str:
    """Return which kind of device: "cpu" or "cuda"."""
    from teachllm.worker.device import select_device

    return select_device(engine.device).type


def _run(config: EngineConfig, size: Size, ceilings: Ceilings, num_passes: int) -> Run:
    from teachllm.engine.llm_engine import Engine

    lines: list[str] = []
    engine = Engine(replace(config, trace_text=False), trace_sink=lines.append)
    try:
        batch = workload(size, engine.tokenizer, engine.model_config.vocab_size)
        header = len(lines)
        # One by one, two requests meet all shapes; so they do on a CPU, which compiles nothing.
        is_all = kind_of_device(config) == "cuda" and config.max_num_seqs != 1
        _warm_up(engine, batch if is_all else Batch(batch.prompts[:2], [2, 2]), _MAX_PASSES if is_all else 1)
        passes: list[tuple[Figures, list[list[int]]]] = []
        for _ in range(num_passes):
            begin = len(lines)
            tokens = _generate(engine, batch)
            passes.append((figures([*lines[:header], *lines[begin:]]), tokens))
            if passes[0][0].duration > _LONG_PASS:
                break
        found, tokens = sorted(passes, key=lambda each: each[0].output_tokens_per_s)[len(passes) // 2]
        ideal = schedule(batch, max(size.budget, size.max_num_seqs), size.max_num_seqs)
        model = engine.model_config
        at_ceiling = sum(batch.output_lens) / floor_seconds(model, ideal, ceilings)
    finally:
        engine.close()
    return Run(found, found.output_tokens_per_s / at_ceiling, batch.prompts, tokens, model.path, model.dtype)


def _warm_up(engine: Engine, batch: Batch, most: int) -> None:
    """Run passes until two in a row gain nothing: then kernels are compiled, graphs captured, draft lengths learned.

    Where nothing is captured, one long pass has met all that there is.
    """
    best, num_idle = math.inf, 0
    for _ in range(most):
        began = time.perf_counter()
        _generate(engine, batch)
        seconds = time.perf_counter() - began
        num_idle = num_idle + 1 if seconds > _NO_FASTER * best else 0
        best = min(best, seconds)
        if num_idle == 2 or (engine.config.enforce_eager and seconds > _LONG_PASS):
            return


def _generate(engine: Engine, batch: Batch) -> list[list[int]]:
    outputs = [
        engine.add_request(
            str(index),
            {"prompt_token_ids": prompt},
            SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True),
        )
        for index, (prompt, num_output) in enumerate(zip(batch.prompts, batch.output_lens, strict=True))
    ]
    while engine.has_unfinished_requests:
        engine.step()
    engine.reset_prefix_cache()  # the next pass finds nothing of this one
    return [list(output.outputs[0].token_ids) for output in outputs]


def compare(engine: EngineConfig, results: Sequence[Result]) -> list[Verdict]:
    """Return for each rung whether its tokens are what they must be: see `lossless.py`."""
    first = next((result.run for result in results if result.run is not None), None)
    judge: Judge | None = None
    verdicts = []
    for result in results:
        run = result.run
        if run is None or first is None or run is first:
            verdicts.append(Verdict(""))
        elif not result.rung.is_lossless:
            num_same = sum(a == b for a, b in zip(run.tokens, first.tokens, strict=True))
            verdicts.append(Verdict(f"{num_same} of {len(run.tokens)} answers are the same"))
        elif (at := first_difference(first.tokens, run.tokens)) is None:
            verdicts.append(Verdict("every token is the first rung's"))
        elif run.dtype == "float32":
            verdicts.append(Verdict(f"request {at[0]} has another token {at[1]}", is_good=False))
        else:
            judge = judge or Judge(run.path, run.dtype, kind_of_device(engine))
            verdicts.append(_judged(judge.differences(run.prompts, run.tokens), len(run.tokens)))
    return verdicts


def _judged(differences: Sequence[Difference], num_requests: int) -> Verdict:
    for each in differences:
        if not each.is_rounding:
            where = f"request {each.request}: token {each.position}"
            return Verdict(f"{where} is {each.gap:.3f} below the best, rounding {each.rounding:.3f}", is_good=False)
    return Verdict(f"{len(differences)} of {num_requests} answers are not float32's, by rounding")


def gain(results: Sequence[Result]) -> float:
    """Return how many times the tokens/s of the first rung the best lossless one has."""
    rates = [each.run.figures.output_tokens_per_s for each in results if each.run and each.rung.is_lossless]
    return max(rates) / rates[0]


def as_json(size: Size, ceilings: Ceilings, results: Sequence[Result], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return all results, except texts and tokens."""
    rungs = []
    for result, verdict in zip(results, verdicts, strict=True):
        run = result.run
        found = None if run is None else {"of_ceiling": run.of_ceiling} | asdict(run.figures)
        rungs.append({"name": result.rung.name, "why_not": result.why_not, "tokens": verdict.text, "figures": found})
    return {"size": asdict(size), "ceilings": asdict(ceilings), "ratio": gain(results), "rungs": rungs}
