"""A trace's texts join to what decoding gives, a character with its last token, bytes of none in brackets."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from teachllm.core.request import FinishReason, Request
from teachllm.engine.text.tokenizer import REPLACEMENT
from teachllm.engine.text.trace_texts import TraceTexts
from teachllm.sampling_params import SamplingParams
from tests.engine.text.test_detokenizer import BYTE_LEVEL, METASPACE, random_ids


def of_output(texts: TraceTexts, prompt: list[int], ids: list[int], at_once: int) -> list[str]:
    """Return what each output token adds, told some at a time."""
    request = Request("a", prompt, SamplingParams())
    found: list[str] = []
    for start in range(0, len(ids), at_once):
        new = ids[start : start + at_once]
        request.token_ids.extend(new)
        if start + at_once >= len(ids):
            request.finish_reason = FinishReason.LENGTH
        found += texts(new, request)
    assert len(found) == len(ids) and not texts._begun
    return found


def unbracketed(text: str) -> str:
    """Return what decoding gives: ⟨f0⟩ is a byte again, and what is then no character U+FFFD."""
    parts = re.split("⟨([0-9a-f]{2})⟩", text)
    data = b"".join(bytes.fromhex(part) if i % 2 else part.encode() for i, part in enumerate(parts))
    return data.decode(errors="replace")


@given(random_ids, random_ids, st.integers(1, 4))
def test_texts_join_to_what_all_ids_at_once_give(prompt: list[int], ids: list[int], at_once: int) -> None:
    texts, prompt = TraceTexts(BYTE_LEVEL), [ord("x"), *prompt]
    before, whole = (BYTE_LEVEL.decode(each, skip_special_tokens=False) for each in (prompt, prompt + ids))
    shown = "".join(texts(prompt))
    assert unbracketed(shown) == before
    if whole.startswith(before) and not before.endswith(REPLACEMENT):
        assert unbracketed("".join(of_output(texts, prompt, ids, at_once))) == whole[len(before) :]


@given(st.text(alphabet=st.sampled_from("ab é模🎉👩‍👧"), max_size=20))
def test_a_character_is_its_last_tokens(text: str) -> None:
    ids = list(text.encode())
    for tokenizer in (BYTE_LEVEL, METASPACE):
        found = of_output(TraceTexts(tokenizer), [ord("x")], ids, 1)
        expected = [text.encode()[: i + 1].decode(errors="ignore") for i in range(len(ids))]
        assert ["".join(found[: i + 1]) for i in range(len(ids))] == expected


def test_a_byte_of_no_character_is_shown_as_what_it_is_with_the_token_that_makes_it_one() -> None:
    ids = [*b"a", 0xF0, 0x9F, *b"b", 0xFF, *"é".encode(), 0xE6, 0xA8]
    expected = ["a", "", "", "⟨f0⟩⟨9f⟩b", "⟨ff⟩", "", "é", "", "⟨e6⟩⟨a8⟩"]
    for tokenizer in (BYTE_LEVEL, METASPACE):
        assert of_output(TraceTexts(tokenizer), [ord("x")], ids, 1) == expected
        assert TraceTexts(tokenizer)(ids) == expected


def test_an_output_completes_its_prompts_character_and_does_not_repeat_its_bytes() -> None:
    prompt = [*b"x", 0xF0, 0x9F]
    assert TraceTexts(BYTE_LEVEL)(prompt) == ["x", "", "⟨f0⟩⟨9f⟩"]
    assert of_output(TraceTexts(BYTE_LEVEL), prompt, [0x98, 0x80], 1) == ["", "\N{GRINNING FACE}"]
    assert of_output(TraceTexts(BYTE_LEVEL), prompt, [0x98, *b"a"], 1) == ["", "⟨98⟩a"]
    assert of_output(TraceTexts(BYTE_LEVEL), prompt, [*b"a"], 1) == ["a"]


def test_a_request_that_ends_in_the_middle_leaves_nothing() -> None:
    texts = TraceTexts(BYTE_LEVEL)
    request = Request("a", [ord("x")], SamplingParams())
    request.token_ids.append(0xE2)
    assert texts([0xE2], request) == [""] and len(texts._begun) == 1
    del request
    assert not texts._begun
