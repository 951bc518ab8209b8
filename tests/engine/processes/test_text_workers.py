"""Strangers' texts are processed where they can be ended: a limit on time, one on memory, and whoever leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from teachllm import EngineConfig
from teachllm.checkpoint.files import find_folder
from teachllm.engine.processes import text_workers
from teachllm.engine.processes.text_workers import TextWorkers
from teachllm.engine.text.tokenizer import Tokenizer
from tests.processes import children, processes_for_texts
from tests.waiting import wait_for

ENDLESS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
MESSAGES = [{"role": "user", "content": "What is a KV cache?"}]


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextWorkers]:
    monkeypatch.setattr(text_workers, "_CPU_SECONDS", 0)  # the limit is a whole second above what is given
    with contextlib.closing(TextWorkers.start(EngineConfig(model="teachlm"))) as found:
        found.wait_until_loaded()
        yield found


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def chat(workers: TextWorkers, template: str | None = None, **variables: Any) -> Coroutine[Any, Any, Any]:
    arguments = {"messages": MESSAGES, "tools": None, "chat_template": template, "variables": variables}
    arguments |= {"add_special_tokens": False, "max_num_tokens": 4096}
    return workers.run("chat", msgspec.json.encode(arguments))


def encode(workers: TextWorkers, *texts: str) -> Coroutine[Any, Any, Any]:
    return workers.run("encode", msgspec.json.encode({"texts": texts, "add_special_tokens": True}))


def test_jobs_give_what_they_give_here_and_no_text_ends_a_worker_that_others_need(workers: TextWorkers) -> None:
    here = Tokenizer.load(str(find_folder("teachlm")))

    async def work() -> None:
        assert await chat(workers) == here.apply_chat_template(MESSAGES)
        texts = ["A KV cache keeps", "naïve 🚀", "a " * 40_000]
        assert await encode(workers, *texts) == [here.encode(text) for text in texts]
        with pytest.raises(ValueError, match="the chat template failed: TemplateError: no"):
            await chat(workers, "{{ raise_exception('no') }}")
        for template in (
            ENDLESS,
            "{% set ns = namespace(t='a') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
        ):
            with pytest.raises(ValueError, match=r"took more than|MemoryError|needs more than"):
                await chat(workers, template)
        assert await chat(workers) == here.apply_chat_template(MESSAGES)

    run(work())


def test_steps_are_computed_before_texts(workers: TextWorkers) -> None:
    [parent] = processes_for_texts(os.getpid())
    run(encode(workers, "a text"))
    worker, *_ = children(parent)
    assert os.getpriority(os.PRIO_PROCESS, worker) > os.getpriority(os.PRIO_PROCESS, 0)
    group = Path(f"/proc/{worker}/autogroup")  # where Linux groups processes by session
    if group.exists():
        assert not group.read_text().endswith("nice 0\n")


def test_who_leaves_ends_the_work_at_once(workers: TextWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_workers, "_CPU_SECONDS", 1000)
    [parent] = processes_for_texts(os.getpid())

    def busy() -> list[int]:
        return [pid for pid in children(parent) if Path(f"/proc/{pid}/stat").read_text().split()[2] == "R"]

    async def work() -> None:
        tasks = [asyncio.create_task(chat(workers, ENDLESS)) for _ in range(text_workers.MAX_WORKERS)]
        await asyncio.to_thread(wait_for, lambda: len(children(parent)) == len(tasks))
        waiting = asyncio.create_task(encode(workers, "who waits for a turn"))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await waiting
        await asyncio.to_thread(wait_for, lambda: not busy())

    run(work())


def test_who_leaves_while_a_worker_starts_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    async def work(workers: TextWorkers) -> None:
        for turn in range(20):
            task = asyncio.create_task(chat(workers, ENDLESS))
            for _ in range(turn):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert await encode(workers, "and then a job that is wanted")

    with contextlib.closing(TextWorkers.start(EngineConfig(model="teachlm"))) as workers:
        workers.wait_until_loaded()
        run(work(workers))
        wait_for(lambda: len(processes_for_texts(os.getpid())) <= 2)  # the last one's and the one it comes from
    assert capfd.readouterr().err == ""


def test_the_process_is_started_again_if_it_has_ended(workers: TextWorkers) -> None:
    async def work() -> None:
        before = await encode(workers, "some words")
        os.kill(processes_for_texts(os.getpid())[0], signal.SIGKILL)
        several = await asyncio.gather(*(encode(workers, "some words") for _ in range(text_workers.MAX_WORKERS)))
        assert several == [before] * text_workers.MAX_WORKERS
        assert await chat(workers)

    run(work())


def test_large_jobs_leave_a_worker_to_the_small_ones(workers: TextWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_workers, "_CPU_SECONDS", 1000)

    async def work() -> None:
        large = [asyncio.create_task(chat(workers, ENDLESS, text="a" * text_workers.LARGE)) for _ in range(6)]
        assert await encode(workers, "a small one")
        assert not any(task.done() for task in large)
        for task in large:
            task.cancel()
        await asyncio.gather(*large, return_exceptions=True)

    run(work())


def test_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no such folder"):
        TextWorkers.start(EngineConfig(model="/nowhere"))
