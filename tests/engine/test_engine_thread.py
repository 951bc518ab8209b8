"""The thread that an engine steps in: its pace, single steps, what fails in it and outside of it, and its end."""

from __future__ import annotations

import asyncio
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from teachllm.engine import engine_thread
from teachllm.engine.async_llm import AsyncLLM
from teachllm.trace.recorder import Recorder
from teachllm.worker.errors import EngineDeadError
from tests.engine.streams import GREEDY, answer, expected, go_round, num_of, run, running, until
from tests.waiting import HANG_SECONDS, wait_for
from tests.worker.engines import FaultyExecutor, random_ids, tokens


def num_steps(llm: AsyncLLM) -> int:
    count: int = num_of(llm, lambda: llm._engine.core.scheduler.num_steps)
    return count


# -- pace and single steps ---------------------------------------------------------------------------------


def test_a_pace_is_kept_and_orders_do_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1e6, monotonic=lambda: clock.now)
    monkeypatch.setattr(engine_thread, "time", clock)

    async def main(llm: AsyncLLM) -> None:
        llm.set_pace(3600)
        task = asyncio.create_task(answer(llm, random_ids(4)))
        await until(lambda: num_steps(llm) == 1)
        for count in (1, 2, 3):
            go_round(llm)
            assert num_steps(llm) == count
            clock.now += 3599
            go_round(llm)
            assert num_steps(llm) == count
            clock.now += 1
            go_round(llm)
        llm.set_pace(0)  # counts at once
        assert tokens(await task) == expected([random_ids(4)])[0]
        for wrong in (-1, float("nan"), 1e11):
            with pytest.raises(ValueError, match="a pace of"):
                llm.set_pace(wrong)

    with running() as llm:
        run(main(llm))


def test_it_pauses_steps_and_goes_on() -> None:
    async def main(llm: AsyncLLM) -> None:
        llm.pause()
        llm.step(5)  # nothing to do: they are not kept for later
        task = asyncio.create_task(answer(llm, random_ids(4)))
        await until(lambda: num_of(llm, lambda: len(llm._streams)) == 1)
        go_round(llm)
        assert num_steps(llm) == 0
        llm.step(2)
        await until(lambda: num_steps(llm) == 2)
        go_round(llm)
        assert num_steps(llm) == 2 and llm.is_paused and not task.done()
        llm.resume()
        assert tokens(await task) == expected([random_ids(4)])[0]
        assert num_steps(llm) == 20

    with running() as llm:
        run(main(llm))


def test_pausing_forgets_the_single_steps_that_were_asked_for() -> None:
    llms: list[AsyncLLM] = []

    def pause_after_two(error: Exception | None) -> None:
        if llms[0]._engine.core.scheduler.num_steps == 2:
            llms[0].pause()

    async def main(llm: AsyncLLM) -> None:
        llms.append(llm)
        llm.step(20)  # it is not paused
        llm.pause()
        task = asyncio.create_task(answer(llm, random_ids(4)))
        await until(lambda: num_of(llm, lambda: len(llm._streams)) == 1)
        go_round(llm)
        assert not task.done() and num_steps(llm) == 0
        llm.step(30)
        await until(lambda: num_steps(llm) == 2)
        go_round(llm)
        assert num_steps(llm) == 2
        llm.resume()
        await task

    with running(on_step=pause_after_two) as llm:
        run(main(llm))


# -- what fails --------------------------------------------------------------------------------------------


def test_an_error_that_comes_before_its_reader_looks_is_raised_to_it() -> None:
    def fail(error: Exception | None) -> None:
        raise OSError("no space left")

    async def main(llm: AsyncLLM) -> None:
        task = asyncio.create_task(answer(llm, random_ids(4)))
        await asyncio.sleep(0)
        llm._thread.join(HANG_SECONDS)  # all has happened when the loop goes on
        with pytest.raises(OSError, match="no space left"):
            await task

    with running(on_step=fail) as llm:
        run(main(llm))


