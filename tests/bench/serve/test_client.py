"""One request to a server: what is sent, what is read from the stream, and what a failure says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teachllm.bench.serve import client
from teachllm.bench.serve.client import Target, ask, ask_model, open_session
from teachllm.bench.serve.dataset import Prompt
from teachllm.bench.serve.load import run
from teachllm.bench.serve.record import Record
from tests.bench.serve.fake_openai import MODEL, Answer, FakeServer, running
from tests.waiting import HANG_SECONDS

PROMPT = Prompt("three small words", 4)


def asked(answer: Answer, endpoint: str = "/v1/completions", timeout_s: float = HANG_SECONDS) -> Record:
    """What became of one request to a server that answers so."""
    with running(FakeServer(lambda body: answer)) as url:
        target = Target(url, endpoint, MODEL, timeout_s=timeout_s)
        record = Record(0.0, PROMPT.output_len)

        async def main() -> None:
            times = iter(range(1000))
            async with open_session() as session:
                await ask(session, target, target.body(PROMPT), record, lambda: float(next(times)))

        run(asyncio.wait_for(main(), HANG_SECONDS))
    return record


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_tokens_are_counted_by_the_server_and_chunks_by_the_client(endpoint: str) -> None:
    record = asked(Answer(num_tokens=7, tokens_per_chunk=3), endpoint)
    assert record.error == ""
    assert (record.num_prompt_tokens, record.num_output_tokens, record.has_usage) == (3, 7, True)
    assert len(record.chunk_s) == 3


def test_without_usage_a_chunk_counts_as_a_token() -> None:
    record = asked(Answer(num_tokens=6, tokens_per_chunk=2, has_usage=False))
    assert (record.num_output_tokens, record.has_usage, record.error) == (3, False, "")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(status=429), "HTTP 429: refused with 429"),
        (Answer(fails_after=2), "the engine died"),
        (Answer(hangs_up_after=2), "not completed"),
        (Answer(hangs_up_after=0), "not completed"),
    ],
)
def test_a_failure_is_one_line_in_the_record(answer: Answer, said: str) -> None:
    record = asked(answer)
    assert said in record.error and "\n" not in record.error
    assert record.end_s > record.sent_s


def test_an_answer_that_never_comes_fails_in_time() -> None:
    assert asked(Answer(held=asyncio.Event()), timeout_s=0.05).error == "no whole answer within 0.05 s"


def test_an_endpoint_that_is_not_there_is_named_by_the_server() -> None:
    assert asked(Answer(), "/v2/completions").error == "HTTP 404: no route /v2/completions"


class ChunkStream:
    """A stream that was read in these pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    async def iter_any(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece


def read(*pieces: bytes) -> Record:
    """The record of a stream, with a clock that counts its pieces."""
    record, times = Record(0.0, 4), iter(range(1, 100_000))
    asyncio.run(client._read(ChunkStream(list(pieces)), record, lambda: float(next(times))))  # type: ignore[arg-type]
    return record


def event(choice: dict | None = None, **more: object) -> bytes:
    return b"data: " + json.dumps({"choices": [choice] if choice else [], **more}).encode() + b"\n\n"


WORD = event({"text": "é word", "finish_reason": None})
LAST = event({"text": " word", "finish_reason": "length"})
USAGE = event(usage={"prompt_tokens": 5, "completion_tokens": 9, "prompt_tokens_details": None})
DONE = b"data: [DONE]\n\n"
STREAM = b": a comment\r\n\r\n" + WORD + b"event: chunk\ndata:" + WORD[6:] + LAST + USAGE + DONE


@given(st.lists(st.integers(1, len(STREAM) - 1), unique=True).map(sorted))
def test_where_the_network_cuts_a_stream_changes_no_count(cuts: list[int]) -> None:
    ends = [*cuts, len(STREAM)]
    record = read(*(STREAM[begin:end] for begin, end in zip([0, *cuts], ends, strict=True)))
    assert (record.num_prompt_tokens, record.num_output_tokens, len(record.chunk_s)) == (5, 9, 3)
    assert record.error == "" and record.chunk_s == sorted(record.chunk_s) and record.end_s == record.chunk_s[-1]


def test_a_chunk_is_stamped_when_it_was_read() -> None:
    assert read(b": nothing yet\n", WORD, USAGE, WORD + LAST, DONE).chunk_s == [2.0, 4.0, 4.0]


def test_a_role_is_no_token_and_thoughts_are() -> None:
    role = event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
    thought = event({"delta": {"reasoning_content": "Hm"}, "finish_reason": None})
    word = event({"delta": {"role": "assistant", "content": "Yes"}, "finish_reason": None})
    end = event({"delta": {}, "finish_reason": "stop"})
    record = read(role, thought, word, end, DONE)
    assert (record.chunk_s, record.end_s) == ([2.0, 3.0], 4.0)


def test_a_token_whose_text_awaits_more_bytes_is_one_and_a_lone_reason_is_none() -> None:
    half = event({"text": "", "finish_reason": None})
    end = event({"text": "", "finish_reason": "stop"})
    assert read(half, WORD, end, DONE).chunk_s == [1.0, 2.0]
    assert read(end, USAGE, DONE).chunk_s == [1.0]  # nothing but the end-of-text token


def test_a_stream_that_stops_in_the_middle_has_failed() -> None:
    assert read(WORD, WORD).error == "the stream ended without a last chunk, after 2 chunks"
    assert read(b'{"choices": []}').error == "the stream ended without a last chunk, after 0 chunks"


def test_the_body_asks_for_a_stream_with_usage_and_null_takes_a_field_out() -> None:
    target = Target("http://here", model="m", fields={"temperature": 0.5, "top_k": None, "stream_options": None})
    assert json.loads(target.body(Prompt([1, 2], 9))) == {
        **{"model": "m", "prompt": [1, 2], "max_tokens": 9},
        **{"stream": True, "temperature": 0.5},
    }
    chat = json.loads(Target("http://here", "/v1/chat/completions").body(Prompt("Hi", 9)))
    assert chat["messages"] == [{"role": "user", "content": "Hi"}] and "prompt" not in chat
    assert chat["stream_options"] == {"include_usage": True}


def test_a_chat_takes_no_token_ids() -> None:
    with pytest.raises(ValueError, match="takes text: send token ids to /v1/completions"):
        Target("http://here", "/v1/chat/completions").body(Prompt([1, 2], 9))


@pytest.mark.parametrize("wrong", [{"base_url": "127.0.0.1:8000"}, {"base_url": "http://here", "endpoint": "v1"}])
def test_an_address_that_is_none_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="must begin with"):
        Target(**wrong)


def test_an_address_may_end_with_v1() -> None:
    assert Target("http://here/v1/").root == "http://here"


def model_at(url: str, name: str = "") -> str:
    async def main() -> str:
        async with open_session() as session:
            return await ask_model(session, Target(url, model=name))

    return run(asyncio.wait_for(main(), HANG_SECONDS))


def test_a_server_is_asked_for_its_model_unless_one_is_named() -> None:
    with running(FakeServer()) as url:
        assert (model_at(url), model_at(url, "mine")) == (MODEL, "mine")
    for name in ("", "mine"):
        with pytest.raises(ConnectionError, match=r"no server answers at http://127.0.0.1:\d+ \(Connection refused\)"):
            model_at(url, name)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "msgspec", None)
    with pytest.raises(ImportError, match=r"pip install 'teachllm\[serve\]'"):
        open_session()
