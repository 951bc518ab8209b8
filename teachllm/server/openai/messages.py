"""A conversation as OpenAI's clients send it: messages by role, tools, and the calls of tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of content, and calls of tools, in all messages of a conversation
_AS_SENT = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)  # templates may know further fields


class TextPart(BaseModel):
    model_config = STRICT
    type: Literal["text"]
    text: str


def _of_text_alone(parts: Any) -> Any:
    """Refuse pictures and the like; a refusal, which clients send back, is text to a template."""
    if not isinstance(parts, list):
        return parts
    found = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            part = {"type": "text", "text": part.get("refusal")}
        elif isinstance(kind, str) and kind != "text":
            raise ValueError(f"a part of type {kind!r}: this server takes parts of type 'text' or 'refusal' alone")
        found.append(part)
    return found


Content = str | Annotated[list[TextPart], Field(min_length=1), BeforeValidator(_of_text_alone)]


class FunctionCall(BaseModel):
    model_config = _AS_SENT
    name: Annotated[str, Field(min_length=1)]
    arguments: str | None = Field(None, description="A JSON object, as text.")


class ToolCall(BaseModel):
    model_config = _AS_SENT
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class UserMessage(BaseModel):
    model_config = _AS_SENT
    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None


class ToolMessage(BaseModel):
    model_config = _AS_SENT
    role: Literal["tool", "function"]
    content: Content
    tool_call_id: str | None = None
    name: str | None = None


class AssistantMessage(BaseModel):
    model_config = _AS_SENT
    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


def _not_too_many(messages: Any) -> Any:
    """Look at the length of all lists before anything is made of what they hold."""
    if not isinstance(messages, list):
        return messages
    if len(messages) > MAX_MESSAGES:
        raise ValueError(f"{len(messages)} messages are more than the {MAX_MESSAGES} that a conversation may have")
    lists = (message.get(key) for message in messages if isinstance(message, dict) for key in ("content", "tool_calls"))
    num_parts = sum(len(each) for each in lists if isinstance(each, list))
    if num_parts > MAX_PARTS:
        raise ValueError(
            f"{num_parts} parts and calls of tools are more than the {MAX_PARTS} that all messages may have"
        )
    return messages


_KINDS = {"assistant": "assistant", **dict.fromkeys(("tool", "function"), "tool")}
_KINDS |= dict.fromkeys(("system", "developer", "user"), "user")


class OtherMessage(BaseModel):
    """One of a role that the checkpoint's template may know."""

    model_config = _AS_SENT
    role: Annotated[str, Field(min_length=1, max_length=64, json_schema_extra={"not": {"enum": list(_KINDS)}})]
    content: Content | None = None
    name: str | None = None


def _kind(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
    return _KINDS.get(role, "other") if isinstance(role, str) else "other"


Message = Annotated[
    Annotated[UserMessage, Tag("user")]
    | Annotated[ToolMessage, Tag("tool")]
    | Annotated[AssistantMessage, Tag("assistant")]
    | Annotated[OtherMessage, Tag("other")],
    Discriminator(_kind),
]
Messages = Annotated[
    list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), BeforeValidator(_not_too_many)
]


class FunctionDefinition(BaseModel):
    model_config = _AS_SENT
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of the arguments.")
    strict: bool | None = None


class Tool(BaseModel):
    model_config = _AS_SENT
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(BaseModel):
    model_config = STRICT
    name: Annotated[str, Field(min_length=1)]


class NamedTool(BaseModel):
    model_config = STRICT
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(BaseModel):
    model_config = STRICT
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=1024)]


class AllowedToolsChoice(BaseModel):
    """Some of the request's tools may be called."""

    model_config = STRICT
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice
