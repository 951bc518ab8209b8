"""AsyncLLM: streams beside each other, aborts, errors, back-pressure, and a pace that can be set from outside.

What `serving` serves is asked of an engine in this process and of one whose core has its own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from teachllm import EngineConfig, RequestOutput, SamplingParams
from teachllm.engine.async_llm import AsyncLLM
from teachllm.engine.observability.stats import StepStats
from teachllm.trace.recorder import Recorder
from tests.worker.doors import FaultyExecutor, drain, make_engine, num_used_blocks, random_ids, tiny, tokens

T = TypeVar("T")
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@contextmanager
def running(**changes: Any) -> Iterator[AsyncLLM]:
    limits = {name: changes.pop(name) for name in ("max_requests", "on_step", "on_end", "is_paused") if name in changes}
    with closing(AsyncLLM(make_engine(**changes), **limits)) as llm:
        yield llm


@dataclass
class Served:
    """An AsyncLLM, and the last figures it told."""

    llm: AsyncLLM
    told: list[StepStats]

    async def is_empty(self) -> None:
        """Waits until no request holds a block, as was told."""
        async with asyncio.timeout(20):
            while not self.told or self.told[-1].num_running or self.told[-1].kv_cache_usage:
                await asyncio.sleep(0.01)

    async def forget(self) -> None:
        """Waits so for what ran before, if anything did, and forgets what it told."""
        if self.told:
            await self.is_empty()
            self.told.clear()


@pytest.fixture(scope="module", params=[False, True], ids=["in this process", "in its own process"])
def serving(request: pytest.FixtureRequest) -> Iterator[Served]:
    told: list[StepStats] = []
    config = EngineConfig(**tiny())
    with closing(AsyncLLM.start(config, own_process=request.param, on_stats=told.append)) as llm:
        yield Served(llm, told)


def run(main: Coroutine[Any, Any, T]) -> T:
    """In a thread of its own: a browser's tests leave a loop running in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, main).result()


async def answer(llm: AsyncLLM, prompt: list[int], params: SamplingParams = GREEDY, **options: Any) -> RequestOutput:
    last = None
    async for output in llm.generate(prompt, params, **options):
        last = output
    assert last is not None
    return last


def expected(prompts: list[list[int]], params: SamplingParams = GREEDY, **changes: Any) -> list[list[list[int]]]:
    engine = make_engine(**changes)
    outputs = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    drain(engine)
    return [tokens(output) for output in outputs]


def check_streams_beside_each_other(llm: AsyncLLM) -> None:
    prompts = [random_ids(3 + i, seed=i) for i in range(20)]

    async def main() -> list[RequestOutput]:
        return await asyncio.gather(*(answer(llm, prompt) for prompt in prompts))

    outputs = run(main())
    assert [tokens(output) for output in outputs] == expected(prompts)
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_streams_beside_each_other_give_what_the_engine_gives(serving: Served) -> None:
    check_streams_beside_each_other(serving.llm)


def test_they_do_so_when_the_engine_runs_ahead() -> None:
    with running(async_scheduling=True) as llm:
        check_streams_beside_each_other(llm)


@pytest.mark.gpu
def test_streams_of_a_gpu_give_what_the_engine_gives_and_can_be_left() -> None:
    prompts = [random_ids(3 + i, seed=i) for i in range(20)]
    settings = {"device": "cuda", "batch_invariant": True}

    async def leave(llm: AsyncLLM) -> None:
        async for _ in llm.generate(random_ids(8), GREEDY):
            return

    async def main(llm: AsyncLLM) -> list[RequestOutput]:
        outputs = await asyncio.gather(*(answer(llm, prompt) for prompt in prompts), leave(llm))
        return [output for output in outputs if output is not None]

    with running(**settings) as llm:
        outputs = run(main(llm))
        assert llm.call(lambda: num_used_blocks(llm._engine)).result() == 0
    assert [tokens(output) for output in outputs] == expected(prompts, **settings)


def test_a_stream_grows_and_its_object_is_the_readers_own(serving: Served) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, n=2, logprobs=1, prompt_logprobs=1, ignore_eos=True)

    async def main(llm: AsyncLLM) -> None:
        lengths, seen = [], set()
        async for output in llm.generate(random_ids(5), params):
            lengths.append([len(completion.token_ids) for completion in output.outputs])
            seen.add(id(output))
            for completion in output.outputs:
                assert len(completion.logprobs or ()) == len(completion.token_ids)
        assert lengths == sorted(lengths) and lengths[-1] == [12, 12] and len(seen) == 1
        assert len(output.prompt_logprobs or ()) == 5 and output.outputs[0].cumulative_logprob is not None

    run(main(serving.llm))


