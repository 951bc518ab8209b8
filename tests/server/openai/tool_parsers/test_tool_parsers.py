"""Tool parsers: what models write comes out as text and calls, however it is cut and however it is broken."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm.server.openai.tool_parsers import TOOL_PARSERS, ContentDelta, Delta, tool_parser
from teachllm.server.openai.tool_parsers.json_reader import JsonReader, NotJson
from tests.thorough import times

FORMATS = list(TOOL_PARSERS)
OPEN, CLOSE, TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
EXAMPLES = times(10, 500)
every_format = pytest.mark.parametrize("name", FORMATS)


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # the JSON text


Part = str | Call


def pieces(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({cut % (len(text) + 1) for cut in cuts} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def stream(name: str, pieces: list[str]) -> list[Delta]:
    parser = tool_parser(name)
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()


def assembled(deltas: list[Delta]) -> list[Part]:
    """What a client makes of the deltas, which have to follow the rules of the API."""
    parts: list[Part] = []
    num_calls = 0
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            assert delta.text
            if parts and isinstance(parts[-1], str):
                parts[-1] += delta.text
            else:
                parts.append(delta.text)
        elif delta.index == num_calls:
            assert delta.name and delta.id and re.fullmatch("call_[0-9a-f]{24}", delta.id)
            parts.append(Call(delta.name, delta.arguments))
            num_calls += 1
        else:
            call = parts[-1]
            assert delta.index == num_calls - 1 and isinstance(call, Call)
            assert delta.id is None and delta.name is None and delta.arguments
            parts[-1] = Call(call.name, call.arguments + delta.arguments)
    return parts


def parse(name: str, text: str) -> list[Part]:
    """By characters, after making sure that all at once gives the same."""
    whole, by_characters = assembled(stream(name, [text])), assembled(stream(name, list(text)))
    assert whole == by_characters
    return whole


def hermes(call: str) -> str:
    return f"{OPEN}\n{call}\n{CLOSE}"


# -- what models write ---------------------------------------------------------------------------------------

SPACES = st.text(" \n\t", max_size=3)
TEXTS = st.text(min_size=1).filter(lambda text: not text.isspace())
NAMES = st.text(min_size=1)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    # What ends a call elsewhere, and what looks as if it began one.
    | st.sampled_from([CLOSE, OPEN, TAG, "; ", '{"', '"}', "\\", "{a,b", "]"]),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=8,
)


@st.composite
def written_calls(draw: st.DrawFn, key: str) -> tuple[str, Call]:
    """A call's object, and the call."""
    arguments = json.dumps(
        draw(st.dictionaries(st.text(), VALUES, max_size=4)),
        ensure_ascii=draw(st.booleans()),
        indent=draw(st.sampled_from([None, 1])),
        separators=draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")])),
    )
    name = draw(NAMES)
    written = json.dumps(arguments) if draw(st.booleans()) else arguments
    members = [f'"name"{draw(SPACES)}:{draw(SPACES)}{json.dumps(name)}', f'"{key}":{draw(SPACES)}{written}']
    if draw(st.booleans()):
        members.append('"type": "function"')
    members = draw(st.permutations(members))
    return "{" + draw(SPACES) + f"{draw(SPACES)},{draw(SPACES)}".join(members) + draw(SPACES) + "}", Call(
        name, arguments
    )


@st.composite
def hermes_answers(draw: st.DrawFn) -> tuple[str, list[Part]]:
    parts: list[Part] = []
    text = ""
    for is_call in draw(st.lists(st.booleans(), max_size=5)):
        is_beside_text = bool(parts) and isinstance(parts[-1], str)
        if is_call:
            written, call = draw(written_calls("arguments"))
            layout = "" if is_beside_text else draw(SPACES)
            text += layout + OPEN + draw(SPACES) + written + draw(SPACES) + CLOSE
            parts.append(call)
        elif not is_beside_text:
            parts.append(draw(TEXTS))
            text += parts[-1]
    if parts and isinstance(parts[-1], Call):
        text += draw(SPACES)
    return text, parts


