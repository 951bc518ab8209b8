"""An engine outlives what happens around it: other threads, children of a fork, and signals at any moment."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import FrameType
from typing import Any

import pytest

from teachllm import LLM, SamplingParams
from teachllm.worker.processes.child import uninterrupted
from teachllm.worker.processes.rank_processes import _Lines
from tests.waiting import HANG_SECONDS
from tests.worker.engines import random_ids, tiny
from tests.worker.processes.child_threads import patched, ranks_in_threads

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
PROMPTS = [{"prompt_token_ids": random_ids(7 + i, seed=i)} for i in range(9)]


def answers(llm: LLM, prompts: list[dict[str, list[int]]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def test_calls_from_several_threads_queue_and_each_gets_its_own_answers() -> None:
    with closing(LLM(**tiny())) as llm:
        expected = answers(llm, PROMPTS)
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda prompt: answers(llm, [prompt])[0], PROMPTS))
        assert found == expected == answers(llm, PROMPTS)


def test_an_engine_is_closed_after_the_call_that_another_thread_is_in() -> None:
    """A closed engine has no ranks to answer, and a call in the middle of a step would wait for ever."""
    llm, is_stepping, found = LLM(**tiny()), threading.Event(), []
    expected = answers(llm, PROMPTS[:1])
    step = llm.engine.step

    def slowly() -> list[Any]:
        is_stepping.set()
        time.sleep(0.01)
        return step()

    llm.engine.step = slowly  # type: ignore[method-assign]
    caller = threading.Thread(target=lambda: found.append(answers(llm, PROMPTS[:1])))
    caller.start()
    is_stepping.wait(HANG_SECONDS)
    llm.close()
    caller.join(HANG_SECONDS)
    assert found == [expected]


def test_a_stream_and_calls_of_another_thread_take_turns() -> None:
    with closing(LLM("teachlm", device="cpu")) as llm:
        ask = [{"role": "user", "content": "What is a KV cache?"}]
        params = SamplingParams(temperature=0, max_tokens=24)
        expected = llm.chat(ask, params, use_tqdm=False)[0].outputs[0].text
        step = llm.engine.step
        inside: list[threading.Thread] = []
        num_inside: list[int] = []

        def counted() -> list[Any]:
            inside.append(threading.current_thread())
            num_inside.append(len(inside))
            try:
                time.sleep(0.002)  # a thread that does not wait for its turn comes in now
                return step()
            finally:
                inside.pop()

        llm.engine.step = counted  # type: ignore[method-assign]
        beside = threading.Thread(target=lambda: llm.generate("A GPU", params, use_tqdm=False))
        streamed = ""
        for i, output in enumerate(llm.stream_chat(ask, params)):
            if i == 1:
                beside.start()
            streamed = output.outputs[0].text
        beside.join()
        assert streamed == expected
        assert set(num_inside) == {1}


def test_a_stream_that_is_dropped_during_a_step_is_aborted_after_it() -> None:
    with closing(LLM("teachlm", device="cpu")) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        stream = llm.stream_chat([{"role": "user", "content": "What is a KV cache?"}], params)
        next(stream)
        step, num_unfinished = llm.engine.step, []

        def dropped() -> list[Any]:
            stream.close()
            num_unfinished.append(len(llm.engine.unfinished_ids))
            return step()

        llm.engine.step = dropped  # type: ignore[method-assign]
        llm.generate("A GPU", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
        assert num_unfinished[:2] == [2, 1]
        assert not llm.engine.has_unfinished_requests


def test_a_call_ends_with_its_own_requests_while_a_stream_is_open() -> None:
    with closing(LLM("teachlm", device="cpu")) as llm:
        ask = [{"role": "user", "content": "What is a KV cache?"}]
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        expected = llm.chat(ask, params, use_tqdm=False)[0].outputs[0].token_ids
        stream = llm.stream_chat(ask, params)
        output = next(stream)
        llm.generate("A GPU", SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        assert not output.finished
        *_, output = stream
        assert output.finished
        assert output.outputs[0].token_ids == expected


def test_a_forked_child_that_drops_the_engine_leaves_its_parents_ranks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child says by its exit code how many times it would have ended the ranks."""
    ended = []
    end = _Lines.close
    monkeypatch.setattr(_Lines, "close", lambda lines: (ended.append(lines), end(lines)))
    with patched(ranks_in_threads), closing(LLM(**tiny(tensor_parallel_size=2))) as llm:
        expected = answers(llm, PROMPTS[:1])
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                with pytest.raises(RuntimeError, match="the engine belongs to the process that this one was forked"):
                    answers(llm, PROMPTS[:1])
                llm.engine.core.executor._ranks._finalizer()  # type: ignore[attr-defined]
                code = len(ended)
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert answers(llm, PROMPTS[:1]) == expected
    assert len(ended) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM, signal.SIGUSR1])
def test_a_handler_that_raises_at_any_moment_loses_no_step(number: signal.Signals) -> None:
    class Raised(Exception):
        pass

    def handle(number: int, frame: FrameType | None) -> None:
        raise Raised

    with patched(ranks_in_threads), closing(LLM(**tiny(tensor_parallel_size=2))) as llm:
        expected = answers(llm, PROMPTS[:2])
        before = signal.signal(number, handle)
        num_raised = 0
        try:
            for delay in range(1, 9):
                timer = threading.Timer(delay * 0.002, signal.pthread_kill, (threading.main_thread().ident, number))
                try:
                    timer.start()
                    while True:
                        answers(llm, PROMPTS[:2])
                except Raised:
                    num_raised += 1
                timer.join()
        finally:
            signal.signal(number, before)
        assert num_raised == 8
        assert not llm.engine.has_unfinished_requests
        assert answers(llm, PROMPTS[:2]) == expected


def test_signals_that_came_while_a_block_failed_are_not_lost_though_their_handlers_raise() -> None:
    numbers, found = (signal.SIGALRM, signal.SIGUSR1), []

    def handle(number: int, frame: FrameType | None) -> None:
        found.append(number)
        raise InterruptedError

    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        with pytest.raises(InterruptedError), uninterrupted():
            for number in numbers:
                signal.raise_signal(number)
            assert found == []
            raise KeyError
        assert found == [*numbers]
        assert [signal.getsignal(number) for number in numbers] == [handle, handle]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_signal_while_a_stream_begins_leaves_no_request_behind() -> None:
    with closing(LLM("teachlm", device="cpu")) as llm:
        add = llm.engine.add_request

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            output = add(*args, **kwargs)
            signal.raise_signal(signal.SIGINT)
            return output

        llm.engine.add_request = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            next(llm.stream_chat([{"role": "user", "content": "What is a KV cache?"}]))
        assert not llm.engine.has_unfinished_requests
