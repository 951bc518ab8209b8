"""Note what an engine does besides computing, so that a long step can be explained.

compiled    a kernel was launched for the first time, and compiled
loaded      a kernel was launched for the first time, and found compiled on disk
recorded    a CUDA graph was recorded, whole or in pieces
collected   Python collected garbage
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from teachllm.worker.gpu.cuda_graphs import FullKey, Graphs
from teachllm_kernels.first_launch import observing_first_launches

_MAX_NAMES = 3  # in a description; the others are counted
_SHORTEST_COLLECTION_S = 0.001  # Python collects young objects in many steps, and a short collection explains nothing

Clock = Callable[[], float]


@dataclass(frozen=True)
class EngineEvent:
    """Describe one thing that an engine did besides computing.

    Attributes:
        time: when it was over, on the clock of `observing`.
        kind: "compiled", "loaded", "recorded" or "collected".
        name: of the kernel or the graph; "" for a collection.
        seconds: how long it took; 0 for kernels, which are only reported when they are done.
    """

    time: float
    kind: str
    name: str = ""
    seconds: float = 0.0


@contextmanager
def observing(clock: Clock) -> Iterator[list[EngineEvent]]:
    """Yield a list to which every event inside is added, whichever thread it happens in."""
    events: list[EngineEvent] = []

    def add(kind: str, name: str = "", seconds: float = 0.0) -> None:
        events.append(EngineEvent(clock(), kind, name, seconds))

    with ExitStack() as stack:
        stack.enter_context(observing_first_launches(lambda name, hit: add("loaded" if hit else "compiled", name)))
        stack.enter_context(_observing_recordings(clock, lambda name, seconds: add("recorded", name, seconds)))
        stack.enter_context(_observing_collections(clock, lambda seconds: add("collected", seconds=seconds)))
        yield events


def describe(events: Sequence[EngineEvent]) -> str:
    """Describe events in a few words, like "compiled _paged_decode, recorded decodes of 64"; "" if none is worth it."""
    compiled = {event.name for event in events if event.kind == "compiled"}
    parts = []
    for kind in ("compiled", "loaded", "recorded"):
        names = list(dict.fromkeys(event.name for event in events if event.kind == kind))
        if kind == "loaded":  # what was compiled while a graph was recorded is loaded again to be run before
            names = [name for name in names if name not in compiled]
        if names:
            more = [f"{len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
            parts.append(f"{kind} {_listed(names[:_MAX_NAMES] + more)}")
    collecting_s = sum(event.seconds for event in events if event.kind == "collected")
    if collecting_s >= _SHORTEST_COLLECTION_S:
        parts.append(f"garbage collection {1000 * collecting_s:.0f} ms")
    return ", ".join(parts)


def graph_name(key: Hashable) -> str:
    """Return what a recording holds, with padding: "decodes of 64", "prompts of 128 tokens"."""
    if isinstance(key, FullKey):
        if not key.decode_len:
            return f"prompts of {key.num_tokens} tokens"
        num_drafts = key.decode_len - 1
        if not num_drafts:
            return f"decodes of {key.num_seqs}"
        return f"decodes of {key.num_seqs - 1} with {num_drafts} drafts"  # one sequence owns the padding
    match key:
        case ("mixed", int(size)):
            return f"mixed steps of {size} tokens"
    return str(key)


@contextmanager
def _observing_recordings(clock: Clock, add: Callable[[str, float], None]) -> Iterator[None]:
    def observed(record: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(record)
        def call(graphs: Graphs, key: Hashable, run: Callable[..., Any]) -> bool:
            began = clock()
            try:
                return record(graphs, key, run)
            finally:
                add(graph_name(key), clock() - began)

        return call

    whole, pieces = Graphs.capture, Graphs.capture_pieces
    Graphs.capture, Graphs.capture_pieces = observed(whole), observed(pieces)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Graphs.capture, Graphs.capture_pieces = whole, pieces  # type: ignore[method-assign]


@contextmanager
def _observing_collections(clock: Clock, add: Callable[[float], None]) -> Iterator[None]:
    began = 0.0

    def observe(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = clock()
        else:
            add(clock() - began)

    gc.callbacks.append(observe)
    try:
        yield
    finally:
        gc.callbacks.remove(observe)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