@st.composite
def llama3_answers(draw: st.DrawFn) -> tuple[str, list[Part]]:
    parts: list[Part] = []
    text = ""
    for _ in range(draw(st.integers(0, 3))):
        written, call = draw(written_calls(draw(st.sampled_from(["parameters", "arguments"]))))
        separator = draw(SPACES) + (draw(st.sampled_from(["", ";", ","])) + draw(SPACES) if parts else "")
        text += separator + draw(st.sampled_from([TAG, ""])) + draw(SPACES) + written
        parts.append(call)
    if draw(st.booleans()):
        parts.append(draw(TEXTS.filter(lambda text: text.strip(" \t\n\r") not in (";", ","))))
        text += parts[-1]
    return text, parts


ANSWERS = {"hermes": hermes_answers(), "llama3_json": llama3_answers()}
SCRAPS = st.sampled_from(
    [
        *(OPEN, CLOSE, TAG, "<", "<tool", "</", *'{}[]",:; ', "\\", "\\u00", "\\ud800", "\n", "\x00"),
        *('{"name": "f", "arguments": {', '"name": "f"', '"name"', '"arguments"', '"parameters"'),
        *('"{}"', "null", "-1.5e3", "tru"),
    ]
)


@st.composite
def broken_answers(draw: st.DrawFn, name: str) -> str:
    """Scraps of the formats and of JSON, or a good answer that has lost, gained or swapped a piece."""
    if draw(st.booleans()):
        return "".join(draw(st.lists(SCRAPS | st.text(max_size=3), max_size=30)))
    text, _ = draw(ANSWERS[name])
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        text = text[:start] + draw(st.just("") | SCRAPS) + text[start + draw(st.integers(0, 5)) :]
    return text


@every_format
@settings(deadline=None, max_examples=EXAMPLES)
@given(data=st.data())
def test_calls_and_texts_that_are_written_in_a_format_come_back(name: str, data: st.DataObject) -> None:
    text, parts = data.draw(ANSWERS[name])
    assert parse(name, text) == parts


@every_format
@settings(deadline=None, max_examples=EXAMPLES)
@given(data=st.data())
def test_it_does_not_matter_how_an_answer_is_cut(name: str, data: st.DataObject) -> None:
    text = data.draw(broken_answers(name))
    cut = pieces(text, data.draw(st.lists(st.integers(0, 1000), max_size=12)))
    assert assembled(stream(name, cut)) == parse(name, text)


@every_format
@settings(deadline=None, max_examples=EXAMPLES)
@given(data=st.data())
def test_an_answer_without_a_call_comes_out_as_it_went_in(name: str, data: st.DataObject) -> None:
    text = data.draw(broken_answers(name))
    parts = parse(name, text)
    if not any(isinstance(part, Call) for part in parts):
        assert "".join(part for part in parts if isinstance(part, str)) == text


@every_format
@settings(deadline=None, max_examples=EXAMPLES)
@given(data=st.data())
def test_the_arguments_of_any_call_are_a_json_object_or_the_beginning_of_one(name: str, data: st.DataObject) -> None:
    for part in parse(name, data.draw(broken_answers(name))):
        if isinstance(part, Call):
            assert part.arguments.startswith("{")
            reader = JsonReader(lambda raw, as_json: None)
            reader.feed(part.arguments)
            if next(reader.value(), "ended") == "ended":
                assert isinstance(json.loads(part.arguments), dict)


@every_format
@settings(deadline=None, max_examples=EXAMPLES)
@given(data=st.data())
def test_an_answer_that_ends_early_gives_what_was_there(name: str, data: st.DataObject) -> None:
    """No call that the whole answer does not have, and no more of its arguments; what was held back is text."""
    text, parts = data.draw(ANSWERS[name])
    beginning = text[: data.draw(st.integers(0, len(text)))]
    parser = tool_parser(name)
    delivered = parser.feed(beginning)
    held = parser.finish()
    assert not held or (isinstance(held[0], ContentDelta) and beginning.endswith(held[0].text) and not held[1:])
    calls = [part for part in assembled(delivered) if isinstance(part, Call)]
    expected = [part for part in parts if isinstance(part, Call)][: len(calls)]
    assert calls[:-1] == expected[:-1]
    assert all(whole.arguments.startswith(call.arguments) for call, whole in zip(calls, expected, strict=True))


