"""GET /trace: everything since the start, to everybody who asks, in bounded memory."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from teachllm.server.trace_endpoint import TraceHub
from tests.server.fake_engine import FakeEngineClient, serving
from tests.waiting import HANG_SECONDS

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """In a thread of its own: a browser's tests leave a loop running in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, main).result(HANG_SECONDS)


def lines_of(text: str) -> list[str]:
    return [event.removeprefix("data: ") for event in text.split("\n\n") if event.startswith("data: ")]


def test_every_subscriber_gets_all_lines_in_order_from_the_header_on() -> None:
    hub = TraceHub()
    lines = [json.dumps({"event": "step", "step": i, "text": "é\n"}) for i in range(1000)]

    def write() -> None:
        for line in ["header", *lines]:
            hub.sink(line)
        hub.close()

    async def read() -> str:
        return b"".join([piece async for piece in hub.watch().events()]).decode()

    async def main() -> list[str]:
        readers = [asyncio.create_task(read()) for _ in range(3)]
        await asyncio.sleep(0)
        writer = threading.Thread(target=write)
        writer.start()
        texts = await asyncio.gather(*readers)
        writer.join()
        return [*texts, await read()]  # one that came late

    for text in run(main()):
        assert lines_of(text) == ["header", *lines]
        assert ": too slow" not in text and "gone" not in text


def test_who_comes_after_lines_were_let_go_of_is_told_how_many() -> None:
    hub = TraceHub(max_bytes=100)
    for line in ["header", *("x" * 10 for _ in range(50)), *"abcdefghij"]:
        hub.sink(line)
    hub.close()

    async def main() -> str:
        return b"".join([piece async for piece in hub.watch().events()]).decode()

    text = run(main())
    assert lines_of(text) == ["header", *["x" * 10] * 9, *"abcdefghij"]
    assert ": the first 41 lines after the header are gone\n\n" in text


def test_a_subscriber_that_is_too_slow_is_cut_off_and_memory_stays_bounded() -> None:
    hub = TraceHub(max_bytes=1000)
    hub.sink("header")

    async def main() -> list[bytes]:
        events = hub.watch().events()
        pieces = [await anext(events), await anext(events)]
        hub.sink("first")
        pieces.append(await anext(events))
        for _ in range(100):
            hub.sink("y" * 100)
        return pieces + [piece async for piece in events]

    pieces = run(main())
    assert pieces[2] == b"data: first\n\n"
    assert pieces[3:] == [b": too slow: lines were let go of before they were read\n\n"]
    assert sum(map(len, hub._lines)) <= 1000 and len(hub._lines) < 50


def test_a_subscriber_over_http_sees_lines_as_they_are_written_and_may_leave() -> None:
    hub = TraceHub()
    hub.sink("header")
    with serving(FakeEngineClient(), trace=hub, api_keys=("secret",)) as server:
        assert server.http.get("/trace").status_code == 401
        headers = {"Authorization": "Bearer secret"}
        with httpx.stream("GET", server.url + "/trace", headers=headers, timeout=HANG_SECONDS) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            found = response.iter_lines()
            assert [next(found) for _ in range(4)] == [": trace", "", "data: header", ""]
            for number in range(3):
                hub.sink(f"line {number}")
                assert [next(found), next(found)] == [f"data: line {number}", ""]
            assert len(hub.watchers) == 1
        server.until(lambda: not hub.watchers)
