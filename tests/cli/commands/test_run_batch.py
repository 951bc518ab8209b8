"""`teachllm run-batch`: files in, files out; tests/server/openai/batches/test_batch.py has what one line gets."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from teachllm.engine.async_llm import AsyncLLM
from teachllm.server.openai.batches.batch_file import locked
from tests.server.fake_engine import FakeEngineClient

CHAT = "/v1/chat/completions"


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    body = body or {"prompt": "x"}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


class Engine(FakeEngineClient):
    """In place of the one that the command would start."""

    def __init__(self) -> None:
        super().__init__()
        self.configs: list[Any] = []
        self.num_closed = 0
        self.is_dead = False

    def call(self, order: Callable[[], Any]) -> None:
        if self.is_dead:
            raise RuntimeError("the engine is closed")

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()

    def start(config: Any, **options: Any) -> Engine:
        engine.configs.append(config)
        return engine

    monkeypatch.setattr(AsyncLLM, "start", start)
    return engine


@pytest.fixture
def batch(teachllm, tmp_path: Path):
    """Runs the command on these lines; returns its result and the lines of output."""
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def run(text: str, *arguments: str) -> tuple[Any, list[dict[str, Any]]]:
        requests.write_text(text, encoding="utf-8")
        result = teachllm("run-batch", "-i", str(requests), "-o", str(answers), *arguments)
        found = answers.read_text(encoding="utf-8") if answers.exists() else ""
        return result, [json.loads(text) for text in found.splitlines()]

    run.output = answers  # type: ignore[attr-defined]
    return run


def test_every_line_is_answered_and_stderr_says_how_many(batch, engine: Engine) -> None:
    text = (
        line("a") + line("b", CHAT, messages=[{"role": "user", "content": "Hi"}]) + "{oops\n" + line("c", model="gpt")
    )
    result, answers = batch(text, "--model", "some/model", "--block-size", "32", "--seed", "5")
    assert (result.exit_code, result.stdout) == (0, "")
    assert {answer["custom_id"] for answer in answers} == {"a", "b", "c", None}
    assert result.stderr.startswith("2 of 4 lines answered in ")
    assert result.stderr.endswith("; 2 refused\n") and "(2 tokens in, 6 out, " in result.stderr
    (config,) = engine.configs
    assert (config.model, config.block_size, config.seed) == ("some/model", 32, 5)
    assert engine.num_closed == 1


def test_what_is_answered_is_not_asked_again_and_a_model_is_loaded_only_if_there_is_work(batch, engine: Engine) -> None:
    _, first = batch(line("a"))
    result, answers = batch(line("a") + line("b"))
    assert answers[0] == first[0]
    assert [answer["custom_id"] for answer in answers] == ["a", "b"]
    assert "1 of 2 lines answered" in result.stderr and "1 were before" in result.stderr
    result, again = batch(line("a") + line("b"))
    assert again == answers
    assert result.stderr == "0 of 2 lines answered; 2 were before\n"
    assert (len(engine.configs), len(engine.asked)) == (2, 2)


def test_what_is_no_output_of_a_batch_is_overwritten_only_if_asked_for(
    teachllm, engine: Engine, tmp_path: Path
) -> None:
    requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text(line("a"))
    output.write_text("my diary\n")
    result = teachllm("run-batch", "-i", str(requests), "-o", str(output))
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert f"{output}, line 1, is no answer of a batch: choose another file, or --overwrite it" in result.stderr
    assert output.read_text() == "my diary\n" and engine.configs == []
    for _ in range(2):
        assert teachllm("run-batch", "-i", str(requests), "-o", str(output), "--overwrite").exit_code == 0
        assert json.loads(output.read_text())["custom_id"] == "a"
    assert len(engine.asked) == 2


def test_ctrl_c_keeps_what_is_there_and_the_same_command_goes_on(
    batch, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(line(f"r{i}") for i in range(8))
    submit = FakeEngineClient.submit

    async def press(self: Engine, *arguments: Any, **options: Any) -> Any:
        if len(self.asked) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return await submit(self, *arguments, **options)

    monkeypatch.setattr(Engine, "submit", press)
    result, answers = batch(text, "--max-concurrency", "1")
    assert (result.exit_code, len(answers)) == (130, 3)
    assert "5 left for the same command to go on with" in result.stderr
    assert (engine.num_closed, len(engine.aborted)) == (1, 1)
    monkeypatch.setattr(Engine, "submit", submit)
    result, answers = batch(text)
    assert result.exit_code == 0
    assert [answer["custom_id"] for answer in answers] == [f"r{i}" for i in range(8)]


def test_the_death_of_the_engine_is_one_line_and_exit_code_1(batch, engine: Engine) -> None:
    engine.is_dead, engine.fails_with = True, RuntimeError("killed")
    result, answers = batch(line("a"))
    assert (result.exit_code, answers) == (1, [])
    assert result.stderr.splitlines()[-1] == (
        "error: the engine failed: RuntimeError: killed; run the same command again to go on"
    )


def test_max_concurrency_is_twice_what_the_engine_runs_at_once(
    batch, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from teachllm.server.openai.batches.batch import LocalServer

    given = []

    async def answer(self: LocalServer, *arguments: Any, max_concurrency: int, **options: Any) -> None:
        given.append(max_concurrency)

    monkeypatch.setattr(LocalServer, "answer", answer)
    batch(line("a"))
    batch(line("a"), "--max-concurrency", "7")
    assert given == [2 * (engine.config.max_num_seqs or 0), 7]


def test_a_request_of_any_size_finds_room(batch, engine: Engine) -> None:
    """The server's limits keep strangers from each other, and here there are none."""
    texts = [line("wide", prompt="x", n=100), line("long", prompt="x", user="u" * (17 << 20))]
    result, answers = batch("".join(texts), "--max-num-seqs", "1", "--max-concurrency", "2")
    assert {answer["response"]["status_code"] for answer in answers} == {200}, result.stderr