# -- bugs that other parsers had -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        "{}",
        '{"injection": "", "wd": 23, "sd": 0.8, "module_id": "M6M6"}',
        '{"numbers": [{"a": 1}, {"a": 1}]}',
        '{"a": {"b": {"c": {"d": 1}}}}',
        '{"command": "mkdir -p test/{test1,test2"}',
        '{"content": "echo </tool_call> <tool_call>; <|python_tag|>{"}',
        '{"q": "a; b, c", "r": "}; {\\"name\\": \\"g\\"}"}',
        '{"path": "C:\\\\", "quote": "\\"", "snow": "\\u2603", "raw": "☃", "flag": "\\ud83d\\ude00"}',
        '{"a":[ ],"b":{ },"c":-0.5E+10,"d":null,"e":true,"f":false}',
        '{"a": 1, "a": 2}',
        '{\n  "pretty": [\n    1\n  ]\n}',
    ],
)
@every_format
def test_arguments_come_out_byte_for_byte(name: str, arguments: str) -> None:
    call = f'{{"name": "f", "{"arguments" if name == "hermes" else "parameters"}": {arguments}}}'
    other = call.replace('"f"', '"g"', 1)
    text = hermes(call) + "\n" + hermes(other) if name == "hermes" else f"{call}; {other}"
    assert parse(name, text) == [Call("f", arguments), Call("g", arguments)]


@pytest.mark.parametrize("separator", ["; ", ";", ";\n", "\n", ", ", ",", "", " ;  ", TAG, "; " + TAG])
def test_any_separator_stands_between_two_calls_of_llama(separator: str) -> None:
    text = '{"name": "f", "parameters": {}}' + separator + '{"name": "g", "parameters": {"a": 1}}'
    assert parse("llama3_json", text) == [Call("f", "{}"), Call("g", '{"a": 1}')]


@pytest.mark.parametrize("end", ["", ";", "; ", "\n"])
def test_a_separator_at_the_end_of_an_answer_is_no_text(end: str) -> None:
    assert parse("llama3_json", '{"name": "f", "parameters": {}}' + end) == [Call("f", "{}")]


@pytest.mark.parametrize(
    "rest", [" I used {searchTool}.", '\n\nThey were {"query": "x"}', "; done", "}", ';{"name": 1}']
)
def test_what_follows_the_calls_of_llama_is_text_and_costs_no_call(rest: str) -> None:
    assert parse("llama3_json", '{"name": "f", "parameters": {}}' + rest) == [Call("f", "{}"), rest]


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"a": 1} is a dict',
        '{"name": "Alice", "age": 30}',
        '{"name": "Alice"}',
        '{"name": "f", "parameters": 3}',
        '{"name": "f", "parameters": null}',
        '{"name": "f", "parameters": "none"}',
        '{"name": ["f"], "parameters": {}}',
        '{"name": "", "parameters": {}}',
        '[{"name": "f", "parameters": {}}]',
        'I would call {"name": "f", "parameters": {}}',
        "<|python_tag|>brave_search.call(query='x')",
        '<|python{"name": "f", "parameters": {}}',
        "\n\n",
        "",
    ],
)
def test_an_answer_that_is_no_call_of_llama_is_text(text: str) -> None:
    assert parse("llama3_json", text) == ([text] if text else [])


def test_json_that_is_no_call_is_told_by_its_first_foreign_key() -> None:
    parser = tool_parser("llama3_json")
    assert parser.feed('{"name": "Alice", ') == []
    assert parser.feed('"age":') == [ContentDelta('{"name": "Alice", "age":')]
    assert parser.feed(" 30}") == [ContentDelta(" 30}")]


