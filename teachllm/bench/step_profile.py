"""Profile a decode step: its kernels, the gaps between them, and the host beside them.

A batch is brought past its prompts, then a few steps are timed, and as many more run under PyTorch's profiler, which
slows the host down. Kernels are gathered by what they are for, so that each group stands beside its own part of the
floor: weights for the matrix products, K and V for attention. What has no floor is cost that a better engine need not
have. On a CPU operations stand for kernels, and attention, made of products, counts among those.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teachllm.bench.batch import Batch, check_length
from teachllm.roofline import Ceilings, StepShape, Work, step_work
from teachllm.sampling_params import SamplingParams
from teachllm_kernels.kernel_list import ATTENTION, EXCHANGES, KERNELS, OTHER, PRODUCTS, SAMPLING, UNCHOSEN

if TYPE_CHECKING:
    from teachllm import LLM
    from teachllm.engine.llm_engine import Engine

_NUM_STEPS = 16
# This project's kernels have the groups that their list gives them.
_OWN = {name: kernel.group for kernel in KERNELS.values() for name in kernel.names}
_OWN |= {name: group for group, names in UNCHOSEN.items() for name in names}
# A library's kernel belongs to the first group that has a word of its name: the names are the library's to change.
_LIBRARIES = {
    EXCHANGES: ("nccl",),
    ATTENTION: ("paged", "decode", "prefill", "sdpa", "flash", "fmha", "attention"),
    PRODUCTS: ("gemv", "linear", "gemm", "nvjet", "cutlass", "splitk", "addmm", "matmul", "mm"),
    SAMPLING: ("argmax",),
}


@dataclass(frozen=True)
class Event:
    """One kernel's run: microseconds on the profiler's clock."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Row:
    """All runs of one kernel in a step, in the mean of the steps; see `summarize` for what counts as its time."""

    group: str
    name: str
    calls: float
    ms: float


@dataclass(frozen=True)
class Floor:
    """The least time for a group's work, and what sets it: "bandwidth" or "compute"."""

    ms: float
    bound: str


@dataclass(frozen=True)
class StepProfile:
    """A step in the mean.

    Attributes:
        num_steps: how many were looked at.
        wall_ms: from step to step, profiled.
        busy_ms: of it, at least one kernel ran.
        rows: kernels, the longest first.
        floors: by group, what bytes and FLOPs allow at the ceilings; groups without any are missing.
        host_ms: the host at work on a step, not profiled: planning, launching, updating. Waiting is not work.
        unprofiled_ms: from step to step meanwhile.
    """

    num_steps: int
    wall_ms: float
    busy_ms: float
    rows: list[Row]
    floors: dict[str, Floor]
    host_ms: float
    unprofiled_ms: float

    @property
    def gaps_ms(self) -> float:
        """Return the milliseconds in which no kernel ran."""
        return max(self.wall_ms - self.busy_ms, 0.0)

    def groups(self) -> dict[str, float]:
        """Return milliseconds by group, the longest first."""
        sums: dict[str, float] = {}
        for row in self.rows:
            sums[row.group] = sums.get(row.group, 0.0) + row.ms
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def check_profile(llm: LLM, batch: Batch, num_steps: int = _NUM_STEPS) -> None:
    """Check that `profile_decode` can do it.

    Raises:
        ValueError: a prompt and the steps are longer than `max_model_len`, or the batch does not run all at once.
    """
    check_length(llm, max(batch.prompt_lens) + 4 * num_steps + 6)
    num_requests, max_num_seqs = len(batch.prompts), llm.config.max_num_seqs or 0
    if num_requests > max_num_seqs:
        raise ValueError(
            f"{num_requests} requests do not run all at once with max_num_seqs={max_num_seqs}, so no step to profile "
            "has them all: profile fewer, or raise max_num_seqs"
        )


