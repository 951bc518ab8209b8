"""One conversation in a terminal: streams answers, obeys `/commands`, counts what the prefix cache saved."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from teachllm.outputs import RequestOutput
from teachllm.sampling_params import SamplingParams
from teachllm_cli.conversation import Conversation, Message, Turn
from teachllm_cli.terminal import write_model_text

if TYPE_CHECKING:
    from rich.console import Console

    from teachllm import LLM

HELP = """\
/help          this list
/reset         forget the conversation
/system TEXT   set the system prompt and forget the conversation; without TEXT, show it
/stats         switch the figures after each answer on or off
/exit          leave (or Ctrl-D)
Ctrl-C stops an answer and keeps what was said."""


@dataclass
class Answer:
    """One answer as it streams in. Times are seconds from the question."""

    result: RequestOutput | None = None
    first_token_s: float = 0.0
    total_s: float = 0.0

    @property
    def text(self) -> str:
        return self.result.outputs[0].text if self.result else ""

    @property
    def finish_reason(self) -> str | None:
        return self.result.outputs[0].finish_reason if self.result else None

    @property
    def num_output_tokens(self) -> int:
        return len(self.result.outputs[0].token_ids) if self.result else 0

    def stats(self) -> str:
        """Speed counts the tokens after the first: the wait for that one is another figure."""
        num_prompt_tokens = len(self.result.prompt_token_ids) if self.result else 0
        num_cached_tokens = self.result.num_cached_tokens if self.result else 0
        parts = [
            f"{num_prompt_tokens} prompt tokens, {num_cached_tokens} from the prefix cache",
            f"{self.num_output_tokens} output tokens",
            f"first after {self.first_token_s * 1000:.0f} ms",
        ]
        if self.num_output_tokens > 1 and self.total_s > self.first_token_s:
            parts.append(f"{(self.num_output_tokens - 1) / (self.total_s - self.first_token_s):.0f} tokens/s")
        return "; ".join(parts)


@dataclass
class ChatSession:
    """A conversation with a model.

    Attributes:
        out: where answers go.
        notes: where everything else goes.
        interactive: a person types: Ctrl-C stops the answer instead of the program.
    """

    llm: LLM
    params: SamplingParams
    out: Console
    notes: Console
    show_stats: bool = False
    interactive: bool = True
    conversation: Conversation = field(default_factory=Conversation)

    def ask(self, question: str) -> None:
        """Stream the answer to `question` and remember both.

        Raises:
            ValueError: the engine refuses the question.
        """
        self._make_room(question)
        answer = self._stream(self.conversation.messages(question))
        self.out.print()
        if answer.text:
            self.conversation.turns.append(Turn(question, answer.text))
        if answer.finish_reason in (None, "abort"):
            self._note("stopped")
        elif answer.finish_reason == "length":
            self._note(f"cut off after {answer.num_output_tokens} tokens: raise --max-tokens or --max-model-len")
        if self.show_stats:
            self._note(answer.stats())

    def command(self, line: str) -> bool:
        """Obey a line that begins with a slash. False: leave the chat."""
        name, _, argument = line.strip().partition(" ")
        argument = argument.strip()
        if name in ("/exit", "/quit"):
            return False
        if name == "/help":
            self._note(HELP)
        elif name == "/reset":
            self.conversation.turns.clear()
            self._note("The conversation is forgotten.")
        elif name == "/stats":
            self.show_stats = not self.show_stats
            self._note(f"Figures after each answer are {'on' if self.show_stats else 'off'}.")
        elif name == "/system" and argument:
            self.conversation = Conversation(system=argument)
            self._note("The system prompt is set; the conversation starts over.")
        elif name == "/system":
            self._note(self.conversation.system or "There is no system prompt.")
        else:
            self._note(f"{name} is no command: /help lists them.")
        return True

    def _stream(self, messages: list[Message]) -> Answer:
        answer, shown, start = Answer(), 0, time.perf_counter()
        stream = self.llm.stream_chat(messages, self.params)
        with self._stop_flag() as stopped, contextlib.closing(stream):
            for answer.result in stream:
                answer.total_s = time.perf_counter() - start
                if not answer.first_token_s and answer.num_output_tokens:
                    answer.first_token_s = answer.total_s
                write_model_text(self.out, answer.text[shown:])
                shown = len(answer.text)
                if stopped:
                    break  # closing the stream aborts the request
        return answer

    @contextlib.contextmanager
    def _stop_flag(self) -> Iterator[list[bool]]:
        """A list that Ctrl-C fills, so that an answer stops between two steps and never inside one."""
        pressed: list[bool] = []
        if not self.interactive:
            yield pressed
            return

        def press(*_: object) -> None:
            if pressed:  # twice: the step takes too long to wait for
                raise KeyboardInterrupt
            pressed.append(True)

        before = signal.signal(signal.SIGINT, press)
        try:
            yield pressed
        finally:
            signal.signal(signal.SIGINT, before)

    def _make_room(self, question: str) -> None:
        context, tokenizer = self.llm.config.max_model_len, self.llm.tokenizer
        assert context is not None and tokenizer is not None  # resolved, and chat has no flag to skip it

        def count_tokens(messages: list[Message]) -> int:
            return len(tokenizer.apply_chat_template(messages))

        if dropped := self.conversation.make_room(question, count_tokens, context):
            turns = "turn is" if dropped == 1 else f"{dropped} turns are"
            self._note(f"The conversation outgrew the context of {context} tokens: the oldest {turns} forgotten.")

    def _note(self, text: str) -> None:
        self.notes.print(text, style="dim", markup=False, soft_wrap=True)
