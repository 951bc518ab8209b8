"""`teachllm chat --url`: the same conversation, answered by a server: ours, and others."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from rich.console import Console

from teachllm_cli.commands import chat as chat_module
from teachllm_cli.conversation.answerers import ServerAnswerer
from teachllm_cli.conversation.chat_session import ChatSession
from teachllm_cli.conversation.history import Turn
from teachllm_cli.conversation.openai_client import OpenAIClient, ServerError, TooLongError
from tests.bench.serve.fake_openai import MODEL, Answer, FakeServer, running
from tests.server.fake_engine import FakeEngineClient, Server, serving

TOO_LONG = {"error": {"message": "This model's maximum context length is 9 tokens.", "code": 400}}


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "TEACHLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


class Asked:
    """An engine behind our own server that keeps what it is asked."""

    def __init__(self, engine_client: FakeEngineClient) -> None:
        self.engine_client, self.conversations = engine_client, []
        template = engine_client.tokenizer.render_chat_template

        def remember(messages: list[dict[str, Any]], **options: Any) -> str:
            self.conversations.append([(message["role"], message["content"]) for message in messages])
            return template(messages, **options)

        engine_client.tokenizer.render_chat_template = remember


@pytest.fixture(scope="module")
def ours() -> Iterator[Server]:
    with serving(FakeEngineClient(), served_model_names=("served", "alias")) as server:
        yield server


def session_with(client: OpenAIClient, **fields: Any) -> ChatSession:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    return ChatSession(answerer=ServerAnswerer(client, fields), out=console, notes=console)


def shown(session: ChatSession) -> str:
    return session.out.file.getvalue()  # type: ignore[attr-defined]


def mock(answer: Callable[[dict[str, Any]], httpx2.Response]) -> OpenAIClient:
    """A server without /tokenize that answers chats so."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        if not request.url.path.endswith("/chat/completions"):
            return httpx2.Response(404, json={"detail": "Not Found"})
        return answer(json.loads(request.content))

    return OpenAIClient("http://elsewhere", model="m", transport=httpx2.MockTransport(handle))


def stream(*chunks: dict[str, Any] | str) -> httpx2.Response:
    """Text stands for itself, in place of an event."""
    events = [c if isinstance(c, str) else f"data: {json.dumps(c, ensure_ascii=False)}\r\n\r\n" for c in chunks]
    return httpx2.Response(200, content="".join(events).encode())


DONE = "data: [DONE]\n\n"


def said(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]}


# -- what is piped in --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_a_piped_message_prints_the_servers_answer_and_nothing_else(teachllm, ours: Server, ending: str) -> None:
    result = teachllm("chat", "--url", ours.url + ending, stdin="What is a\nKV cache?\n")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "one two three\n", "")


def test_figures_come_from_what_the_server_counted(teachllm, ours: Server) -> None:
    result = teachllm("chat", "--url", ours.url, "--stats", stdin="Hi")
    assert "1 prompt tokens, 0 from the prefix cache; 3 output tokens; first after" in result.stderr


def test_figures_that_a_server_does_not_tell_are_left_out(teachllm) -> None:
    with running(FakeServer(lambda body: Answer(num_tokens=2))) as url:
        assert (
            "3 prompt tokens; 2 output tokens; first"
            in teachllm("chat", "--url", url, "--stats", stdin="one two three").stderr
        )
    with running(FakeServer(lambda body: Answer(num_tokens=2, has_usage=False))) as url:
        result = teachllm("chat", "--url", url, "--stats", stdin="one two three")
    assert result.stdout == " word word\n"
    assert result.stderr.splitlines()[-1].startswith("first after")


