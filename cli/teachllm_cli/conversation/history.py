"""Keep the turns of a chat, and choose which to forget when it outgrows the model's context.

A request carries the whole conversation each time. That costs little: all but the newest message was computed
before, and the prefix cache still holds it. Forgetting the oldest turn changes the prefix of everything after it,
so nothing is found there: it is done seldom, and then down to half the context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Message = dict[str, str]


@dataclass(frozen=True)
class Turn:
    """A question and its answer."""

    user: str
    assistant: str


@dataclass
class Conversation:
    """The turns so far, oldest first, under a system prompt."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def messages(self, question: str) -> list[Message]:
        """Return what to send for the next answer."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": turn.assistant})
        return [*messages, {"role": "user", "content": question}]

    def make_room(self, question: str, count_tokens: Callable[[list[Message]], int], max_model_len: int) -> int:
        """Leave a quarter of the context for the answer; returns how many of the oldest turns went for it."""
        before = len(self.turns)
        if count_tokens(self.messages(question)) > max_model_len * 3 // 4:
            while self.turns and count_tokens(self.messages(question)) > max_model_len // 2:
                self.turns.pop(0)
        return before - len(self.turns)
