"""One conversation in a terminal: streams answers, obeys `/commands`, counts what the prefix cache saved."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from teachllm_cli.conversation.answerers import Answerer, StreamedAnswer
from teachllm_cli.conversation.history import Conversation, Message, Turn
from teachllm_cli.conversation.openai_client import TooLongError
from teachllm_cli.terminal import write_model_text

if TYPE_CHECKING:
    from rich.console import Console

HELP = """\
/help          this list
/reset         forget the conversation
/system TEXT   set the system prompt and forget the conversation; without TEXT, show it
/stats         switch the figures after each answer on or off
/exit          leave (or Ctrl-D)
Ctrl-C stops an answer and keeps what was said."""


@dataclass
class ChatSession:
    """A conversation with a model.

    Attributes:
        answerer: the model, wherever it runs.
        out: where answers go.
        notes: where everything else goes.
        interactive: a person types: Ctrl-C stops the answer instead of the program.
    """

    answerer: Answerer
    out: Console
    notes: Console
    show_stats: bool = False
    interactive: bool = True
    conversation: Conversation = field(default_factory=Conversation)

    def ask(self, question: str) -> None:
        """Stream the answer to `question` and remember both.

        Raises:
            ValueError: the engine refuses the question.
            ServerError: the server does, or the answer broke off.
        """
        self._make_room(question)
        answer, num_forgotten = self._answer(question)
        self.out.print()
        del self.conversation.turns[:num_forgotten]
        self._say_forgotten(num_forgotten, "the server's context")
        if answer.text:
            self.conversation.turns.append(Turn(question, answer.text))
        if answer.finish_reason in (None, "abort"):
            self._note("stopped")
        elif answer.finish_reason == "length":
            length = "" if answer.num_output_tokens is None else f" after {answer.num_output_tokens} tokens"
            self._note(f"cut off{length}: raise {self.answerer.length_flags}")
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

    def _answer(self, question: str) -> tuple[StreamedAnswer, int]:
        """The answer, and how many of the oldest turns it left out: so where tokens cannot be counted."""
        num_left_out, turns = 0, self.conversation.turns
        while True:
            try:
                seen = Conversation(self.conversation.system, turns[num_left_out:])
                return self._stream(seen.messages(question)), num_left_out
            except TooLongError:
                if num_left_out == len(turns):
                    raise
                num_left_out += 1

    def _stream(self, messages: list[Message]) -> StreamedAnswer:
        answer, shown, start = StreamedAnswer(), 0, time.perf_counter()
        stream = self.answerer.stream(messages)
        with self._stop_flag() as stopped, contextlib.closing(stream):
            try:
                for answer in stream:
                    answer.total_s = time.perf_counter() - start
                    answer.first_token_s = answer.first_token_s or answer.total_s
                    write_model_text(self.out, answer.text[shown:])
                    shown = len(answer.text)
                    if stopped:
                        break  # closing the stream aborts the request
            except KeyboardInterrupt:
                if not self.interactive or self.answerer.stops_between_steps:
                    raise
        return answer

    @contextlib.contextmanager
    def _stop_flag(self) -> Iterator[list[bool]]:
        """A list that Ctrl-C fills, so that an answer stops between two steps and never inside one."""
        pressed: list[bool] = []
        if not self.interactive or not self.answerer.stops_between_steps:
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
        context = self.answerer.max_model_len
        if context is not None:
            num_dropped = self.conversation.make_room(question, self.answerer.count_tokens, context)
            self._say_forgotten(num_dropped, f"the context of {context} tokens")

    def _say_forgotten(self, num_turns: int, context: str) -> None:
        if num_turns:
            turns = "turn is" if num_turns == 1 else f"{num_turns} turns are"
            self._note(f"The conversation outgrew {context}: the oldest {turns} forgotten.")

    def _note(self, text: str) -> None:
        self.notes.print(text, style="dim", markup=False, soft_wrap=True)