def test_a_pipe_goes_in_and_out(teachllm, engine: Engine) -> None:
    result = teachllm("run-batch", "-i", "-", "-o", "-", stdin=line("a") + line("b"))
    assert [json.loads(text)["custom_id"] for text in result.stdout.splitlines()] == ["a", "b"]
    assert "2 of 2 lines answered" in result.stderr


def test_requests_call_the_model_as_the_flag_says(batch, engine: Engine) -> None:
    text = line("a", model="gpt-4o", prompt="x") + line("b", model="teachlm", prompt="x")
    _, answers = batch(text, "--served-model-name", "gpt-4o")
    assert {answer["custom_id"]: answer["response"]["status_code"] for answer in answers} == {"a": 200, "b": 404}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-i", "/nowhere/in.jsonl", "-o", "{tmp}/out.jsonl"], "/nowhere/in.jsonl"),
        (["-i", "{tmp}/in.jsonl", "-o", "/nowhere/out.jsonl"], "there is no folder /nowhere"),
        (["-i", "{tmp}/in.jsonl", "-o", "{tmp}"], "that is a folder: give a file"),
        (["-i", "{tmp}/in.jsonl", "-o", "{tmp}/in.jsonl", "--overwrite"], "is the input, too: choose another"),
        (["-i", "{tmp}/in.jsonl", "-o", "-", "--chat-template", "none.jinja"], "--chat-template none.jinja"),
        (["-i", "{tmp}/in.jsonl", "-o", "-", "--tool-call-parser", "mine"], "mine"),
        (["-i", "{tmp}/in.jsonl", "-o", "-", "--enable-auto-tool-choice"], "add --tool-call-parser"),
        (["-i", "{tmp}/in.jsonl", "-o", "-", "--block-size", "0"], "block_size=0: must be at least 1"),
    ],
)
def test_what_cannot_be_run_is_one_line_before_a_model_is_loaded(
    teachllm, engine: Engine, tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "in.jsonl").write_text(line("a"))
    result = teachllm("run-batch", *(argument.replace("{tmp}", str(tmp_path)) for argument in arguments))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1].startswith("error: ") and said in result.stderr
    assert engine.configs == []
    assert (tmp_path / "in.jsonl").read_text() == line("a")


def test_without_the_extra_the_error_names_it(teachllm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("teachllm.server.openai.batches.batch", "teachllm.server.app"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    result = teachllm("run-batch", "-i", "-", "-o", "-", stdin="")
    assert (result.exit_code, result.stderr) == (1, "error: run-batch needs fastapi: pip install 'teachllm[serve]'\n")


def test_the_model_that_comes_with_the_package_answers_a_batch(batch, monkeypatch: pytest.MonkeyPatch) -> None:
    start = AsyncLLM.start
    monkeypatch.setattr(AsyncLLM, "start", lambda config, **options: start(config, own_process=False, **options))
    question = {"messages": [{"role": "user", "content": "What is a KV cache?"}], "temperature": 0, "max_tokens": 12}
    flags = ("--device", "cpu", "--max-model-len", "256", "--max-num-seqs", "4")
    result, answers = batch(line("a", CHAT, **question), *flags)
    assert result.exit_code == 0, result.stderr
    body = answers[0]["response"]["body"]
    assert "key" in body["choices"][0]["message"]["content"].lower()
    assert body["usage"]["completion_tokens"] == 12


def test_two_batches_at_once_do_not_write_one_output(teachllm, engine: Engine, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a"))
    with locked(output):
        result = teachllm("run-batch", "-i", str(source), "-o", str(output))
        assert result.exit_code == 1 and "another run-batch is writing it" in result.output
        assert not output.exists()
    assert teachllm("run-batch", "-i", str(source), "-o", str(output)).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
