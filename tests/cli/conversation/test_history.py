"""What a chat remembers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from teachllm_cli.conversation.history import Conversation, Turn


def count_characters(messages: list[dict[str, str]]) -> int:
    return sum(len(message["content"]) for message in messages)


def test_messages_alternate_under_the_system_prompt_and_end_with_the_question() -> None:
    conversation = Conversation("Be brief.", [Turn("a", "b")])
    said = [(message["role"], message["content"]) for message in conversation.messages("c")]
    assert said == [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c")]


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(0, 60), st.integers(16, 400))
def test_only_the_oldest_turns_go_and_only_when_the_context_is_three_quarters_full(
    lengths: list[int], question_length: int, max_model_len: int
) -> None:
    turns = [Turn(user="q" * length, assistant="a") for length in lengths]
    conversation = Conversation(turns=list(turns))
    total = sum(lengths) + len(lengths) + question_length
    dropped = conversation.make_room("q" * question_length, count_characters, max_model_len)
    assert conversation.turns == turns[dropped:]
    left = sum(lengths[dropped:]) + len(lengths[dropped:]) + question_length
    if total <= max_model_len * 3 // 4:
        assert dropped == 0
    else:
        assert left <= max_model_len // 2 or not conversation.turns
    if dropped:
        assert left + lengths[dropped - 1] + 1 > max_model_len // 2
