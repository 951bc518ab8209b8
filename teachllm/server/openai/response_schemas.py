"""Define what the server answers, for the OpenAPI schema alone: answers themselves are laid out where they are made."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from teachllm.startup_progress import StartupStage


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None
    code: int


class Error(BaseModel):
    error: ErrorInfo


class Startup(BaseModel):
    stage: StartupStage
    done: int
    of: int


class Health(BaseModel):
    status: Literal["starting", "healthy", "stopping", "dead"]
    startup: Startup | None = None


class Version(BaseModel):
    version: str


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]


class CalledFunction(BaseModel):
    name: str
    arguments: str


class CalledTool(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    tool_calls: list[CalledTool] | None = None


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str | None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None


class TextLogprobs(BaseModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class TextCompletion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(BaseModel):
    prompt: str


class PrefixCacheReset(BaseModel):
    reset: bool


# `itemSchema` is OpenAPI 3.2's, which tells a stream's events from its text; older readers skip it.
EVENTS: dict[str, Any] = {
    "text/event-stream": {
        "itemSchema": {
            "type": "object",
            "required": ["data"],
            "properties": {"data": {"type": "string", "description": "JSON; that of the last event is [DONE]."}},
        }
    }
}