def test_who_has_just_asked_when_the_thread_ends_is_told_so() -> None:
    def fail(error: Exception | None) -> None:
        tasks.append(asyncio.run_coroutine_threadsafe(answer(llm, random_ids(5)), loop))
        wait_for(lambda: llm._orders)  # its order is queued, and will not be carried out
        raise OSError("no space left")

    tasks, ended = [], []
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    with running(on_step=fail, on_end=ended.append) as llm:
        first = asyncio.run_coroutine_threadsafe(answer(llm, random_ids(4)), loop)
        with pytest.raises(OSError, match="no space left"):
            first.result(HANG_SECONDS)
        with pytest.raises(OSError, match="no space left"):
            tasks[0].result(HANG_SECONDS)
    assert [str(error) for error in ended] == ["no space left"]
    loop.call_soon_threadsafe(loop.stop)


def test_a_step_that_fails_ends_every_stream_and_the_next_request_is_served() -> None:
    faults: list[Exception] = []

    def make(config: Any, inner: Any) -> FaultyExecutor:
        return FaultyExecutor(inner, lambda point: faults.pop() if faults and point == "result" else None)

    async def main(llm: AsyncLLM) -> None:
        llm.pause()
        tasks = [asyncio.create_task(answer(llm, random_ids(4, seed=i))) for i in range(3)]
        await until(lambda: num_of(llm, lambda: len(llm._streams)) == 3)
        faults.append(RuntimeError("out of something"))
        llm.resume()
        for task in tasks:
            with pytest.raises(RuntimeError, match="out of something"):
                await task
        assert tokens(await answer(llm, random_ids(4))) == expected([random_ids(4)])[0]

    with running(make_executor=make) as llm:
        run(main(llm))


def test_what_goes_wrong_outside_of_a_step_ends_everything_and_hangs_nobody() -> None:
    def fail(error: Exception | None) -> None:
        raise OSError("no space left")

    async def main(llm: AsyncLLM) -> None:
        with pytest.raises(OSError, match="no space left"):
            await asyncio.wait_for(answer(llm, random_ids(4)), HANG_SECONDS)
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await answer(llm, random_ids(4))

    with running(on_step=fail) as llm:
        run(main(llm))


def test_after_the_death_of_a_process_later_calls_say_what_has_died() -> None:
    def fail(error: Exception | None) -> None:
        raise EngineDeadError("the process of rank 1 has ended with SIGKILL")

    async def main(llm: AsyncLLM) -> None:
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=r"^the process of rank 1 has ended with SIGKILL$"):
                await asyncio.wait_for(answer(llm, random_ids(4)), HANG_SECONDS)

    with running(on_step=fail) as llm:
        run(main(llm))


def test_a_trace_that_cannot_be_written_any_more_ends_streams_with_that_error() -> None:
    async def main(llm: AsyncLLM) -> None:
        recorder = llm._engine.core.recorder
        assert recorder is not None
        stream = llm.generate(random_ids(4), GREEDY)
        await anext(stream)

        def full(line: str) -> None:
            raise OSError("no space left")

        recorder._sink = full
        with pytest.raises(OSError, match="no space left"):
            while True:
                await asyncio.wait_for(anext(stream), HANG_SECONDS)

    with running(recorder=Recorder(lambda line: None, itertools.count().__next__)) as llm:
        run(main(llm))


def test_closing_ends_what_is_left_and_later_calls_say_so() -> None:
    async def main(llm: AsyncLLM) -> None:
        llm.pause()
        task = asyncio.create_task(answer(llm, random_ids(4)))
        await until(lambda: num_of(llm, lambda: len(llm._streams)) == 1)
        await asyncio.to_thread(llm.close)
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await task
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await answer(llm, random_ids(4))
        llm.close()

    with running() as llm:
        run(main(llm))