def test_after_a_marker_foreign_keys_and_missing_arguments_are_no_obstacle() -> None:
    for arguments in ("", ', "arguments": null', ', "arguments": {}', ', "parameters": {}'):
        call = f'{{"id": {{"name": "x"}}, "name": "f"{arguments}}}'
        assert parse("hermes", hermes(call)) == [Call("f", "{}")]
        assert parse("llama3_json", TAG + call) == [Call("f", "{}")]


def test_text_before_between_and_after_calls_is_kept() -> None:
    call = hermes('{"name": "f", "arguments": {}}')
    parts = parse("hermes", f"Let me see.\n{call} and {call}\n{call}\n It is sunny.")
    assert parts == ["Let me see.\n", Call("f", "{}"), " and ", *[Call("f", "{}")] * 2, "\n It is sunny."]


def test_spaces_that_stand_alone_beside_calls_are_layout() -> None:
    call = hermes('{"name": "f", "arguments": {}}')
    assert parse("hermes", f"\n\n{call}\n{call}\n") == [Call("f", "{}")] * 2
    assert parse("hermes", "\n\nHello\n") == ["\n\nHello\n"]
    assert parse("hermes", "\n\n") == ["\n\n"]


def test_a_line_break_inside_a_string_is_escaped() -> None:
    for arguments in ('{"code": "a\n\tb"}', json.dumps('{"code": "a\n\tb"}')):
        for call in (f'{{"name": "f", "arguments": {arguments}}}', f'{{"arguments": {arguments}, "name": "f"}}'):
            assert parse("hermes", hermes(call)) == [Call("f", '{"code": "a\\n\\tb"}')]


def test_half_a_surrogate_pair_in_what_is_decoded_can_be_sent_on() -> None:
    (call,) = parse("hermes", hermes('{"name": "f\\ud800", "arguments": "{\\"a\\": \\"\\ud800\\"}"}'))
    assert call == Call("f\ufffd", '{"a": "\ufffd"}')


# -- broken calls --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>ok', [Call("f", '{"a": 1}'), "ok"]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>ok', [Call("f", '{"a": 1}'), "ok"]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>ok', [Call("f", '{"a": 1'), "ok"]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>ok', [Call("f", '{"a": 1,'), "ok"]),
        ('<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>', [Call("f", "{"), "a: 1}}</tool_call>"]),
        ('<tool_call>{"name": "f", "arguments": {"a": "He said "hi"}}', [Call("f", '{"a": "He said "'), 'hi"}}']),
        ('<tool_call>{"name": "f", "arguments": {}} and', [Call("f", "{}"), " and"]),
        ("<tool_call>{'name': 'f'}</tool_call>", None),
        ("<tool_call></tool_call>", None),
        ("<tool_call>\n[1]\n</tool_call>", None),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None),
        ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', None),
        ('<tool_call>{"name": "f", "arguments": "{} {}"}</tool_call>', None),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', None),
        ('<tool_call>{"arguments": {}}</tool_call>', None),
        ("</tool_call>", None),
    ],
)
def test_a_broken_call_of_hermes_loses_nothing(text: str, parts: list[Part] | None) -> None:
    assert parse("hermes", text) == (parts or [text])


def test_a_good_call_follows_a_broken_one() -> None:
    good = hermes('{"name": "g", "arguments": {}}')
    for broken in (OPEN, OPEN + "\n{", OPEN + '{"name": "f"', OPEN + '{"name: "f"}' + CLOSE, OPEN + "<" + OPEN[:-1]):
        assert parse("hermes", broken + good) == [broken, Call("g", "{}")]
    assert parse("hermes", OPEN + '{"name": "f", "arguments": {"a": 1}}' + good) == [
        Call("f", '{"a": 1}'),
        Call("g", "{}"),
    ]


