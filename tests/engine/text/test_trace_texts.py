"""A trace's texts join to what decoding gives, a character with its last token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from teachllm.core.request import FinishReason, Request
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


@given(random_ids, random_ids, st.integers(1, 4))
def test_texts_join_to_what_all_ids_at_once_give(prompt: list[int], ids: list[int], at_once: int) -> None:
    texts, prompt = TraceTexts(BYTE_LEVEL), [ord("x"), *prompt]
    assert "".join(texts(prompt)) == BYTE_LEVEL.decode(prompt, skip_special_tokens=False)
    before, whole = (BYTE_LEVEL.decode(each, skip_special_tokens=False) for each in (prompt, prompt + ids))
    if whole.startswith(before):
        assert "".join(of_output(texts, prompt, ids, at_once)) == whole[len(before) :]


@given(st.text(alphabet=st.sampled_from("ab é模🎉👩‍👧"), max_size=20))
def test_a_character_is_its_last_tokens(text: str) -> None:
    ids = list(text.encode())
    for tokenizer in (BYTE_LEVEL, METASPACE):
        found = of_output(TraceTexts(tokenizer), [ord("x")], ids, 1)
        expected = [text.encode()[: i + 1].decode(errors="ignore") for i in range(len(ids))]
        assert ["".join(found[: i + 1]) for i in range(len(ids))] == expected


def test_a_request_that_ends_in_the_middle_leaves_nothing() -> None:
    texts = TraceTexts(BYTE_LEVEL)
    request = Request("a", [ord("x")], SamplingParams())
    request.token_ids.append(0xE2)
    assert texts([0xE2], request) == [""] and len(texts._begun) == 1
    del request
    assert not texts._begun