def test_a_slow_reader_holds_nobody_up_and_misses_nothing(serving: Served) -> None:
    prompts = [random_ids(4, seed=i) for i in range(2)]

    async def slow(llm: AsyncLLM) -> tuple[RequestOutput, int]:
        num_read = 0
        stream = llm.generate(prompts[0], GREEDY)
        output = await anext(stream)
        while not output.finished:
            num_read += 1
            await asyncio.to_thread(quick_done.wait, 20)
            output = await anext(stream)
        return output, num_read

    async def quick(llm: AsyncLLM) -> RequestOutput:
        output = await answer(llm, prompts[1])
        quick_done.set()
        return output

    async def main(llm: AsyncLLM) -> None:
        (late, num_read), prompt = await asyncio.gather(slow(llm), quick(llm))
        assert [tokens(late), tokens(prompt)] == expected(prompts)
        assert num_read < 10  # what had come meanwhile, it got in one

    quick_done = threading.Event()
    run(main(serving.llm))


def test_leaving_a_stream_early_aborts_its_request(serving: Served) -> None:
    async def main(llm: AsyncLLM) -> None:
        stream = llm.generate(random_ids(4), SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()
        assert not llm.call(lambda: llm._engine.has_unfinished_requests).result()
        await serving.is_empty()

    run(main(serving.llm))


def test_a_stream_that_was_submitted_and_never_read_can_be_closed(serving: Served) -> None:
    async def main(llm: AsyncLLM) -> None:
        with pytest.raises(ValueError, match="the prompt is empty"):
            await llm.submit([], GREEDY)
        stream = await llm.submit(random_ids(4), SamplingParams(max_tokens=80, ignore_eos=True), "once")
        await stream.aclose()
        await serving.is_empty()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        again = await llm.submit(random_ids(4), GREEDY, "once")  # the name is free, and what is late is not its own
        *_, output = [output async for output in again]
        assert tokens(output) == expected([random_ids(4)])[0]

    run(main(serving.llm))


def test_figures_and_times_are_told(serving: Served) -> None:
    async def main(llm: AsyncLLM) -> None:
        await serving.forget()
        before = time.perf_counter()
        outputs = await asyncio.gather(*(answer(llm, random_ids(20, seed=7)) for _ in range(3)))
        await serving.is_empty()
        assert sum(told.num_generation_tokens for told in serving.told) == 60
        assert sum(told.num_prompt_tokens for told in serving.told) == 60
        assert sum(told.prefix_cache_queries for told in serving.told) == 60
        hits = sum(told.prefix_cache_hits for told in serving.told)
        assert hits == sum(output.num_cached_tokens for output in outputs) and hits >= 32
        assert sum(told.num_tokens for told in serving.told) == 60 - hits + 3 * 19
        assert 1 <= max(told.num_running for told in serving.told) <= 3  # one may end before the next arrives
        assert max(told.kv_cache_usage for told in serving.told) > 0.03
        for metrics in (output.metrics for output in outputs):
            times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time]
            times = [before, *times, metrics.last_token_time, time.perf_counter()]
            assert times == sorted(times)

    run(main(serving.llm))


def test_completions_of_one_request_are_told_to_run_together(serving: Served) -> None:
    async def main(llm: AsyncLLM) -> None:
        await serving.forget()
        await answer(llm, random_ids(5), SamplingParams(seed=1, max_tokens=20, n=3, ignore_eos=True))
        await serving.is_empty()
        assert max(told.num_running for told in serving.told) == 3
        assert max(told.kv_cache_usage for told in serving.told) == 6 / 120  # two blocks each

    run(main(serving.llm))


def test_an_abort_from_elsewhere_ends_the_stream_with_what_there_is() -> None:
    async def main(llm: AsyncLLM) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
        stream = llm.generate(random_ids(4), params, "mine")
        taken = asyncio.create_task(anext(stream))
        while not await asyncio.wrap_future(llm.call(lambda: llm._engine.has_unfinished_requests)):
            pass
        llm.step(3)
        await taken
        await llm.abort("mine")
        output = await anext(stream)
        assert output.finished
        assert output.outputs[0].finish_reason == "abort" and 0 < len(output.outputs[0].token_ids) < 80
        await llm.abort("mine")
        await llm.abort("nobody's")

    with running(is_paused=True) as llm:
        run(main(llm))