def test_an_answer_of_llama_that_lacks_a_brace_goes_on() -> None:
    text = '{"name": "f", "parameters": {"a": 1}; {"name": "g", "parameters": {}'
    assert parse("llama3_json", text) == [Call("f", '{"a": 1}'), Call("g", "{}")]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"city": "Par', '{"city": "Par'),
        ('<tool_call>\n{"name": "f", "arguments": {"city": "Paris"}', '{"city": "Paris"}'),
        ('<tool_call>\n{"name": "f", "arguments": {"city": "Paris"}}\n</tool_', '{"city": "Paris"}'),
        ('<tool_call>\n{"name": "f", "arguments": ', None),
        ('<tool_call>\n{"arguments": {"city": "Paris"}, "na', None),
        ('<tool_call>\n{"name": "f", "arguments": "{\\"city\\": \\"Par', None),
        ("<tool", None),
    ],
)
def test_a_call_that_is_cut_off_ends_there_or_was_text(text: str, arguments: str | None) -> None:
    expected: Part = text if arguments is None else Call("f", arguments)
    assert parse("hermes", text) == [expected]


@every_format
def test_brackets_in_brackets_are_read_however_deep(name: str) -> None:
    begin = OPEN if name == "hermes" else ""

    def nested(depth: int) -> str:
        return '{"a": ' + "[" * depth + "]" * depth + "}"

    bomb = nested(3000)
    whole = f'{begin}{{"name": "f", "parameters": {bomb}}}'
    assert parse(name, whole) == [Call("f", bomb)]
    parser = tool_parser(name)
    deltas = [delta for char in whole for delta in parser.feed(char)] + parser.finish()
    assert "".join(delta.arguments for delta in deltas if not isinstance(delta, ContentDelta)) == bomb
    assert parse(name, f'{begin}{{"name": "f", "parameters": {json.dumps(bomb)}}}') == [Call("f", bomb)]
    held = f'{begin}{{"parameters": {bomb}'
    assert parse(name, held) == [held]


# -- as it streams -------------------------------------------------------------------------------------------


def test_a_call_is_delivered_as_it_is_written() -> None:
    parser = tool_parser("hermes")

    def feed(text: str) -> list[tuple[Any, ...]]:
        return [(d.text,) if isinstance(d, ContentDelta) else (d.index, d.name, d.arguments) for d in parser.feed(text)]

    assert feed("Yes.<tool") == [("Yes.",)]
    assert feed('_call>\n{"name": "f", "argu') == []
    assert feed('ments": {') == [(0, "f", "{")]
    assert feed('"city": "Par') == [(0, None, '"city": "Par')]
    assert feed("is") == [(0, None, "is")]
    assert feed('", "n": 1') == [(0, None, '", "n": 1')]
    assert feed("2}") == [(0, None, "2}")]
    assert feed("}\n</tool_call") == []
    assert feed('>\n<tool_call>{"arguments": {"a": 1}, "name": "g') == []
    assert feed('"') == [(1, "g", '{"a": 1}')]
    assert feed("}</tool_call> Done") == [(" Done",)]
    assert parser.finish() == []


def test_what_looks_like_a_marker_is_held_back_until_that_is_decided_and_no_longer() -> None:
    parser = tool_parser("hermes")
    held = ""
    for char in "if a < b and <tool_x> or <<tool_callx":
        held += char
        text = "".join(delta.text for delta in parser.feed(char) if isinstance(delta, ContentDelta))
        assert held.startswith(text)
        held = held.removeprefix(text)
        assert OPEN.startswith(held)
    parser = tool_parser("llama3_json")
    assert parser.feed("\n<|python") == []
    assert parser.feed("_tang") == [ContentDelta("\n<|python_tang")]


def test_an_unknown_format_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"tool_call_parser 'qwen' is not known; it must be one of: hermes, llama3_json"
    ):
        tool_parser("qwen")


@pytest.mark.parametrize(
    "text", ["01", "1.", ".5", "+1", "NaN", "True", "nul", "'a'", '"\\x"', '"\\u12g4"', "[1,]", "{1: 2}", "[1 2]", ""]
)
def test_only_json_is_read_as_json(text: str) -> None:
    reader = JsonReader(lambda raw, as_json: None)
    reader.feed(text)
    reader.close()
    with pytest.raises(NotJson):
        next(reader.value(), None)
