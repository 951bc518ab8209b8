"""Chat templates: programs that come with a checkpoint and turn messages into a prompt.

They are Jinja, and they are code from a stranger: they run in Jinja's immutable sandbox, on a copy of plain JSON
data, with the filters and globals that transformers gives them and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_ASKS_FOR_NONE = re.compile(r"""(?<!\w)content['"\]]*\s*(is\s+(not\s+)?|==\s*|!=\s*)none\b""", re.IGNORECASE)
_END_MARK = "the-last-message-ends-here "  # the blank tells whether the template strips texts
_MAX_RENDERED_CHARACTERS = 1 << 24  # more than any context holds: an endless one stops here


def render_template(template: str, variables: dict[str, Any]) -> str:
    """Render a Jinja template as the untrusted code it is.

    It sees plain JSON data and may neither reach Python's internals nor change what it is given. Every `range`
    is bounded (Jinja's `MAX_RANGE`), and so is the length of the output. Time and memory are not: a server renders in a
    process that can be ended (`engine/processes/text_process.py`).

    Raises:
        ValueError: the template fails, or does what the sandbox refuses.
    """
    with _template_to_blame():
        return _render(template, json.dumps(variables))


def _render(template: str, variables: str) -> str:
    compiled = _compile_template(template)
    pieces, size = [], 0
    for piece in compiled.generate(json.loads(variables)):
        pieces.append(piece)
        size += len(piece)
        if size > _MAX_RENDERED_CHARACTERS:
            raise OverflowError(f"more than {_MAX_RENDERED_CHARACTERS} characters")
    return "".join(pieces)


@contextlib.contextmanager
def _template_to_blame() -> Iterator[None]:
    """Turn whatever a template raises into a ValueError that blames the template."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or "no reason given"
        raise ValueError(f"the chat template failed: {type(error).__name__}: {reason}") from error


def render_conversation(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    named_tokens: Mapping[str, str],
    variables: Mapping[str, Any],
    continues: bool = False,
) -> str:
    """Render messages, which a template gets as they are, with four exceptions.

    The arguments of a tool call travel as JSON text, and templates print the object; without any, an empty one. Content
    in parts becomes one text if the template takes none but text. A field that is None is left out, as transformers 5
    does, since most templates would print "None"; but content stays where a template asks whether it is none, and can
    go on from there, as with earlier versions of transformers.
    Reasoning is given under both names that templates read, `thinking` and `reasoning_content`.

    Args:
        named_tokens: {"eos_token": "</s>", ...}, which a template gets, too.
        variables: further ones.
        continues: the prompt ends inside of the last message, for the answer to go on with it.

    Raises:
        ValueError: the arguments of a tool call are no JSON object, there is no text to go on with, or as
            `render_template`.
    """
    if continues:
        marked = render_conversation(template, _with_mark(messages), named_tokens, variables)
        if _END_MARK.strip() not in marked:
            raise ValueError("continue_final_message: the chat template leaves the last message's text out")
        text = marked[: marked.rindex(_END_MARK.strip())]
        # A template that strips its texts has taken the mark's blank away.
        return text if marked[len(text) :].startswith(_END_MARK) else text.rstrip()

    given = {**named_tokens, **variables}

    def rendered(keeps_none: bool) -> str:
        found = [_plain_message(message, keeps_none) for message in messages]
        _join_unread_parts(template, found, given)
        with _template_to_blame():
            text = json.dumps({**given, "messages": found})
            del found  # a deeply nested one takes fifty times as much memory as its text
            return _render(template, text)

    asks = _ASKS_FOR_NONE.search(template) is not None
    if asks and any(message.get("content", "") is None for message in messages):
        with contextlib.suppress(ValueError):
            return rendered(keeps_none=True)
    return rendered(keeps_none=False)


def _with_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages, the last one's text with a mark at its end."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": content + _END_MARK}]
    if isinstance(content, list) and _are_texts(content):
        *parts, part = content
        return [*messages[:-1], {**last, "content": [*parts, {**part, "text": part["text"] + _END_MARK}]}]
    raise ValueError("continue_final_message: the last message has no text to go on with")


def _plain_message(message: Mapping[str, Any], keeps_none: bool) -> dict[str, Any]:
    kept = ("content",) if keeps_none else ()
    plain = {name: value for name, value in message.items() if value is not None or name in kept}
    thought = next((plain[name] for name in _THOUGHTS if name in plain), None)
    if thought is not None:
        plain = {"thinking": thought, **plain, "reasoning_content": thought}
    if isinstance(calls := plain.get("tool_calls"), list):
        plain["tool_calls"] = [_with_object(call) for call in calls]
    return plain


def _are_texts(parts: Any) -> bool:
    is_list = isinstance(parts, list) and bool(parts)
    return is_list and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    )


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    text = function.get("arguments")
    if not isinstance(text, str | None):
        return call
    try:
        arguments = json.loads(text or "{}", parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a tool call have to be a JSON object, as text")
    return {**call, "function": {**function, "arguments": arguments}}


def _refuse_constant(name: str) -> None:
    """Refuse NaN and infinity, which Python's reader takes for JSON."""
    raise ValueError(name)


def _finite(number: str) -> float:
    """Refuse what Python's reader takes for infinity, as `1e999`: no JSON could say that again."""
    if math.isinf(value := float(number)):
        raise ValueError(number)
    return value


def _join_unread_parts(template: str, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> None:
    """Make one text of the parts of each message of which a template prints the list, or nothing at all.

    This is found out by rendering the conversation with a mark in place of each part's text. A template may change a
    text or take one part alone: then its output still changes with the mark. If rendering fails, it takes no parts.
    """
    numbers = [number for number, message in enumerate(messages) if _are_texts(message.get("content"))]
    marked = list(messages)
    for number in numbers:
        marked[number] = _marked(messages[number], f"part-of-message-{number}")
    text = _rendered(template, variables, marked) if numbers else ""
    for number in numbers:
        marks = [part["text"] for part in marked[number]["content"]]
        takes_text = any(f"'text': '{mark}'" in text or f'"text": "{mark}"' in text for mark in marks)
        if not takes_text and not all(mark in text for mark in marks):
            others = [*marked[:number], _marked(messages[number], "another-mark"), *marked[number + 1 :]]
            takes_text = _rendered(template, variables, others) == text
        if takes_text:
            messages[number]["content"] = "\n".join(part["text"] for part in messages[number]["content"])


def _marked(message: dict[str, Any], mark: str) -> dict[str, Any]:
    parts = [part | {"text": f"{mark}-{place}"} for place, part in enumerate(message["content"])]
    return message | {"content": parts}


def _rendered(template: str, variables: Mapping[str, Any], messages: list[dict[str, Any]]) -> str:
    try:
        return render_template(template, {**variables, "messages": messages})
    except ValueError:
        return ""


def check_template(template: str) -> None:
    """Refuse a template that cannot be compiled.

    Raises:
        ValueError: gives the reason and the line.
    """
    from jinja2 import TemplateSyntaxError

    try:
        _compile_template(template)
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template is no Jinja: line {error.lineno}: {error.message}") from None


@lru_cache(maxsize=32)
def _compile_template(source: str) -> jinja2.Template:
    """Compile a template with the filters and globals that transformers gives to chat templates."""
    from datetime import datetime

    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.nodes import Scope
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(loopcontrols):
        """Beside break and continue: `{% generation %}`, which marks answers for training, means nothing here."""

        tags = loopcontrols.tags | {"generation"}

        def parse(self, parser: Parser) -> Any:
            if parser.stream.current.value != "generation":
                return super().parse(parser)
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag])
    environment.filters["tojson"] = tojson  # Jinja's own escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(source)