def profile_decode(
    llm: LLM, batch: Batch, ceilings: Ceilings, num_steps: int = _NUM_STEPS, trace_path: Path | None = None
) -> StepProfile:
    """Profile `num_steps` decode steps of a batch, which all of its requests are in, after some not looked at.

    Args:
        trace_path: a trace for Perfetto or chrome://tracing is written there.

    Raises:
        ValueError: as `check_profile`; or requests ended meanwhile.
    """
    from torch.profiler import ProfilerActivity, profile

    check_profile(llm, batch, num_steps)
    engine, names = llm.engine, [f"profile {i}" for i in range(len(batch.prompts))]
    assert llm.config.max_model_len
    # As many tokens as there is room for: the first request goes on while the last ones' prompts are read.
    most = [llm.config.max_model_len - length for length in batch.prompt_lens]
    params = [
        SamplingParams(temperature=batch.temperature, max_tokens=n, ignore_eos=True, detokenize=False) for n in most
    ]
    on_gpu = llm.config.device.startswith("cuda")
    try:
        outputs = [
            engine.add_request(name, {"prompt_token_ids": prompt}, each)
            for name, prompt, each in zip(names, batch.prompts, params, strict=True)
        ]
        while not all(len(output.outputs[0].token_ids) > num_steps for output in outputs):
            engine.step()
        unprofiled_s, host_s = _time_steps(engine, num_steps)
        activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
        with profile(activities=activities) as profiler:
            wall_s, _ = _time_steps(engine, num_steps)
        if any(output.finished for output in outputs):
            raise ValueError("requests ended while steps were profiled: profile fewer, or raise max_model_len")
        lens = [len(output.prompt_token_ids or ()) + len(output.outputs[0].token_ids) for output in outputs]
    finally:
        for name in names:
            engine.abort_request(name)
        while engine.has_unfinished_requests:
            engine.step()
    if trace_path is not None:
        profiler.export_chrome_trace(str(trace_path))
    rows, busy_ms = summarize(_events(profiler, on_gpu), num_steps + 1)
    step = StepShape([1] * len(lens), [length - num_steps // 2 for length in lens], len(lens))
    floors = _floors(step_work(engine.model_config, step), step, llm, ceilings)
    times_ms = [1000 * seconds / num_steps for seconds in (wall_s, host_s, unprofiled_s)]
    return StepProfile(num_steps, times_ms[0], busy_ms, rows, floors, *times_ms[1:])


def _time_steps(engine: Engine, num_steps: int) -> tuple[float, float]:
    """Return (seconds, seconds that the host was at work) of `num_steps` steps, after one that is not counted.

    That one takes the result of the step in front, whose wait is not timed, and pays for the start of a profiler.
    """
    waited = _Waiting(engine.core)
    engine.step()
    waited.seconds = 0.0
    start = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    wall_s = time.perf_counter() - start
    return wall_s, wall_s - waited.stop()


def summarize(events: Iterable[Event], num_steps: int) -> tuple[list[Row], float]:
    """Return rows and busy milliseconds per step.

    Kernels overlap: one that is launched early waits on the card for the one in front. So each is charged with the time
    from the end of the one before it, by order of their ends, and all charges add up to the busy time.
    """
    by_end = sorted(events, key=lambda event: event.end_us)
    starts = list(accumulate((event.start_us for event in reversed(by_end)), min))[::-1]  # first of those not yet ended
    sums: dict[str, tuple[int, float]] = {}
    last_end = float("-inf")
    for event, start in zip(by_end, starts, strict=True):
        calls, total = sums.get(event.name, (0, 0.0))
        sums[event.name] = calls + 1, total + event.end_us - max(start, last_end)
        last_end = event.end_us
    rows = [
        Row(group_of(name), name, calls / num_steps, total / 1000 / num_steps) for name, (calls, total) in sums.items()
    ]
    return sorted(rows, key=lambda row: -row.ms), sum(row.ms for row in rows)


def group_of(name: str) -> str:
    """Return what a kernel is for, by its name."""
    if name in _OWN:
        return _OWN[name]
    lowered = name.lower()
    for group, words in _LIBRARIES.items():
        if any(word in lowered for word in words):
            return group
    return OTHER


class _Waiting:
    """Adds up how long the host waits for results."""

    def __init__(self, core: Any) -> None:
        self._core, self._inner = core, core.executor.sample
        self.seconds = 0.0
        core.executor.sample = self._sample

    def _sample(self, handle: Any) -> Any:
        return _Timed(self._inner(handle), self)

    def add(self, seconds: float) -> None:
        self.seconds += seconds

    def stop(self) -> float:
        """Stop timing, and return the seconds waited."""
        del self._core.executor.sample  # the class's own again
        return self.seconds


class _Timed:
    """A pending output whose wait is counted."""

    def __init__(self, pending: Any, waiting: _Waiting) -> None:
        self._pending, self._waiting = pending, waiting

    def result(self) -> Any:
        start = time.perf_counter()
        try:
            return self._pending.result()
        finally:
            self._waiting.add(time.perf_counter() - start)


def _events(profiler: Any, on_gpu: bool) -> list[Event]:
    from torch.autograd import DeviceType

    if on_gpu:
        found: Sequence[Any] = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    else:  # the outermost operations, which contain the others
        found = [e for e in profiler.events() if e.cpu_parent is None]
    return [Event(e.name, e.time_range.start, e.time_range.end) for e in found]


def _floors(work: Work, step: StepShape, llm: LLM, ceilings: Ceilings) -> dict[str, Floor]:
    """Divide the floor of a step between weights and KV."""
    model = llm.engine.model_config
    weights = step_work(model, StepShape([0] * len(step.query_lens), [0] * len(step.kv_lens), step.num_sampled))
    parts = {
        PRODUCTS: Work(weights.num_bytes, work.matrix_flops, 0, work.w8a8_flops),
        ATTENTION: Work(work.num_bytes - weights.num_bytes, 0, work.attention_flops),
    }
    least = {group: part.seconds(ceilings) for group, part in parts.items()}
    return {group: Floor(1000 * least[group], part.bound(ceilings, least[group])) for group, part in parts.items()}