def test_flags_of_the_request_reach_the_server_and_only_those(teachllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHLLM_API_KEY", "secret")
    server = FakeServer(lambda body: Answer(num_tokens=1))
    flags = "--temperature 0.5 --top-k 3 --seed 5 --max-tokens 7 --model mine --stop END"
    with running(server) as url:
        assert teachllm("chat", "--url", url, *flags.split(), "--system", "Be brief.", stdin="Hi").exit_code == 0
        assert teachllm("chat", "--url", url, stdin="Hi").exit_code == 0
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    given = {"temperature": 0.5, "top_k": 3, "seed": 5, "max_tokens": 7, "stop": ["END"]}
    assert server.bodies[0] == {"model": "mine", "messages": messages, **given, **streaming}
    assert server.bodies[1] == {"model": MODEL, "messages": messages[1:], "max_tokens": 1024, **streaming}
    assert server.headers[0]["authorization"] == "Bearer secret"


def test_the_model_is_the_first_that_the_server_has_or_the_one_that_is_named(teachllm, ours: Server) -> None:
    client = OpenAIClient(ours.url)
    assert client.model == "served"
    client.close()
    assert teachllm("chat", "--url", ours.url, "--model", "alias", stdin="Hi").exit_code == 0
    result = teachllm("chat", "--url", ours.url, "--model", "teachlm", stdin="Hi")  # the default of an engine
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "answers with HTTP 404: the model 'teachlm' does not exist here: there is served, alias" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["--block-size", "16"], "--block-size"),  # also the default is one
        (["--device", "cpu", "--model", "m"], "--device"),
        (["--no-enable-prefix-caching"], "--enable-prefix-caching"),
        (["--trace", "run.jsonl"], "--trace"),
    ],
)
def test_flags_of_an_engine_are_refused_beside_a_server(teachllm, arguments: list[str], flag: str) -> None:
    result = teachllm("chat", "--url", "http://127.0.0.1:9", *arguments, stdin="Hi")
    assert (result.exit_code, result.stdout) == (1, "")
    why = "is a setting of an engine here, and --url asks one that runs: leave one of them out"
    assert result.stderr == f"error: {flag} {why}\n"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("here:8000", "--url here:8000: must begin with http:// or https://"),
        ("http://[::", "--url http://[::: "),
    ],
)
def test_what_is_no_url_is_named(teachllm, url: str, said: str) -> None:
    result = teachllm("chat", "--url", url, stdin="Hi")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(f"error: {said}")


def test_nobody_there_is_one_line(teachllm) -> None:
    with running(FakeServer()) as url:
        pass
    result = teachllm("chat", "--url", url, stdin="Hi")
    assert (result.exit_code, result.stdout) == (1, "")
    said = f"no server answers at {url} (Connection refused): start a server there, or change --url"
    assert result.stderr == f"error: {said}\n"


def test_a_server_that_wants_a_key_is_told_apart(teachllm) -> None:
    with serving(FakeEngineClient(), api_keys=("right",)) as server:
        wrong = teachllm("chat", "--url", server.url, "--api-key", "wrong", stdin="Hi")
        right = teachllm("chat", "--url", server.url, "--api-key", "right", stdin="Hi")
    assert (wrong.exit_code, wrong.stderr.count("\n")) == (1, 1)
    assert "HTTP 401: this server needs an API key" in wrong.stderr and "--api-key" in wrong.stderr
    assert right.stdout == "one two three\n"


# -- what is typed -----------------------------------------------------------------------------------------


def test_earlier_turns_are_sent_again_and_the_banner_says_who_answers() -> None:
    asked = Asked(FakeEngineClient())
    with serving(asked.engine_client) as server:
        session = session_with(OpenAIClient(server.url))
        chat_module.print_banner(session)
        session.ask("First?")
        session.ask("Second?")
    assert f"fake at {server.url}, with a context of 1000 tokens" in shown(session)
    turn = [("user", "First?"), ("assistant", "one two three"), ("user", "Second?")]
    assert asked.conversations[-1] == turn


def test_where_tokens_can_be_counted_room_is_made_before_asking() -> None:
    asked = Asked(FakeEngineClient(max_model_len=8, max_num_batched_tokens=64))
    with serving(asked.engine_client) as server:
        session = session_with(OpenAIClient(server.url))
        session.conversation.turns = [Turn("1?", "1"), Turn("2?", "2"), Turn("3?", "3")]
        session.ask("4?")
    assert "outgrew the context of 8 tokens: the oldest 2 turns are forgotten." in shown(session)
    assert asked.conversations[-1] == [("user", "3?"), ("assistant", "3"), ("user", "4?")]


def test_an_answer_that_might_outgrow_the_context_is_asked_for_without_a_limit() -> None:
    engine_client = FakeEngineClient(max_model_len=8, max_num_batched_tokens=64)
    with serving(engine_client) as server:
        session = session_with(OpenAIClient(server.url), max_tokens=100)
        session.ask("Hi?")
    assert [params.max_tokens for params, _ in engine_client.asked] == [7]
    assert shown(session) == "one two three\n"


def test_where_nobody_counts_a_refusal_of_the_length_costs_the_oldest_turns() -> None:
    asked = []

    def answer(body: dict[str, Any]) -> httpx2.Response:
        asked.append([message["content"] for message in body["messages"]])
        if len(body["messages"]) + body.get("max_tokens", 1) > 5:
            return httpx2.Response(400, json=TOO_LONG)
        return stream(said("fine", "stop"), DONE)

    session = session_with(mock(answer), max_tokens=2)
    turns = [Turn("1?", "1"), Turn("2?", "2"), Turn("3?", "3")]
    session.conversation.turns = list(turns)
    session.ask("4?")
    assert asked == [
        ["1?", "1", "2?", "2", "3?", "3", "4?"],
        ["2?", "2", "3?", "3", "4?"],
        ["3?", "3", "4?"],
    ]
    assert session.conversation.turns == [turns[2], Turn("4?", "fine")]
    assert "fine\nThe conversation outgrew the server's context: the oldest 2 turns are forgotten.\n" in shown(session)


@pytest.mark.parametrize("content", [TOO_LONG, {"error": {"message": "no", "code": "context_length_exceeded"}}])
def test_a_question_that_never_fits_costs_no_turn(content: dict[str, Any]) -> None:
    session = session_with(mock(lambda body: httpx2.Response(400, json=content)), max_tokens=2)
    session.conversation.turns = [Turn("1?", "1"), Turn("2?", "2")]
    with pytest.raises(TooLongError, match="HTTP 400"):
        session.ask("3?")
    assert [turn.user for turn in session.conversation.turns] == ["1?", "2?"]


def test_another_refusal_is_not_taken_for_one_of_the_length() -> None:
    asked = []

    def answer(body: dict[str, Any]) -> httpx2.Response:
        asked.append(body)
        return httpx2.Response(400, json={"error": {"message": "temperature must be at most 2"}})

    session = session_with(mock(answer))
    session.conversation.turns = [Turn("1?", "1")]
    with pytest.raises(ServerError, match="HTTP 400: temperature must be at most 2"):
        session.ask("2?")
    assert len(asked) == 1 and len(session.conversation.turns) == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(num_tokens=5, fails_after=2), "the answer broke off: the engine died"),
        (Answer(num_tokens=5, hangs_up_after=2), "the connection to http://127.0.0.1:"),
        (Answer(status=500), "answers with HTTP 500: refused with 500"),
    ],
)
def test_an_answer_that_breaks_off_is_told_and_the_chat_goes_on(
    answer: Answer, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [answer, Answer(num_tokens=1)]
    with running(FakeServer(lambda body: answers.pop(0))) as url:
        session = session_with(OpenAIClient(url))
        lines = iter(["First?", "Second?"])
        monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or _leave())
        chat_module.talk(session)
    assert said in capsys.readouterr().err
    assert session.conversation.turns == [Turn("Second?", " word")]


def _leave() -> str:
    raise EOFError


def test_a_stream_without_an_end_is_no_answer() -> None:
    session = session_with(mock(lambda body: stream(said("half"))))
    with pytest.raises(ServerError, match="ended the stream before the answer was complete"):
        session.ask("Hi")
    assert session.conversation.turns == []


def test_lines_are_what_the_protocol_says_and_not_what_unicode_says() -> None:
    text = "a\u2028b\x85c é"
    session = session_with(mock(lambda body: stream(": hello\n\nevent: message\n", said(text), said("", "stop"), DONE)))
    session.ask("Hi")
    assert session.conversation.turns == [Turn("Hi", text)]


def test_what_speaks_another_protocol_is_named() -> None:
    client = mock(lambda body: httpx2.Response(200, content=b"data: <html>\n\n"))
    with pytest.raises(ServerError, match="this is no server of OpenAI's protocol: it says '<html>'"):
        session_with(client).ask("Hi")


# -- Ctrl-C ------------------------------------------------------------------------------------------------


class FirstOnly(asyncio.Event):
    """Lets so many waits through, and none after."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self._num_left = num_steps

    async def wait(self) -> Any:
        self._num_left -= 1
        return self._num_left >= 0 or await super().wait()


@pytest.mark.parametrize("num_steps", [0, 2])
def test_ctrl_c_stops_an_answer_and_frees_it_on_the_server(num_steps: int) -> None:
    engine_client = FakeEngineClient()
    engine_client.go = FirstOnly(num_steps)
    with serving(engine_client) as server:
        session = session_with(OpenAIClient(server.url))

        def press() -> None:
            server.until(lambda: bool(engine_client.open) and engine_client.num_steps == num_steps)
            os.kill(os.getpid(), signal.SIGINT)

        presser = threading.Thread(target=press)
        presser.start()
        session.ask("Hi")
        presser.join()
        server.until(lambda: not server.service.open)
        assert len(engine_client.aborted) == 1
    assert shown(session).endswith("\nstopped\n")
    if num_steps == 0:
        assert session.conversation.turns == []


def test_what_was_said_before_ctrl_c_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_client = FakeEngineClient()
    engine_client.go = FirstOnly(1)
    write = chat_module.ChatSession._stream.__globals__["write_model_text"]

    def write_and_press(console: Console, text: str) -> None:
        write(console, text)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("teachllm_cli.conversation.chat_session.write_model_text", write_and_press)
    with serving(engine_client) as server:
        session = session_with(OpenAIClient(server.url))
        session.ask("Hi")
        server.until(lambda: not server.service.open)
        assert len(engine_client.aborted) == 1
    assert session.conversation.turns == [Turn("Hi", "one")]
    assert shown(session) == "one\nstopped\n"
