"""An engine that is traced, and what its trace has to say of it, taken from the engine itself."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from teachllm import SamplingParams
from teachllm.core.request import Request
from teachllm.core.scheduler import Scheduler
from teachllm.engine.llm_engine import Engine
from teachllm.trace.recorder import Recorder, Texts
from teachllm.trace.replay import state_text
from tests.worker.engines import make_engine, random_ids


def live_state(scheduler: Scheduler) -> str:
    """Pool and tables as they are. Blocks that a plan in flight holds on to are their request's still."""
    kv = scheduler.kv
    tables: dict[str, list[int]] = {}
    for entries in kv.pinned.values():
        for name, block_ids in entries:
            tables.setdefault(name, []).extend(block_ids)
    for name, request in scheduler.requests.items():
        if request.block_ids:
            tables.setdefault(name, []).extend(request.block_ids)
    blocks = [[block.ref_count, block.block_hash.hex() if block.block_hash else None] for block in kv.pool.blocks]
    return state_text(blocks, [block.block_id for block in kv.pool.free_blocks()], tables)


def spell(token_ids: Sequence[int], request: Request | None = None) -> list[str]:
    return [f"<{token_id}>" for token_id in token_ids]


def traced_engine(
    on_line: Callable[[Engine, str], None] | None = None,
    text: Texts | None = spell,
    clock: Callable[[], float] = time.perf_counter,
    **changes: Any,
) -> tuple[Engine, list[str]]:
    """An engine of a tiny checkpoint and the lines of its trace so far.

    Args:
        on_line: called with the engine and each line but the header, when it has been written.
    """
    lines: list[str] = []

    def sink(line: str) -> None:
        lines.append(line)
        if on_line is not None and len(lines) > 1:
            on_line(engine, line)

    engine = make_engine(recorder=Recorder(sink, clock, text), **changes)
    return engine, lines


def busy(engine: Engine, num_requests: int = 32, output_lens: tuple[int, int] = (5, 26)) -> None:
    """Adds requests of several lengths, of which half begin alike, and some have more than one completion."""
    rng, prefix = random.Random(0), random_ids(40, seed=99)
    for i in range(num_requests):
        own = random_ids(rng.randint(1, 30), seed=1000 + i)
        prompt = prefix[: rng.choice([16, 32, 40])] + own if i % 2 else own
        num_tokens = rng.randint(*output_lens)
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, n=2 if i % 8 == 5 else 1, ignore_eos=True)
        engine.add_request(str(i), prompt, params)
