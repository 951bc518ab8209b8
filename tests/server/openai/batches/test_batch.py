"""Batches: what becomes of every line, and what is left when one ends early."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest

from teachllm.engine.async_llm import AsyncLLM
from teachllm.server.openai.batches.batch import LocalServer, Totals
from teachllm.server.openai.batches.batch_file import BatchPlan, make_plan, take_up
from teachllm.server.options import ServerOptions
from tests.server.conftest import Stats
from tests.server.fake_engine import HANG_SECONDS, FakeEngineClient, Server

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"temperature": 0, "max_tokens": 8}


def line(custom_id: Any, body: Any, url: Any = TEXT, **more: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more})


def source_of(*lines: str | bytes) -> io.BytesIO:
    return io.BytesIO(b"".join((text if isinstance(text, bytes) else text.encode()) + b"\n" for text in lines))


def refusals(plan: BatchPlan) -> list[dict[str, Any]]:
    return [json.loads(text) for text in plan.refusals]


class Run:
    """A batch with a fake engine; what it wrote is in `written`."""

    def __init__(self, engine_client: Any = None, has_ended: bool = False, **options: Any) -> None:
        self.engine_client = FakeEngineClient() if engine_client is None else engine_client
        self.server = LocalServer(self.engine_client, ServerOptions(log_requests=False, **options), lambda: has_ended)
        self.written: list[bytes] = []
        self.totals = Totals()

    @property
    def answers(self) -> dict[str, dict[str, Any]]:
        found = [json.loads(text) for text in self.written]
        assert len({answer["id"] for answer in found}) == len(found)
        return {answer["custom_id"]: answer for answer in found}

    async def answer(self, *lines: str, max_concurrency: int = 4) -> None:
        source = source_of(*lines)
        plan = make_plan(source)
        await self.server.answer(
            source, plan.offsets, self.written.append, max_concurrency=max_concurrency, totals=self.totals
        )

    async def until_open(self, number: int) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while len(self.engine_client.open) < number:
                await asyncio.sleep(0)


# -- answers -----------------------------------------------------------------------------------------------


def without_ids(body: dict[str, Any]) -> dict[str, Any]:
    usage = {name: count for name, count in body.get("usage", {}).items() if name != "prompt_tokens_details"}
    return {**{name: value for name, value in body.items() if name not in ("id", "created")}, "usage": usage}


def test_answers_and_refusals_are_those_of_the_server(engine: tuple[AsyncLLM, Stats], server: Server) -> None:
    bodies: list[tuple[str, Any]] = [
        (TEXT, {"prompt": "A KV cache", **GREEDY}),
        (TEXT, {"prompt": ["Paged", "Radix"], "n": 2, "model": "teachlm", **GREEDY}),
        (CHAT, {"messages": [{"role": "user", "content": "What is a KV cache?"}], **GREEDY}),
        (TEXT, {"prompt": "a", "temperature": -1}),
        (TEXT, {"prompt": "a", "model": "gpt"}),
        (TEXT, {"prompt": "word " * 3000}),
        (TEXT, {"prompt": "a", "stream": "yes"}),
        (CHAT, {"prompt": "a"}),
        (CHAT, ["no object"]),
    ]
    run = Run(engine[0], served_model_names=("teachlm", "alias"))
    asyncio.run(run.answer(*(line(str(i), body, url) for i, (url, body) in enumerate(bodies))))
    assert len(run.answers) == len(bodies)
    for i, (url, body) in enumerate(bodies):
        found, wanted = run.answers[str(i)], server.post(url, body)
        assert found["error"] is None
        assert found["response"]["status_code"] == wanted.status_code
        assert without_ids(found["response"]["body"]) == without_ids(wanted.json())
        if wanted.status_code == 200:
            assert found["response"]["body"]["id"].endswith(found["response"]["request_id"])
    assert (run.totals.num_answered, run.totals.num_refused) == (3, 6)
    assert run.totals.num_output_tokens == 6 * 8


def test_a_line_of_output_has_the_fields_of_openai() -> None:
    run = Run()
    asyncio.run(run.answer(line("a", {"prompt": "x"})))
    answer = run.answers["a"]
    assert list(answer) == ["id", "custom_id", "response", "error"]
    assert list(answer["response"]) == ["status_code", "request_id", "body"]
    assert answer["response"]["body"]["choices"][0]["text"] == "one two three"
    assert run.written[0].endswith(b"\n") and run.written[0].count(b"\n") == 1


def test_no_more_requests_are_open_than_asked_for_and_all_are_answered() -> None:
    run = Run()
    opened: list[int] = []

    async def play() -> None:
        run.engine_client.go.clear()
        lines = [line(f"r{i}", {"prompt": "x"}) for i in range(20)]
        answering = asyncio.create_task(run.answer(*lines, max_concurrency=3))
        await run.until_open(3)
        for _ in range(100):
            await asyncio.sleep(0)
            opened.append(len(run.engine_client.open))
        run.engine_client.go.set()
        await asyncio.wait_for(answering, HANG_SECONDS)

    asyncio.run(play())
    assert max(opened) == 3
    assert set(run.answers) == {f"r{i}" for i in range(20)}


def test_a_cancelled_batch_has_written_what_was_complete_and_frees_the_rest() -> None:
    run = Run(FakeEngineClient(["one", " two"]))

    async def play() -> None:
        answering = asyncio.create_task(run.answer(*(line(f"r{i}", {"prompt": "x"}) for i in range(9))))
        async with asyncio.timeout(HANG_SECONDS):
            while not run.written:
                await asyncio.sleep(0)
        run.engine_client.go.clear()
        for _ in range(100):
            await asyncio.sleep(0)
        num_open = len(run.engine_client.open)
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
        assert 0 < num_open == len(run.engine_client.aborted)

    asyncio.run(play())
    assert 0 < len(run.answers) < 9
    assert {answer["response"]["status_code"] for answer in run.answers.values()} == {200}


def test_a_failure_of_one_step_is_a_line_and_the_batch_goes_on() -> None:
    run = Run()
    run.engine_client.fails_with = RuntimeError("a step failed")
    asyncio.run(run.answer(line("a", {"prompt": "x"}), line("b", {"prompt": "x"})))
    assert {answer["response"]["status_code"] for answer in run.answers.values()} == {500}
    assert len(run.answers) == 2


def test_the_engines_death_ends_the_batch_and_writes_nothing_for_what_it_left() -> None:
    run = Run(has_ended=True)
    run.engine_client.fails_with = RuntimeError("killed")
    with pytest.raises(RuntimeError, match="the engine failed: RuntimeError: killed; run the same command again"):
        asyncio.run(run.answer(*(line(f"r{i}", {"prompt": "x"}) for i in range(9))))
    assert run.written == []


def test_an_output_that_cannot_be_written_ends_the_batch() -> None:
    run = Run()

    def full(text: bytes) -> None:
        raise OSError("no space left")

    source = source_of(*(line(f"r{i}", {"prompt": "x"}) for i in range(9)))
    offsets = make_plan(source).offsets
    with pytest.raises(OSError, match="no space left"):
        asyncio.run(run.server.answer(source, offsets, full, max_concurrency=2, totals=run.totals))


def test_a_bug_of_the_server_is_a_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    monkeypatch.setattr(run.engine_client.tokenizer, "encode", lambda *arguments: 1 / 0)
    asyncio.run(
        run.answer(line("a", {"prompt": "x"}), line("b", {"messages": [{"role": "user", "content": "x"}]}, CHAT))
    )
    assert {name: answer["response"]["status_code"] for name, answer in run.answers.items()} == {"a": 500, "b": 500}
    assert "the server failed: ZeroDivisionError" in run.answers["a"]["response"]["body"]["error"]["message"]


# -- lines that are no requests ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "custom_id", "param", "said"),
    [
        ("{oops", None, None, "line 1 is no JSON object"),
        ("[]", None, None, "line 1 is no JSON object"),
        (b'{"custom_id": "\xff"}', None, None, "line 1 is no JSON object"),
        ('{"custom_id": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", None, None, "line 1 is no JSON object"),
        (line(None, {}), None, "custom_id", "line 1 has no custom_id"),
        (line("", {}), None, "custom_id", "line 1 has no custom_id"),
        (line(7, {}), None, "custom_id", "line 1 has no custom_id"),
        (line("a", {}, method="GET"), "a", "method", "the method has to be POST"),
        (line("a", {}, "/v1/embeddings"), "a", "url", "one of /v1/chat/completions, /v1/completions"),
        (line("a", {}, "http://elsewhere/v1/completions"), "a", "url", "the url has to be one of"),
        (line("a", {}, ["/v1/completions"]), "a", "url", "the url has to be one of"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/completions"}', "a", "body", "line 1 has no body"),
        (line("a", {"prompt": "x", "stream": True}), "a", "stream", "a batch is not streamed"),
    ],
)
def test_what_is_no_request_is_refused_with_openais_error(
    text: str | bytes, custom_id: str | None, param: str | None, said: str
) -> None:
    plan = make_plan(source_of(text, line("fine", {"prompt": "x"})))
    (refusal,) = refusals(plan)
    assert (refusal["custom_id"], refusal["response"]) == (custom_id, None)
    error = refusal["error"]
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", param, 400)
    assert said in error["message"]
    assert len(plan.offsets) == 1  # the other line is asked


def test_an_id_that_comes_twice_is_asked_once() -> None:
    plan = make_plan(source_of(line("a", {}), "", "  ", line("a", {}), line("b", {})))
    assert (len(plan.offsets), plan.num_lines) == (2, 3)
    assert [refusal["custom_id"] for refusal in refusals(plan)] == ["a"]
    assert "line 4 has the custom_id of another" in refusals(plan)[0]["error"]["message"]


def test_a_stream_that_hides_from_the_first_look_does_not_break_the_output() -> None:
    hidden = (
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "\\u0073tream": true'
    )
    run = Run()
    source = source_of(hidden + ', "stream": false}}', hidden + "}}")
    plan = make_plan(source)
    asyncio.run(run.server.answer(source, plan.offsets, run.written.append, max_concurrency=1, totals=run.totals))
    assert all(json.loads(text)["custom_id"] == "a" for text in [*run.written, *plan.refusals])


# -- going on ----------------------------------------------------------------------------------------------


def output(custom_id: str | None, status: int | None = 200, error: Any = None) -> bytes:
    response = None if status is None else {"status_code": status, "request_id": "x", "body": {"text": "é"}}
    answer = {"id": "batch_req_1", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(answer, separators=(",", ":")).encode() + b"\n"


def test_what_has_been_answered_stays_and_what_is_said_again_goes(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    kept = [output("a"), output("b", 400), output("c", 501)]
    goes = [output("d", 500), output("e", 503), output("f", None, {"message": "no"}), output(None, None, {"m": ""})]
    path.write_bytes(kept[0] + goes[0] + kept[1] + b"".join(goes[1:]) + kept[2] + output("g")[:-9])
    assert take_up(path) == {"a", "b", "c"}
    assert path.read_bytes() == b"".join(kept)
    assert list(tmp_path.iterdir()) == [path]
    assert take_up(path) == {"a", "b", "c"}


@pytest.mark.parametrize("torn", [b"", b"{", b'{"id":"batch_req_1', output("z")[:-1]])
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(output("a") + torn)
    assert take_up(path) == {"a"}
    assert path.read_bytes() == output("a")


@pytest.mark.parametrize(
    "content",
    [
        b"my diary\n",
        b"my diary",
        line("a", {}).encode() + b"\n",
        output("a") + b"{}\n",
        output("a") + b'{"id":"batch_req_1","custom_id":3}\n',
    ],
)
def test_a_file_that_holds_something_else_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"line [12], is no answer of a batch: choose another file, or --overwrite"):
        take_up(path)
    assert path.read_bytes() == content


def test_a_batch_in_two_parts_answers_what_one_in_whole_does(tmp_path: Path) -> None:
    lines = [line(f"r{i}", {"prompt": "x"}) for i in range(6)] + ["{oops", line("r0", {"prompt": "twice"})]
    path = tmp_path / "out.jsonl"
    first, second = Run(), Run()
    asyncio.run(first.answer(*lines[:3]))
    path.write_bytes(b"".join([*make_plan(source_of(*lines)).refusals, *first.written]) + b'{"id":"batch')
    source = source_of(*lines)
    plan = make_plan(source, take_up(path))
    assert (plan.num_before, len(plan.offsets), plan.num_lines) == (3, 3, 8)
    asyncio.run(
        second.server.answer(source, plan.offsets, second.written.append, max_concurrency=2, totals=second.totals)
    )
    found = path.read_bytes() + b"".join([*plan.refusals, *second.written])
    ids = [json.loads(text)["custom_id"] for text in found.splitlines()]
    assert sorted(map(str, ids)) == ["None", "r0", "r0", "r1", "r2", "r3", "r4", "r5"]
