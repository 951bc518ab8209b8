"""A conversation as OpenAI's clients send it: messages by role, tools, and the calls of tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
_AS_SENT = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)  # templates may know further fields


class TextPart(BaseModel):
    model_config = STRICT
    type: Literal["text"]
    text: str


def _of_text_alone(parts: Any) -> Any:
    for part in parts if isinstance(parts, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"a part of type {kind!r}: this server takes parts of type 'text' alone")
    return parts


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


Message = Annotated[UserMessage | ToolMessage | AssistantMessage, Field(discriminator="role")]
Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


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


ToolChoice = Literal["none", "auto", "required"] | NamedTool
