"""`teachllm viz`: it prints its address, answers there, and ends when it is told to."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from teachllm_cli.app import app
from teachllm_cli.commands import viz as viz_module
from teachllm_cli.terminal import notes
from teachllm_webui.session import LiveSession
from tests.waiting import HANG_SECONDS, wait_for

pytestmark = pytest.mark.usefixtures("gradio")


def viz(*flags: str) -> Result:
    return CliRunner().invoke(app, ["viz", "--no-browser", *flags], prog_name="teachllm")


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the command tells its user, while it runs."""
    found: list[str] = []

    class Notes:
        def print(self, text: str, **_: Any) -> None:
            found.append(text)
            notes().print(text)

    monkeypatch.setattr(viz_module, "notes", Notes)
    return found


def test_it_prints_its_address_answers_there_writes_a_trace_and_ends_at_an_interrupt(
    printed: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    seen: list[Any] = []

    def look() -> None:
        try:
            wait_for(lambda: len(printed) > 1)
            url = re.search(r"http://127.0.0.1:\d+/?", printed[1])
            assert url is not None
            with urllib.request.urlopen(url[0], timeout=HANG_SECONDS) as answer:
                seen.append(answer.status)
            wait_for(lambda: path.exists() and path.read_text().endswith("\n"))
            seen.append(json.loads(path.read_text().splitlines()[0])["event"])
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    looking = threading.Thread(target=look)
    looking.start()
    result = viz("--port", "0", "--trace", str(path))
    looking.join()
    assert seen == [200, "header"]
    assert (result.exit_code, result.stdout) == (130, "")


def test_a_port_in_use_and_a_trace_that_is_not_there_are_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = viz("--port", str(port))
    absent = viz("--replay", str(tmp_path / "none.jsonl"))
    assert (taken.exit_code, absent.exit_code) == (1, 1)
    why = "Address already in use"
    said = [result.stderr.splitlines()[-1] for result in (taken, absent)]
    assert said[0] == f"error: 127.0.0.1:{port} cannot be listened on ({why}): choose another --host or --port"
    assert said[1] == f"error: {tmp_path / 'none.jsonl'}: No such file or directory"


def test_a_preset_that_is_not_there_or_stands_beside_other_settings_is_one_line() -> None:
    for flags, said in (
        (("--preset", "nonsense"), "error: there is no preset 'nonsense': choose one of paged, batching, chunked"),
        (("--preset", "prefix", "--block-size", "32"), "error: --preset has settings of its own: leave out --replay"),
        (("--preset", "prefix", "--attach", "http://127.0.0.1:1"), "error: --preset has settings of its own"),
    ):
        result = viz(*flags)
        assert result.exit_code == 1 and result.stderr.splitlines()[-1].startswith(said)


def test_it_starts_with_the_preset_that_is_asked_for(printed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(LiveSession, "start_preset", lambda self, preset: started.append(preset.name))

    def stop() -> None:
        wait_for(lambda: len(printed) > 1)
        os.kill(os.getpid(), signal.SIGINT)

    stopping = threading.Thread(target=stop)
    stopping.start()
    result = viz("--port", "0", "--preset", "speculation")
    stopping.join()
    assert started == ["speculation"] and result.exit_code == 130


def test_a_port_that_is_in_use_is_one_clear_line() -> None:
    from teachllm_webui.page import launch

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port} cannot be listened on.*choose another --host or --port"):
            launch(LiveSession(), port=port)
