"""Text streams out whole characters at a time, ends exactly at a stop string, and loses nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from teachllm.engine.text.detokenizer import IncrementalDetokenizer, StopMatch
from teachllm.engine.text.tokenizer import Tokenizer, _TokenizersBackend
from teachllm.sampling_params import SamplingParams

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
END = 300  # a special token


def _byte_level() -> Tokenizer:
    """Ids 0 to 255 are the bytes; some longer tokens begin or end within a character."""
    byte_to_symbol = byte_symbols()
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += ["é".encode(), b"hello", b" hello", "模".encode()[:2], "模".encode()[1:] + b"a", "😀".encode()[:3], b"ab"]
    pieces += [b"a" + "模".encode()[:1], "é".encode() + "模".encode()[:2]]
    vocab = {"".join(byte_to_symbol[byte] for byte in piece): i for i, piece in enumerate(pieces)}
    vocab |= {f"<unused{i}>": i for i in range(len(vocab), END)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return Tokenizer(_TokenizersBackend(backend), {"eos_token": "<|end|>"}, {})


def byte_symbols() -> dict[int, str]:
    """The printable stand-in that byte-level vocabularies use for each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _metaspace() -> Tokenizer:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {"▁hello": 256, "hello": 257, "▁": 258, "a": 259, "<unk>": 260}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(_TokenizersBackend(backend), {}, {})


BYTE_LEVEL, METASPACE = _byte_level(), _metaspace()
random_ids = st.lists(
    st.one_of(st.integers(0, 264), st.sampled_from([*b"ab", 0xA1, 256, 259, 260, 261, 263, 264, END])), max_size=60
)


def detokenizer(tokenizer: Tokenizer = BYTE_LEVEL, prompt: list[int] | None = None, **params) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(tokenizer, prompt or [], SamplingParams(max_tokens=None, **params))


def stream(under_test: IncrementalDetokenizer, ids: list[int]) -> tuple[list[str], StopMatch | None]:
    """What was shown after each token and at the end, and the stop match."""
    shown, match = [], None
    for token_id in ids:
        match = under_test.append([token_id])
        shown.append(under_test.text)
        if match is not None:
            break
    under_test.finish()
    return [*shown, under_test.text], match


@given(random_ids, st.booleans())
def test_random_byte_tokens_give_the_text_of_decoding_them_at_once(ids: list[int], skip_special_tokens: bool) -> None:
    shown, _ = stream(detokenizer(skip_special_tokens=skip_special_tokens), ids)
    assert shown[-1] == BYTE_LEVEL.decode(ids, skip_special_tokens)


@given(random_ids)
def test_what_was_shown_stays_and_never_ends_in_half_a_character(ids: list[int]) -> None:
    shown, _ = stream(detokenizer(), ids)
    for earlier, later in pairwise(shown):
        assert later.startswith(earlier)
    assert not any(text.endswith(REPLACEMENT) for text in shown[:-1])
    assert all(text.count(REPLACEMENT) <= shown[-1].count(REPLACEMENT) for text in shown)


@given(random_ids, st.integers(1, 5), st.booleans(), st.sampled_from([BYTE_LEVEL, METASPACE]))
def test_what_each_token_added_joins_to_the_text(
    ids: list[int], at_once: int, skip: bool, tokenizer: Tokenizer
) -> None:
    under_test = detokenizer(tokenizer, skip_special_tokens=skip)
    added: list[str | None] = []
    for start in range(0, len(ids), at_once):
        under_test.append(ids[start : start + at_once])
        assert len(under_test.added) == len(ids[start : start + at_once])
        added += under_test.added
    joined = "".join(text or "" for text in added)
    assert joined + under_test.finish() == under_test.text
    hidden = tokenizer.special_ids if skip else ()
    assert [text is None for text in added] == [token_id in hidden for token_id in ids]


def test_what_a_token_added_is_told_before_a_stop_string_is_cut_from_it() -> None:
    under_test = detokenizer(stop="ll")
    under_test.append([ord("x"), 257, ord("x")])
    assert (under_test.added[:2], under_test.text) == (["x", "hello"], "xhe")


@given(random_ids, random_ids)
@example([0x80, 0x80, 0x80, 0xC3], [0xA9, ord("y")])
@example([0xE2, 0x82], [])
def test_half_a_character_at_the_prompts_end_is_shown_only_if_the_output_completes_it(
    prompt: list[int], ids: list[int]
) -> None:
    prompt = [ord("x"), *prompt]
    text = stream(detokenizer(prompt=prompt), ids)[0][-1]
    before, whole = BYTE_LEVEL.decode(prompt), BYTE_LEVEL.decode(prompt + ids)
    if whole.startswith(before):
        assert text == whole[len(before) :]
    else:
        assert whole == before.rstrip(REPLACEMENT) + before[len(before.rstrip(REPLACEMENT)) + 1 :] + text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30), st.integers(1, 4))
def test_valid_text_shows_every_character_with_its_last_byte(text: str, at_once: int) -> None:
    text = text.replace(REPLACEMENT, "")
    ids = list(text.encode())
    for tokenizer in (BYTE_LEVEL, METASPACE):
        under_test = detokenizer(tokenizer, prompt=[ord("x")])
        for end in range(0, len(ids), at_once):
            under_test.append(ids[end : end + at_once])
            assert under_test.text == text.encode()[: end + at_once].decode(errors="ignore")
        under_test.finish()
        assert under_test.text == text


