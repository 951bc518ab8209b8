"""A small engine that answers at once, so that these tests are about the commands alone."""

from __future__ import annotations

import signal
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import typer.testing
from typer.main import get_command
from typer.testing import CliRunner, Result

from teachllm.config import EngineConfig
from teachllm.engine.observability.speculation_stats import Speculation
from teachllm.outputs import CompletionOutput, RequestOutput
from teachllm.sampling_params import SamplingParams
from teachllm_cli import engine as engine_door
from teachllm_cli.app import app
from tests.clients import certificates


class WordTokenizer:
    """A word is a token."""

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        return list(range(sum(len(message["content"].split()) for message in messages)))


@dataclass
class FakeLLM:
    """Answers every question with `reply`, one word a step."""

    config: EngineConfig = field(default_factory=lambda: EngineConfig(device="cpu", max_model_len=1000))
    generation_defaults: dict[str, float] = field(default_factory=dict)
    reply: str = "Keys and values, kept."
    ctrl_c_after: int | None = None  # words
    tokenizer: WordTokenizer = field(default_factory=WordTokenizer)
    asked: list = field(default_factory=list)
    params: SamplingParams | None = None
    num_closed_streams: int = 0
    closed: bool = False
    speculated: list[Speculation | None] = field(default_factory=list)  # what is told of it, one after the other

    def speculation(self) -> Speculation | None:
        return self.speculated.pop(0) if self.speculated else None

    def generate(self, prompts: Sequence[str], params: SamplingParams, use_tqdm: bool = True) -> list[RequestOutput]:
        self.asked.append(list(prompts))
        self.params = params
        return [self._result(len(prompt.split()), prompt, params.n) for prompt in prompts]

    def stream_chat(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[RequestOutput]:
        self.asked.append([(message["role"], message["content"]) for message in messages])
        self.params = params
        num_tokens = len(self.tokenizer.apply_chat_template(messages))
        if num_tokens + 1 > self.config.max_model_len:
            raise ValueError(f"the prompt has {num_tokens} tokens and max_model_len={self.config.max_model_len}")
        words = self.reply.split(" ")
        try:
            for count in range(1, len(words) + 1):
                if self.ctrl_c_after == count - 1:
                    signal.raise_signal(signal.SIGINT)
                result = self._result(num_tokens, None)
                result.outputs[0].text = " ".join(words[:count])
                result.outputs[0].token_ids = list(range(count))
                result.outputs[0].finish_reason = "stop" if count == len(words) else None
                yield result
        finally:
            self.num_closed_streams += 1

    def close(self) -> None:
        self.closed = True

    def _result(self, num_tokens: int, prompt: str | None, n: int = 1) -> RequestOutput:
        ids = list(range(len(self.reply.split(" "))))
        outputs = [CompletionOutput(i, text=self.reply, token_ids=ids, finish_reason="stop") for i in range(n)]
        return RequestOutput("0", prompt, list(range(num_tokens)), outputs, num_cached_tokens=num_tokens // 2)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """The engine that commands get in place of the real one; `llm.config` is what the flags made."""
    fake = FakeLLM()

    def make(config: EngineConfig) -> FakeLLM:
        fake.config = replace(config.resolve(model_max_len=1000), device="cpu")
        return fake

    monkeypatch.setattr(engine_door, "make_llm", make)
    return fake


def as_options(given: dict[str, Any]) -> list[str]:
    """Return the command line that asks for these parameters; one with several values is given several times."""
    words: list[str] = []
    for name, value in given.items():
        for each in value if isinstance(value, tuple) else (value,):
            words += [f"--{name.replace('_', '-')}", str(each)]
    return words


built = cache(get_command)  # which takes longer than most commands


def run(*arguments: str, stdin: str | None = None) -> Result:
    with (
        mock.patch.object(typer.testing, "_get_command", built),
        mock.patch.object(ssl, "create_default_context", certificates),
    ):
        return CliRunner().invoke(app, list(arguments), input=stdin, prog_name="teachllm")


@pytest.fixture
def teachllm():
    """Run a command in this process: `teachllm("chat", "--stats", stdin="Hi")`."""
    return run
