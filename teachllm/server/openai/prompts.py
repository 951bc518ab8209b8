"""From a conversation that a client sent to the token ids of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from teachllm.engine.text.text_jobs import ChatText
from teachllm.server.http.errors import ApiError, refused_as
from teachllm.server.http.sse import while_connected
from teachllm.server.openai.messages import Message, Tool
from teachllm.server.openai.protocol import ChatOptions
from teachllm.server.options import RESERVED_VARIABLES
from teachllm.server.service import Service
from teachllm.server.text_service import TextWork


async def prepared(http: Request, param: str, work: TextWork) -> Any:
    """What work with a request's texts gives. Others wait for a short one; a long one is cancelled when the client
    leaves.

    Args:
        param: the field that the text is in.

    Raises:
        ApiError: 400, the text is refused, or nobody waits for the answer.
    """
    with refused_as(param):
        return work.now() if work.is_short else await while_connected(http, work.later())


async def chat_prompt(
    service: Service, http: Request, request: ChatOptions, tools: Sequence[Tool] | None, most: int | None
) -> list[int]:
    """Token ids of a conversation.

    Args:
        tools: those of the request that the model may call.
        most: as of `truncated`.

    Raises:
        ApiError: 400 if there is no template, it fails, or may not be what it is.
    """
    options = service.options
    own_variables = request.chat_template_kwargs or {}
    if request.chat_template is not None and not options.trust_request_chat_template:
        raise ApiError(
            400,
            "a request may not bring its own chat_template: leave it out, or start the server with "
            "--trust-request-chat-template",
            "chat_template",
        )
    if wrong := sorted(RESERVED_VARIABLES & own_variables.keys()):
        raise ApiError(400, f"chat_template_kwargs may not hold {wrong[0]}", "chat_template_kwargs")
    if request.continue_final_message and request.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message goes on with the last message, and add_generation_prompt begins another: set one "
            "of them to false",
            "continue_final_message",
        )
    if request.continue_final_message and request.messages[-1].content is None:
        raise ApiError(400, "continue_final_message: the last message has no text to go on with", "messages")
    variables = dict(options.default_chat_template_kwargs)
    if request.add_generation_prompt is not None:
        variables["add_generation_prompt"] = request.add_generation_prompt
    variables["continue_final_message"] = bool(request.continue_final_message)
    for name in ("documents", "reasoning_effort"):
        if (value := getattr(request, name)) is not None:
            variables[name] = value
    chat = ChatText(
        messages=[_for_template(message) for message in request.messages],
        tools=None if not tools else [tool.model_dump(exclude_unset=True) for tool in tools],
        chat_template=request.chat_template or options.chat_template,
        variables=variables | own_variables,
        add_special_tokens=bool(request.add_special_tokens),
        max_num_tokens=service.max_model_len,
    )
    token_ids: list[int] = await prepared(http, "messages", service.text.chat(chat))
    return truncated(token_ids, most, service.max_model_len)


def truncated(token_ids: list[int], most: int | None, max_model_len: int) -> list[int]:
    """The last tokens of a prompt.

    Args:
        most: so many; None: all. -1: as many as there may be.
    """
    if most is None:
        return token_ids
    return token_ids[-(max_model_len - 1 if most == -1 else most) :]


def _for_template(message: Message) -> dict[str, Any]:
    """Return a message as it was sent, with null for content that was left out: calls of tools may come without.

    An empty list of calls is left out: clients send back what they were given, and templates ask whether there is one.
    """
    plain = message.model_dump(exclude_unset=True)
    if plain.get("tool_calls") == []:
        del plain["tool_calls"]
    return {"content": None, **plain}
