"""Short ways to an AsyncLLM and to what its streams give; and what all who wait for an engine hear when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any, TypeVar

import pytest

from teachllm import RequestOutput, SamplingParams
from teachllm.engine.async_llm import AsyncLLM
from teachllm.worker.errors import EngineDeadError
from tests.waiting import HANG_SECONDS
from tests.worker.engines import drain, make_engine, tokens

T = TypeVar("T")
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@contextmanager
def running(**changes: Any) -> Iterator[AsyncLLM]:
    """Serve a tiny checkpoint; `changes` of settings, and the arguments of `AsyncLLM`."""
    limits = {name: changes.pop(name) for name in ("max_requests", "on_step", "on_end", "is_paused") if name in changes}
    with closing(AsyncLLM(make_engine(**changes), **limits)) as llm:
        yield llm


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run it in a thread of its own: a browser's tests leave a loop running in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, main).result()


async def answer(llm: AsyncLLM, prompt: list[int], params: SamplingParams = GREEDY, **options: Any) -> RequestOutput:
    """Read one stream to its end."""
    *_, last = [output async for output in llm.generate(prompt, params, **options)]
    return last


def expected(prompts: list[list[int]], params: SamplingParams = GREEDY, **changes: Any) -> list[list[list[int]]]:
    """Return what an engine gives that is stepped here."""
    engine = make_engine(**changes)
    outputs = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    drain(engine)
    return [tokens(output) for output in outputs]


async def until(condition: Callable[[], Any]) -> None:
    """Return once the condition holds, and leave the loop to others meanwhile."""
    async with asyncio.timeout(HANG_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


def num_of(llm: AsyncLLM, what: Callable[[], Any]) -> Any:
    """Look at the engine in its own thread."""
    return llm.call(what).result(HANG_SECONDS)


def go_round(llm: AsyncLLM) -> None:
    """Return when the engine's thread has been through its loop a few times: it has done what it may do."""
    for _ in range(3):
        num_of(llm, lambda: None)


async def all_hear_that(why: str, streams: Sequence[AsyncGenerator[Any]]) -> None:
    """Read streams to their end, which for each is an error that says why."""
    for stream in streams:
        with pytest.raises(EngineDeadError, match=why):
            async with asyncio.timeout(HANG_SECONDS):
                async for _ in stream:
                    pass
        await stream.aclose()
