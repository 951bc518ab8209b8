"""`teachllm viz` as somebody runs it: a process that says its address, answers there, and ends when told to."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.programs import start_program

pytestmark = pytest.mark.slow
pytest.importorskip("gradio", reason="no gradio: pip install 'teachllm[ui]'")

Viz = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def viz() -> Iterator[Viz]:
    started = []

    def viz_(*flags: str) -> subprocess.Popen[str]:
        command = ("-m", "teachllm_cli", "viz", "--no-browser", *flags)
        process = start_program(*command, environment={"NO_COLOR": "1"}, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        return process

    yield viz_
    for process in started:
        process.kill()
        process.communicate()


def address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"http://\S+", line):
            return found[0]
    raise AssertionError("it ended without an address")


def test_it_says_its_address_answers_there_writes_a_trace_and_ends_at_an_interrupt(viz: Viz, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    process = viz("--port", "0", "--trace", str(path))
    url = address(process)
    assert url.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert answer.status == 200
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert json.loads(path.read_text().splitlines()[0])["event"] == "header"
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=20)
    assert process.returncode in (0, 130) and stdout == "" and "Traceback" not in stderr


def test_a_tab_says_that_the_server_is_gone_and_shows_what_the_next_one_has(
    viz: Viz, browser: Any, trace: list[str], tmp_path: Path
) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 720})
    tab, port = context.new_page(), "0"
    for name, num_lines in (("before", 60), ("after", 30)):
        path = tmp_path / name
        path.write_text("".join(line + "\n" for line in trace[:num_lines]))
        process = viz("--port", port, "--replay", str(path))
        url = address(process)
        if port == "0":
            port = url.strip("/").rpartition(":")[2]
            tab.goto(url)
        tab.wait_for_function(f"globalThis.livePage?.now.title === '{name}' && livePage.views[0].k >= 0")
        tab.wait_for_function(f"livePage.views[0].timeline.lines.length === {num_lines}")
        assert tab.evaluate("livePage.views[0].timeline.problem") is None
        assert tab.evaluate("livePage.state.textContent") == ""
        process.kill()
        process.wait()
        tab.wait_for_selector("[data-lost]")
        assert tab.evaluate("livePage.state.textContent") == "no connection to teachllm"
        tab.click("[data-open=preset]")
        tab.click("[data-preset=prefix]")
        tab.wait_for_selector("[data-problem]:not([hidden])")
        assert tab.locator("[data-problem]").inner_text() == "teachllm does not answer"
    context.close()


def test_a_port_in_use_and_a_trace_that_is_not_there_are_one_line(viz: Viz, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        refused = [viz("--port", str(port)), viz("--replay", str(tmp_path / "none.jsonl"))]
        ends = [process.communicate(timeout=60)[1].splitlines()[-1] for process in refused]
    assert [process.returncode for process in refused] == [1, 1]
    why = "Address already in use"
    assert ends[0] == f"error: 127.0.0.1:{port} cannot be listened on ({why}): choose another --host or --port"
    assert ends[1] == f"error: {tmp_path / 'none.jsonl'}: No such file or directory"