def test_a_request_that_waits_for_room_can_be_aborted_and_the_next_one_moves_up() -> None:
    async def main(llm: AsyncLLM) -> None:
        running = asyncio.create_task(answer(llm, random_ids(4), request_id="runs"))
        aborted = asyncio.create_task(answer(llm, random_ids(5), request_id="waits"))
        last = asyncio.create_task(answer(llm, random_ids(6), request_id="last"))
        await asyncio.sleep(0.05)
        await llm.abort("waits")
        assert (await aborted).outputs[0].finish_reason == "abort"
        assert not running.done() and not last.done()
        llm.resume()
        assert [tokens(await task) for task in (running, last)] == expected([random_ids(4), random_ids(6)])

    with running(max_requests=1, is_paused=True) as llm:
        run(main(llm))


def test_an_error_that_comes_before_its_reader_looks_is_raised_to_it() -> None:
    def fail(error: Exception | None) -> None:
        raise OSError("no space left")

    async def main(llm: AsyncLLM) -> None:
        task = asyncio.create_task(answer(llm, random_ids(4)))
        await asyncio.sleep(0)
        llm._thread.join(10)  # all has happened when the loop goes on
        with pytest.raises(OSError, match="no space left"):
            await task

    with running(on_step=fail) as llm:
        run(main(llm))


def test_who_has_just_asked_when_the_thread_ends_is_told_so() -> None:
    def fail(error: Exception | None) -> None:
        tasks.append(asyncio.run_coroutine_threadsafe(answer(llm, random_ids(5)), loop))
        while not llm._orders:  # its order is queued, and will not be carried out
            time.sleep(0.001)
        raise OSError("no space left")

    tasks, ended = [], []
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    with running(on_step=fail, on_end=ended.append) as llm:
        first = asyncio.run_coroutine_threadsafe(answer(llm, random_ids(4)), loop)
        with pytest.raises(OSError, match="no space left"):
            first.result(10)
        with pytest.raises(OSError, match="no space left"):
            tasks[0].result(10)
    assert [str(error) for error in ended] == ["no space left"]
    loop.call_soon_threadsafe(loop.stop)


def test_a_pace_that_is_changed_counts_at_once_and_one_that_is_none_is_refused() -> None:
    num_steps = 0

    def count(error: Exception | None) -> None:
        nonlocal num_steps
        num_steps += 1

    async def main(llm: AsyncLLM) -> None:
        llm.set_pace(3000)
        task = asyncio.create_task(answer(llm, random_ids(4)))
        while num_steps == 0:
            await asyncio.sleep(0.01)
        llm.set_pace(0)
        await asyncio.wait_for(task, 20)
        for wrong in (-1, float("nan"), 1e11):
            with pytest.raises(ValueError, match="a pace of"):
                llm.set_pace(wrong)

    with running(on_step=count) as llm:
        run(main(llm))


def test_what_the_engine_refuses_is_raised_to_who_asked_and_to_nobody_else(serving: Served) -> None:
    async def main(llm: AsyncLLM) -> None:
        good = asyncio.create_task(answer(llm, random_ids(4)))
        with pytest.raises(ValueError, match="the prompt is empty"):
            await answer(llm, [])
        assert tokens(await good) == expected([random_ids(4)])[0]

    run(main(serving.llm))


def test_a_name_that_is_taken_is_refused_and_does_not_end_whose_it_is() -> None:
    async def main(llm: AsyncLLM) -> None:
        first = asyncio.create_task(answer(llm, random_ids(4), request_id="a"))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="'a' is already in use"):
            await answer(llm, random_ids(4), request_id="a")
        llm.resume()
        assert tokens(await first) == expected([random_ids(4)])[0]

    with running(is_paused=True) as llm:
        run(main(llm))


def test_who_gives_up_waiting_for_room_is_forgotten() -> None:
    async def main(llm: AsyncLLM) -> None:
        llm.pause()
        first = asyncio.create_task(answer(llm, random_ids(4)))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(answer(llm, random_ids(4)))
        await asyncio.sleep(0.05)
        second.cancel()
        llm.resume()
        assert tokens(await first) == expected([random_ids(4)])[0]
        assert tokens(await answer(llm, random_ids(4))) == expected([random_ids(4)])[0]
        assert llm.call(lambda: len(llm._arriving)).result() == 0

    with running(max_requests=1) as llm:
        run(main(llm))


