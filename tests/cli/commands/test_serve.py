"""`teachllm serve`: what it refuses, and that its flags reach the server."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from teachllm.server import lifecycle


@pytest.fixture(autouse=True)
def what_belongs_to_the_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command takes it over; the tests need it afterwards."""
    monkeypatch.setattr(lifecycle.log, "set_up", lambda *_: None)
    monkeypatch.setattr(lifecycle.sys, "setswitchinterval", lambda seconds: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--block-size", "0"), "block_size=0"),
        (("--enable-auto-tool-choice",), "--tool-call-parser"),
        (("--tool-call-parser", "nobody's"), "hermes"),
        (("--host", "192.0.2.1"), "cannot listen on 192.0.2.1"),
        (("teachlm", "--model", "other"), "give one"),
        (("--chat-template", "no-such-file"), "no-such-file"),
        (("--ssl-keyfile", "no-such-file"), "no-such-file"),
    ],
)
def test_what_is_refused_is_one_line_and_exit_code_1(
    teachllm, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(lifecycle, "start_engine", lambda *_, **__: pytest.fail("a model was loaded"))
    result = teachllm("serve", "--port", "0", *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and said in result.stderr


def test_the_model_that_is_typed_wins_over_the_one_in_a_file(teachllm, monkeypatch, tmp_path: Path) -> None:
    given: list[Any] = []
    monkeypatch.setattr(lifecycle, "serve", lambda config, options: given.append((config, options)) or 0)
    (tmp_path / "flags.yaml").write_text("model: from/file\nserved-model-name: a\n", encoding="utf-8")
    for typed in (("some/model",), ("--model", "some/model")):
        assert teachllm("serve", *typed, "--config", str(tmp_path / "flags.yaml")).exit_code == 0
    assert [(config.model, options.served_model_names) for config, options in given] == [("some/model", ("a",))] * 2


def test_flags_and_variables_reach_the_engine_and_the_server(teachllm, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(lifecycle, "serve", lambda config, options: given.append((config, options)) or 3)
    monkeypatch.setenv("TEACHLLM_API_KEY", "one two")
    names = ("--served-model-name", "a", "--served-model-name", "b")
    result = teachllm("serve", "some/model", "--seed", "5", "--max-num-seqs", "4", *names, "--root-path", "/llm")
    [(config, options)] = given
    assert result.exit_code == 3
    assert (config.model, config.seed, config.max_num_seqs) == ("some/model", 5, 4)
    assert (options.api_keys, options.served_model_names, options.root_path) == (("one", "two"), ("a", "b"), "/llm")
