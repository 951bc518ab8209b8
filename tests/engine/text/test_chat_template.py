"""Templates see messages as they were sent, and render what transformers renders."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from teachllm.engine.text.chat_template import render_conversation

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
CHAT: dict[str, list[dict[str, Any]]] = {
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 🎉"}],
    "thought": [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2", "reasoning_content": "one and one"},
        {"role": "user", "content": "Why?"},
    ],
    "tool": [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
    ],
    "named": [{"role": "user", "name": "Ada", "content": "Hi", "mood": "glad"}],
}
# One of each kind of public template: what it asks of a message.
TEMPLATES = {
    "plain": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "adds strings": "{% for m in messages %}{{ '<' + m['role'] + '>' + (m['content'] or '') + '\\n' }}{% endfor %}",
    "asks is none": "{% for m in messages %}{% if m.content is none %}[none]{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}",
    "asks is not none": "{% for m in messages %}{% if m['content'] is not none %}{{ '<' + m['content'] + '>' }}"
    "{% elif m['tool_calls'] is defined %}<calls>{% endif %}{% endfor %}",
    "asks is defined": "{% for m in messages %}{% if m.tool_calls is defined %}C{% endif %}"
    "{% if m.content is defined %}D{% endif %}{% endfor %}",
    "asks is string": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}-{% endif %}"
    "{% endfor %}",
    "thoughts": "{% for m in messages %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% endfor %}",
    "dumps messages": "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls else m.content }}{% endfor %}",
    "loops over arguments": "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}<{{ k }}={{ v }}>{% endfor %}{% endfor %}{% endfor %}",
    "names": "{% for m in messages %}{{ m.name }}:{{ m.mood }}:{{ m.tool_call_id }}{{ m.content }}{% endfor %}",
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{{ messages[0].content }}",
    "refuses": "{% if messages[0].role != 'system' %}{{ raise_exception('needs a system message') }}{% endif %}ok",
}


def theirs(template: str, messages: list[dict[str, Any]], tools: list[Any] | None) -> str | None:
    """Return what transformers renders; None: it refuses.

    `apply_chat_template` drops what is None first, and so a template can no longer ask whether it is.
    """
    if "is none" not in template and "is not none" not in template:
        messages = [{key: value for key, value in each.items() if value is not None} for each in messages]
    try:
        rendered, _ = render_jinja_template([messages], tools=tools, chat_template=template, add_generation_prompt=True)
    except Exception:
        return None
    return str(rendered[0])


def ours(template: str, messages: list[dict[str, Any]], tools: list[Any] | None) -> str | None:
    try:
        return render_conversation(template, messages, {}, {"tools": tools, "add_generation_prompt": True})
    except ValueError:
        return None


@pytest.mark.parametrize("chat", CHAT)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_renders_as_in_transformers_or_both_refuse(template: str, chat: str) -> None:
    tools = [TOOL] if chat == "tool" else None
    messages = copy.deepcopy(CHAT[chat])
    assert ours(TEMPLATES[template], messages, tools) == theirs(TEMPLATES[template], CHAT[chat], tools)
    assert messages == CHAT[chat]  # they belong to whoever sent them


def test_arguments_that_are_json_text_arrive_as_the_object() -> None:
    as_text = copy.deepcopy(CHAT["tool"])
    as_text[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 1, "b": "é"}'
    for name in ("dumps messages", "loops over arguments"):
        assert ours(TEMPLATES[name], as_text, None) == ours(TEMPLATES[name], CHAT["tool"], None)
    as_text[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 1.5e3}'
    assert "<a=1500.0>" in ours(TEMPLATES["loops over arguments"], as_text, None)
    for wrong in ("{", "[1]", '{"a": -1e999}', "[" * 100_000):
        as_text[1]["tool_calls"][0]["function"]["arguments"] = wrong
        with pytest.raises(ValueError, match=r"^the arguments of a tool call have to be a JSON object, as text$"):
            render_conversation(TEMPLATES["plain"], as_text, {}, {})


def test_content_that_is_none_is_left_out_where_a_template_asks_and_cannot_go_on_from_there() -> None:
    asks = "{% for m in messages %}{% if m.content is none %}-{% endif %}{% if m.content is defined %}"
    asks += "{% if 'x' in m.content %}x{% endif %}{% endif %}{{ m.content }}{% endfor %}"
    assert ours(asks, CHAT["tool"], None) == "1+1?2"


def test_content_that_is_none_is_left_out_where_a_template_asks_that_of_another_field() -> None:
    asks = "{% for m in messages %}{% if m.reasoning_content is not none %}{{ m.reasoning_content }}{% endif %}"
    asks += "{{ m.content }}{% endfor %}"
    assert ours(asks, CHAT["tool"], None) == "1+1?2"


def test_parts_are_joined_for_templates_that_take_text_alone() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    loops = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": parts}]
    assert ours(TEMPLATES["plain"], messages, None) == "<user>one\ntwo"
    assert ours(TEMPLATES["adds strings"], messages, None) == "<user>one\ntwo\n"
    assert ours(loops, messages, None) == "[one][two]"


@pytest.mark.parametrize(
    ("before", "variables"),
    [
        ("{% if messages[0].role != 'system' %}{{ raise_exception('needs system') }}{% endif %}", {}),
        ("{{ {'type': 'text'} | tojson }}", {}),
        ("{{ custom.name }}", {"custom": {"name": "a"}}),
        ("{% if messages | length < 2 %}{{ raise_exception('too few') }}{% endif %}", {}),
    ],
)
def test_parts_reach_a_template_that_reads_them_whatever_else_it_wants(before: str, variables: dict[str, Any]) -> None:
    """Each of these fails, or prints what looks like a list, when only the parts are rendered."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": "brief"}, {"role": "user", "content": parts}]
    each = "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}[{{ p.text }}]{% endfor %}"
    template = before + "{% for m in messages %}" + each + "{% endif %}{% endfor %}"
    expected = str(render_jinja_template([messages], chat_template=template, **variables)[0][0])
    assert "[one][two]" in expected
    assert render_conversation(template, messages, {}, variables) == expected


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("{% for p in m.content %}{{ p.text | upper }}{% endfor %}", "ONETWO"),
        ("{% for p in m.content %}{{ p.text | replace('-', '_') }}{% endfor %}", "onetwo"),
        ("[{{ m.role }}]{{ m['content'][0]['text'] }}", "[user]one"),
        ("{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}", "one"),
        ("{{ m.content | map(attribute='text') | join('+') | title }}", "One+two"),
    ],
)
def test_parts_that_a_template_changes_or_of_which_it_takes_one_are_read(loop: str, expected: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    template = "{% for m in messages %}" + loop + "{% endfor %}"
    assert render_conversation(template, messages, {}, {}) == expected == theirs(template, messages, None)


def test_messages_whose_parts_are_read_keep_them_beside_others_that_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": role, "content": parts} for role in ("system", "user")]
    template = "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% else %}"
    template += "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
    assert render_conversation(template, messages, {}, {}) == "one\ntwo[one][two]"


def test_a_call_without_arguments_has_an_empty_object() -> None:
    template = "{% for call in messages[0].tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"
    calls = [{"function": {"name": "f", **more}} for more in ({}, {"arguments": None}, {"arguments": ""})]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
    assert render_conversation(template, messages, {}, {}) == "{}{}{}"


@pytest.mark.parametrize("arguments", [[], 0, False, {"a": []}])
def test_arguments_that_are_no_text_reach_the_template_as_they_are(arguments: Any) -> None:
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert render_conversation(template, messages, {}, {}) == json.dumps(arguments)


def test_an_answer_goes_on_where_the_last_text_ends_and_nowhere_else() -> None:
    template = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    template += "{{ p.text }}{% endfor %}{% endif %}</s>{% endfor %}"
    user = {"role": "user", "content": "Hi"}
    parts = [{"type": "text", "text": "The "}, {"type": "text", "text": "cache"}]
    for content in ("The cache", parts):
        begun = [user, {"role": "assistant", "content": content}]
        assert render_conversation(template, begun, {}, {}, continues=True) == "Hi</s>The cache"
    with pytest.raises(ValueError, match="no text to go on with"):
        render_conversation(template, [user, {"role": "assistant", "content": None}], {}, {}, continues=True)
    with pytest.raises(ValueError, match="no text to go on with"):
        render_conversation(template, [], {}, {}, continues=True)
    with pytest.raises(ValueError, match="leaves the last message's text out"):
        render_conversation("{{ messages[0].content }}", [user, user], {}, {}, continues=True)


def test_a_call_of_a_kind_that_nobody_knows_is_left_as_it_is() -> None:
    template = "{{ messages[0].tool_calls | tojson }}"
    calls: list[Any] = ["add", {"type": "custom"}, {"function": {"name": "add", "arguments": [1]}}]
    assert json.loads(render_conversation(template, [{"role": "assistant", "tool_calls": calls}], {}, {})) == calls