def test_a_step_that_fails_ends_every_stream_and_the_next_request_is_served() -> None:
    faults: list[Exception] = []

    def make(config: Any, inner: Any) -> FaultyExecutor:
        return FaultyExecutor(inner, lambda point: faults.pop() if faults and point == "result" else None)

    async def main(llm: AsyncLLM) -> None:
        llm.pause()
        tasks = [asyncio.create_task(answer(llm, random_ids(4, seed=i))) for i in range(3)]
        await asyncio.sleep(0.05)
        faults.append(RuntimeError("out of something"))
        llm.resume()
        for task in tasks:
            with pytest.raises(RuntimeError, match="out of something"):
                await task
        assert tokens(await answer(llm, random_ids(4))) == expected([random_ids(4)])[0]

    with running(make_executor=make) as llm:
        run(main(llm))


def test_more_requests_than_the_limit_wait_for_room() -> None:
    most = 0

    def count(error: Exception | None) -> None:
        nonlocal most
        most = max(most, len(llm._engine.core.scheduler.requests))

    async def main(llm: AsyncLLM) -> None:
        await asyncio.gather(*(answer(llm, random_ids(4, seed=i)) for i in range(9)))

    with running(max_requests=3, on_step=count) as llm:
        run(main(llm))
    assert most == 3


def test_it_pauses_steps_and_goes_on() -> None:
    num_steps = 0

    def count(error: Exception | None) -> None:
        nonlocal num_steps
        num_steps += 1

    async def main(llm: AsyncLLM) -> None:
        llm.pause()
        llm.step(5)  # nothing to do: they are not kept for later
        task = asyncio.create_task(answer(llm, random_ids(4)))
        await asyncio.sleep(0.1)
        assert num_steps == 0
        llm.step(2)
        while num_steps < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert num_steps == 2 and llm.is_paused and not task.done()
        llm.resume()
        assert tokens(await task) == expected([random_ids(4)])[0]
        assert num_steps == 20

    with running(on_step=count) as llm:
        run(main(llm))


def test_a_pace_is_kept_and_orders_do_not_wait_for_it() -> None:
    async def main(llm: AsyncLLM) -> None:
        llm.set_pace(2.0)
        start = time.monotonic()
        task = asyncio.create_task(answer(llm, random_ids(4), SamplingParams(max_tokens=2, ignore_eos=True)))
        await asyncio.sleep(0.3)
        assert await asyncio.wrap_future(llm.call(lambda: 7)) == 7
        assert time.monotonic() - start < 2.0
        await task
        assert time.monotonic() - start >= 2.0

    with running() as llm:
        run(main(llm))


def test_what_goes_wrong_outside_of_a_step_ends_everything_and_hangs_nobody() -> None:
    def fail(error: Exception | None) -> None:
        raise OSError("no space left")

    async def main(llm: AsyncLLM) -> None:
        with pytest.raises(OSError, match="no space left"):
            await asyncio.wait_for(answer(llm, random_ids(4)), 20)
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await answer(llm, random_ids(4))

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
                await asyncio.wait_for(anext(stream), 20)

    with running(recorder=Recorder(lambda line: None, time.perf_counter)) as llm:
        run(main(llm))


def test_pausing_forgets_the_single_steps_that_were_asked_for() -> None:
    async def main(llm: AsyncLLM) -> None:
        llm.step(20)  # it is not paused
        llm.pause()
        task = asyncio.create_task(answer(llm, random_ids(4)))
        await asyncio.sleep(0.2)
        assert not task.done() and llm.call(lambda: llm._engine.core.scheduler.num_steps).result() == 0
        llm.set_pace(0.05)
        llm.step(30)
        while llm.call(lambda: llm._engine.core.scheduler.num_steps).result() < 2:
            await asyncio.sleep(0.01)
        llm.pause()
        num_steps = llm.call(lambda: llm._engine.core.scheduler.num_steps).result()
        await asyncio.sleep(0.3)
        assert llm.call(lambda: llm._engine.core.scheduler.num_steps).result() == num_steps < 20
        llm.set_pace(0.0)
        llm.resume()
        await task

    with running() as llm:
        run(main(llm))


def test_closing_ends_what_is_left_and_later_calls_say_so() -> None:
    async def main(llm: AsyncLLM) -> None:
        llm.pause()
        task = asyncio.create_task(answer(llm, random_ids(4)))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(llm.close)
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await task
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await answer(llm, random_ids(4))
        llm.close()

    with running() as llm:
        run(main(llm))
