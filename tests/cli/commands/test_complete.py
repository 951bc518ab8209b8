"""`teachllm complete`: continuations of prompts by a server."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from teachllm.sampling_params import PARAMETERS
from tests.bench.serve.fake_openai import MODEL, Answer, FakeServer, running
from tests.cli.conftest import as_options
from tests.cli.conversation.test_chat_url import FirstOnly
from tests.request_kinds import EXAMPLES
from tests.server.fake_engine import FakeEngineClient, Server, serving


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "TEACHLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def ours() -> Iterator[Server]:
    with serving(FakeEngineClient()) as server:
        yield server


def test_a_prompt_alone_prints_what_comes_after_it_and_nothing_else(teachllm, ours: Server) -> None:
    result = teachllm("complete", "--url", f"{ours.url}/v1", "--prompt", "zero")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "one two three\n", "")


def test_what_is_piped_in_is_one_prompt_without_its_last_line_break(teachllm) -> None:
    server = FakeServer()
    with running(server) as url:
        result = teachllm("complete", "--url", url, "--max-tokens", "2", stdin="Once upon\na time\n")
    assert result.stdout == " word word\n"
    assert server.bodies[0]["prompt"] == "Once upon\na time"


def test_several_completions_follow_their_prompts_in_order(teachllm, ours: Server, tmp_path) -> None:
    (tmp_path / "prompts.txt").write_text("b\n\nc\n", encoding="utf-8")
    result = teachllm("complete", "--url", ours.url, "-p", "a", "--prompt-file", str(tmp_path / "prompts.txt"))
    assert result.stdout == "aone two three\n\nbone two three\n\ncone two three\n"


def test_json_prints_one_object_a_line_in_the_order_of_the_prompts(teachllm, ours: Server) -> None:
    result = teachllm("complete", "--url", ours.url, "-p", "a", "-p", "b", "--n", "2", "--json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    found = {"text": "one two three", "finish_reason": "stop"}
    assert lines == [{"prompt": prompt, **found, "index": index} for prompt in "ab" for index in (0, 1)]


def test_flags_reach_the_server_and_only_those(teachllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server = FakeServer()
    given = {name: EXAMPLES[name] for name, spec in PARAMETERS.items() if spec.option is not None}
    with running(server) as url:
        teachllm("complete", "--url", url, "-p", "one", *as_options(given), "-m", "mine")
        teachllm("complete", "--url", url, "-p", "one")
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    assert server.bodies[0] == {"model": "mine", "prompt": "one", **given, "stop": [*given["stop"]], **streaming}
    assert server.bodies[1] == {"model": MODEL, "prompt": "one", "max_tokens": 128, **streaming}
    assert server.headers[0]["authorization"] == "Bearer secret"


def test_text_is_printed_as_it_comes(teachllm, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(
        "teachllm_cli.commands.complete.write_model_text", lambda console, text, **style: written.append(text)
    )
    with running(FakeServer()) as url:
        teachllm("complete", "--url", url, "-p", "one", "--max-tokens", "3")
    assert written == [" word"] * 3


def test_markup_and_control_characters_of_a_model_are_not_obeyed(teachllm) -> None:
    with serving(FakeEngineClient(["[bold]x[/bold]\x1b[31m", "\x07 \ty\r"])) as server:
        assert teachllm("complete", "--url", server.url, "-p", "a").stdout == "[bold]x[/bold] \ty\n"


@pytest.mark.parametrize("arguments", [[], ["--json"], ["--prompt-file", "-"]])
def test_no_prompt_is_refused_with_the_ways_to_give_one(teachllm, arguments: list[str]) -> None:
    result = teachllm("complete", "--url", "http://127.0.0.1:9", *arguments, stdin="\n")
    assert (result.exit_code, result.stdout) == (1, "")
    said = "no prompt: give --prompt TEXT, --prompt-file FILE (- reads stdin), or pipe one in"
    assert result.stderr == f"error: {said}\n"


def test_what_the_server_refuses_is_one_line(teachllm, ours: Server) -> None:
    result = teachllm("complete", "--url", ours.url, "-p", "a", "--max-tokens", "5000")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert f"error: {ours.url} answers with HTTP 400: the prompt has 1 token," in result.stderr


def test_an_answer_that_breaks_off_is_an_error_after_what_came(teachllm) -> None:
    with running(FakeServer(lambda body: Answer(num_tokens=5, fails_after=2))) as url:
        result = teachllm("complete", "--url", url, "-p", "a")
    assert (result.exit_code, result.stdout) == (1, " word word")
    assert result.stderr == "error: the answer broke off: the engine died\n"


def test_ctrl_c_ends_it_quietly_and_frees_it_on_the_server(teachllm) -> None:
    engine_client = FakeEngineClient()
    engine_client.go = FirstOnly(0)
    with serving(engine_client) as server:

        def press() -> None:
            server.until(lambda: bool(engine_client.open))
            os.kill(os.getpid(), signal.SIGINT)

        presser = threading.Thread(target=press)
        presser.start()
        result = teachllm("complete", "--url", server.url, "-p", "a")
        presser.join()
        server.until(lambda: not server.service.open)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "")
    assert len(engine_client.aborted) == 1
