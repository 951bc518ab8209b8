"""How a conversation becomes one text: ChatML, with tools in the Hermes form.

`TEMPLATE` is what ships with the tokenizer; `render` does the same in Python, a hundred times faster, and
marks what the assistant says, so that training can take its loss there. A check holds the two equal.
Earlier turns are written the same whatever follows, so that prefix caching hits from turn to turn.
"""

from __future__ import annotations

import json
from typing import Any

START, END = "<|im_start|>", "<|im_end|>"
PAD = "<|endoftext|>"

TOOLS_BEFORE = "# Tools\n\nYou may call one of these functions:\n<tools>"
TOOLS_AFTER = (
    "\n</tools>\n\nTo call a function, answer with its name and arguments as JSON:\n"
    '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>'
)

TEMPLATE = """\
{%- macro text(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content or [] %}
            {{- part.text or '' }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- text(messages[0].content) + '\\n\\n' }}
    {%- endif %}
    {{- BEFORE }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- AFTER + '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + text(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = text(message.content) %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {%- if content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {%- set function = call.function or call %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else (function.arguments | tojson) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def jinja_template() -> str:
    """The chat template with its two fixed texts put in."""
    quote = {"BEFORE": TOOLS_BEFORE, "AFTER": TOOLS_AFTER}
    text = TEMPLATE
    for name, value in quote.items():
        text = text.replace(f"{{{{- {name}", "{{- '" + value.replace("\n", "\\n") + "'")
    return text


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    """One call as the model writes it."""
    body = f'{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}'
    return f"<tool_call>\n{body}\n</tool_call>"


def render(messages: list[dict[str, str]], tools: list[dict[str, Any]] | None = None) -> list[tuple[str, bool]]:
    """The text of a finished conversation in pieces, each with whether the assistant says it.

    Messages hold plain strings; an assistant's tool call is written out in its content.
    """
    pieces: list[tuple[str, bool]] = []
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    if tools:
        head = f"{system}\n\n" if system else ""
        lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        pieces.append((f"{START}system\n{head}{TOOLS_BEFORE}{lines}{TOOLS_AFTER}{END}\n", False))
    elif system:
        pieces.append((f"{START}system\n{system}{END}\n", False))
    for message in messages[1:] if system else messages:
        role, content = message["role"], message["content"]
        if role == "assistant":
            pieces += [(f"{START}assistant\n", False), (f"{content}{END}", True), ("\n", False)]
        elif role == "tool":
            pieces.append((f"{START}user\n<tool_response>\n{content}\n</tool_response>{END}\n", False))
        else:
            pieces.append((f"{START}{role}\n{content}{END}\n", False))
    return pieces
