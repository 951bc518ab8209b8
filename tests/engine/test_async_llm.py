"""AsyncLLM: streams beside each other, slow readers, aborts, and back-pressure.

What `serving` serves is asked of an engine in this process and of one whose core is elsewhere.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import reduce

import pytest

from teachllm import EngineConfig, RequestOutput, SamplingParams
from teachllm.engine.async_llm import AsyncLLM
from teachllm.engine.observability.stats import StepStats
from tests.engine.streams import GREEDY, answer, expected, num_of, run, running, until
from tests.spec_decode.drafters import speculation
from tests.waiting import HANG_SECONDS
from tests.worker.engines import num_used_blocks, random_ids, tiny, tokens
from tests.worker.processes.child_threads import cores_in_threads, patched


@dataclass
class Served:
    """An AsyncLLM, and the last figures it told."""

    llm: AsyncLLM
    told: list[StepStats]

    async def is_empty(self) -> None:
        """Wait until no request holds a block, as was told."""
        await until(lambda: self.told and not self.told[-1].num_running and not self.told[-1].kv_cache_usage)

    async def forget(self) -> None:
        """Wait so for what ran before, if anything did, and forget what it told."""
        if self.told:
            await self.is_empty()
            self.told.clear()


@pytest.fixture(scope="module", params=[False, True], ids=["in this process", "elsewhere"])
def serving(request: pytest.FixtureRequest) -> Iterator[Served]:
    told: list[StepStats] = []
    with patched(cores_in_threads):
        config = EngineConfig(**tiny())
        with closing(AsyncLLM.start(config, own_process=request.param, on_stats=told.append)) as llm:
            yield Served(llm, told)


def check_streams_beside_each_other(llm: AsyncLLM) -> None:
    prompts = [random_ids(3 + i, seed=i) for i in range(5)]

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
            await asyncio.to_thread(quick_done.wait, HANG_SECONDS)
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
            assert [*times, metrics.last_token_time] == sorted([*times, metrics.last_token_time])

    run(main(serving.llm))


def test_completions_of_one_request_are_told_to_run_together(serving: Served) -> None:
    async def main(llm: AsyncLLM) -> None:
        await serving.forget()
        await answer(llm, random_ids(5), SamplingParams(seed=1, max_tokens=20, n=3, ignore_eos=True))
        await serving.is_empty()
        assert max(told.num_running for told in serving.told) == 3
        assert max(told.kv_cache_usage for told in serving.told) == 6 / 120  # two blocks each

    run(main(serving.llm))


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


def test_an_abort_from_elsewhere_ends_the_stream_with_what_there_is() -> None:
    async def main(llm: AsyncLLM) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
        stream = llm.generate(random_ids(4), params, "mine")
        taken = asyncio.create_task(anext(stream))
        await until(lambda: num_of(llm, lambda: llm._engine.has_unfinished_requests))
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
        await until(lambda: num_of(llm, lambda: len(llm._arriving)) == 2)
        await llm.abort("waits")
        assert (await aborted).outputs[0].finish_reason == "abort"
        assert not running.done() and not last.done()
        llm.resume()
        assert [tokens(await task) for task in (running, last)] == expected([random_ids(4), random_ids(6)])

    with running(max_requests=1, is_paused=True) as llm:
        run(main(llm))


def test_who_gives_up_waiting_for_room_is_forgotten() -> None:
    async def main(llm: AsyncLLM) -> None:
        llm.pause()
        first = asyncio.create_task(answer(llm, random_ids(4)))
        await until(lambda: num_of(llm, lambda: len(llm._streams)) == 1)
        second = asyncio.create_task(answer(llm, random_ids(4)))
        await until(lambda: num_of(llm, lambda: len(llm._arriving)) == 1)
        second.cancel()
        llm.resume()
        assert tokens(await first) == expected([random_ids(4)])[0]
        assert tokens(await answer(llm, random_ids(4))) == expected([random_ids(4)])[0]
        assert llm.call(lambda: len(llm._arriving)).result() == 0

    with running(max_requests=1) as llm:
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


def test_speculation_is_counted_the_same_elsewhere() -> None:
    given = speculation("draft_model", "qwen3", num_speculative_tokens=3, adaptive=False)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    counted = []
    for own_process in (False, True):
        told: list[StepStats] = []
        config = EngineConfig(**tiny(speculative_config=given))
        with (
            patched(cores_in_threads),
            closing(AsyncLLM.start(config, own_process=own_process, on_stats=told.append)) as llm,
        ):
            run(answer(llm, random_ids(9), params))
        whole = reduce(StepStats.then, told)
        names = ("num_samplings", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
        counted.append([*(getattr(whole, name) for name in names), whole.num_accepted_tokens_per_pos])
        assert 0 < whole.num_accepted_tokens == sum(whole.num_accepted_tokens_per_pos) < whole.num_draft_tokens
    assert counted[0] == counted[1]