def test_text_continues_the_prompt() -> None:
    assert stream(detokenizer(METASPACE, prompt=[257]), [256, 256])[0][-1] == " hello hello"
    assert stream(detokenizer(METASPACE), [256, 256])[0][-1] == "hello hello"
    half, rest = list("模".encode()[:1]), list("模".encode()[1:])
    assert stream(detokenizer(prompt=[ord("a"), *half]), rest)[0][-1] == "模"


def test_an_unfinished_character_is_shown_only_when_nothing_more_comes() -> None:
    shown, _ = stream(detokenizer(), [ord("a"), *"😀".encode()[:3]])
    assert shown == ["a", "a", "a", "a", "a" + REPLACEMENT]


@given(
    st.text(alphabet="abcé模", max_size=24),
    st.lists(st.text(alphabet="abcé模", min_size=1, max_size=5), max_size=3),
    st.data(),
)
def test_a_stop_string_is_found_wherever_tokens_cut_it(text: str, stops: list[str], data: st.DataObject) -> None:
    # Expected by looking at one more character at a time: the first prefix that ends with a stop string.
    ends = [
        (end, max((stop for stop in stops if text[:end].endswith(stop)), key=len))
        for end in range(1, len(text) + 1)
        if any(text[:end].endswith(stop) for stop in stops)
    ]
    expected = text[: ends[0][0] - len(ends[0][1])] if ends else text
    including = text[: ends[0][0]] if ends else text

    ids, at_once = list(text.encode()), data.draw(st.integers(1, 7))
    for include, wanted in ((False, expected), (True, including)):
        under_test = detokenizer(stop=stops, include_stop_str_in_output=include)
        match, used = None, 0
        for start in range(0, len(ids), at_once):
            match = under_test.append(ids[start : start + at_once])
            assert wanted.startswith(under_test.text)
            used = start
            if match is not None:
                break
        under_test.finish()
        assert under_test.text == wanted
        assert (match is not None) == bool(ends)
        if match is not None:
            assert match.stop == ends[0][1]
            assert used + match.num_tokens_used == len(text[: ends[0][0]].encode())


def test_a_stop_string_inside_one_token_cuts_that_token() -> None:
    under_test = detokenizer(stop="ll")
    assert under_test.append([257, ord("x")]) == StopMatch("ll", 1)
    under_test.finish()
    assert under_test.text == "he"


def test_of_two_stop_strings_in_one_token_the_one_that_ends_first_counts() -> None:
    under_test = detokenizer(stop=["ello", "ll"])
    assert under_test.append([257]) == StopMatch("ll", 1)
    assert under_test.text == "he"


@pytest.mark.parametrize("garbage", [[0x80], [0xE2, 0x82], [0xF0, 0x9F, 0x98]], ids=str)
@pytest.mark.parametrize("times", [10, 32, 33, 50, 51])
def test_long_garbage_gives_the_text_of_decoding_it_at_once(garbage: list[int], times: int) -> None:
    ids = [ord("x"), *garbage * times, *"é".encode()]
    assert stream(detokenizer(), ids)[0][-1] == BYTE_LEVEL.decode(ids)


def test_a_possible_stop_string_is_held_back_and_released() -> None:
    shown, match = stream(detokenizer(stop=["abc"]), list(b"xabxab"))
    assert match is None
    assert shown == ["x", "x", "x", "xabx", "xabx", "xabx", "xabxab"]


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (2, ""), (3, "aba"), (4, "aba")])
def test_no_stop_string_ends_the_output_before_min_tokens(min_tokens: int, text: str) -> None:
    shown, match = stream(detokenizer(stop="ab", min_tokens=min_tokens), list(b"abaabb"))
    assert shown[-1] == text
    assert match is not None


def test_the_token_that_ended_the_output_is_not_shown_unless_asked_for() -> None:
    for include, text in ((False, "a"), (True, "a<|end|>")):
        under_test = detokenizer(include_stop_str_in_output=include, skip_special_tokens=False)
        under_test.append([ord("a"), END], finished_by_token=True)
        under_test.finish()
        assert under_test.text == text


def test_special_tokens_are_left_out_of_the_text_and_break_no_character() -> None:
    first, rest = "é".encode()[:1], "é".encode()[1:]
    assert stream(detokenizer(), [*first, END, *rest])[0][-1] == "é"


def test_without_detokenize_there_is_no_text() -> None:
    under_test = detokenizer(detokenize=False)
    assert under_test.append(list(b"abc")) is None
    under_test.finish()
    assert under_test.text == ""


@pytest.mark.parametrize(
    "ids", [list(b"abcdefgh"), [0x80], [0xE2, 0x82], [END]], ids=["text", "invalid", "half", "end"]
)
def test_the_work_per_token_does_not_grow_with_the_output(ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = Tokenizer.decode

    def counting(self: Tokenizer, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        decoded.append(len(token_ids))
        return decode(self, token_ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    under_test = detokenizer(skip_special_tokens=ids != [END])
    under_test.append((ids * 3000)[:3000])
    assert sum(decoded) < 60 * 3000
