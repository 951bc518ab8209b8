"""From what a client sent to the token ids of a prompt. A long one is turned in a thread: other clients' streams wait
for nothing that takes longer than a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from teachllm.engine.text.tokenizer import Tokenizer
from teachllm.server.http.errors import ApiError, refused_as
from teachllm.server.openai.messages import AssistantMessage, Message
from teachllm.server.openai.protocol import ChatOptions
from teachllm.server.options import ServerOptions

T = TypeVar("T")
_MAX_INLINE = 4096  # characters: about three milliseconds
# Arguments of `render_chat_template` that are not the template's variables.
_NOT_VARIABLES = {"self", "messages", "tools", "chat_template"}


async def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
    return await _run(len(text), partial(tokenizer.encode, text, add_special_tokens))


async def chat_prompt(tokenizer: Tokenizer, request: ChatOptions, options: ServerOptions) -> list[int]:
    """Token ids of a conversation.

    Raises:
        ApiError: 400 if there is no template, it fails, or may not be what it is.
    """
    variables = request.chat_template_kwargs or {}
    if request.chat_template is not None and not options.trust_request_chat_template:
        raise ApiError(
            400,
            "a request may not bring its own chat_template: leave it out, or start the server with "
            "--trust-request-chat-template",
            "chat_template",
        )
    if wrong := sorted(_NOT_VARIABLES & variables.keys()):
        raise ApiError(400, f"chat_template_kwargs may not hold {wrong[0]}", "chat_template_kwargs")
    messages = [_for_template(message) for message in request.messages]
    tools = None if not request.tools else [tool.model_dump(exclude_unset=True) for tool in request.tools]
    given = {"add_generation_prompt": request.add_generation_prompt is not False, **variables}
    template = request.chat_template or options.chat_template
    size = sum(len(str(message)) for message in (*messages, *(tools or ()), variables))
    if request.chat_template is not None:
        size = _MAX_INLINE + 1  # a program that has not been seen here
    render = partial(_render, tokenizer, messages, tools=tools, chat_template=template, **given)
    with refused_as("messages"):
        return await _run(size, render)


def _for_template(message: Message) -> dict[str, Any]:
    """Return a message as it was sent. One that is calls of tools alone may come without content.

    An empty list of calls is left out: clients send back what they were given, and templates ask whether there is one.
    """
    plain = message.model_dump(exclude_unset=True)
    if plain.get("tool_calls") == []:
        del plain["tool_calls"]
    return {"content": None, **plain} if isinstance(message, AssistantMessage) else plain


def _render(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """Render a conversation. If its template fails, a message without content gets an empty text: most templates add
    the content to other text, and clients send null beside calls of tools.
    """
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except ValueError:
        texts = [message | {"content": ""} if message["content"] is None else message for message in messages]
        if texts == messages:
            raise
    return tokenizer.apply_chat_template(texts, **options)


async def _run(size: int, work: Callable[[], T]) -> T:
    return work() if size <= _MAX_INLINE else await asyncio.to_thread(work)
