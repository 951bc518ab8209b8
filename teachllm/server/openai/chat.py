"""POST /v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from teachllm.server.http.body import read_request
from teachllm.server.http.errors import ApiError
from teachllm.server.http.request_ids import response_id
from teachllm.server.openai.chat_answer import ChatAnswer
from teachllm.server.openai.generation import Generation, Job, respond
from teachllm.server.openai.messages import AllowedToolsChoice, NamedTool, Tool, ToolChoice
from teachllm.server.openai.params import (
    check_answer,
    check_length,
    check_streaming,
    engine_options,
    most_tokens,
    refuse_unbuilt,
    sampling_params,
    token_style,
)
from teachllm.server.openai.prompts import chat_prompt
from teachllm.server.openai.protocol import ChatCompletionRequest
from teachllm.server.openai.response_context import ResponseContext
from teachllm.server.options import ServerOptions
from teachllm.server.service import Service


async def create_chat_completion(service: Service, http: Request) -> Response:
    """Answers a conversation.

    Raises:
        ApiError: what is wrong with it.
    """
    engine = service.engine
    request = await read_request(http, ChatCompletionRequest, service.max_request_bytes)
    model = service.name_of(request.model)
    num_top = _check(request, engine.config.max_logprobs)
    tools = _tools(request)
    parses_tools = _check_tools(tools, request.tool_choice, service.options)
    refuse_unbuilt(request)
    token_ids = await chat_prompt(service, http, request, tools, request.truncate_prompt_tokens)
    recommended = engine.generation_defaults
    asked = request.max_completion_tokens or request.max_tokens
    name = "max_completion_tokens" if request.max_completion_tokens else "max_tokens"
    max_tokens = check_length(len(token_ids), asked, service.max_model_len, "messages", name)
    if asked is None:
        max_tokens = min(max_tokens, recommended.get("max_tokens", max_tokens))
        max_tokens = min(max_tokens, most_tokens(service, request, len(token_ids), num_top))
    params = sampling_params(
        request,
        recommended,
        max_tokens=max_tokens,
        logprobs=num_top,
        prompt_logprobs=request.prompt_logprobs,
    )
    parser = None
    if parses_tools and service.options.tool_call_parser is not None:
        from teachllm.server.openai.tool_parsers import tool_parser

        parser = partial(tool_parser, service.options.tool_call_parser)
        params = replace(params, skip_special_tokens=False)  # some models' marks of a call are such
    context = ResponseContext.of(response_id("chatcmpl", http), model, request, service.options.force_include_usage)
    style = token_style(request, params, service.tokenizer)
    parallel = request.parallel_tool_calls is not False
    answer = ChatAnswer(context, num_top, parser, parallel, style, _echoed(request))
    options = engine_options(request, engine.config.scheduling_policy)
    jobs = [Job(token_ids, params)]
    check_answer(service, jobs)
    generation = Generation(service, context.id, jobs, options)
    return await respond(http, generation, answer, bool(request.stream))


def _check(request: ChatCompletionRequest, max_logprobs: int) -> int | None:
    """Return how many log-probabilities each token gets; None: not even its own."""
    check_streaming(request)
    num_top = request.top_logprobs or 0
    if num_top and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: set logprobs to true", "top_logprobs")
    if max_logprobs != -1 and (num_top == -1 or num_top > max_logprobs):
        raise ApiError(
            400,
            f"top_logprobs={num_top} is more than this server gives: ask for {max_logprobs} at most, or raise "
            "--max-logprobs (-1: no limit)",
            "top_logprobs",
        )
    return num_top if request.logprobs else None


def _echoed(request: ChatCompletionRequest) -> str:
    """Return what the answer begins with: the last message, if the request wants that and it is the assistant's."""
    last = request.messages[-1]
    if not request.echo or last.role != "assistant" or last.content is None:
        return ""
    return last.content if isinstance(last.content, str) else "\n".join(part.text for part in last.content)


def _tools(request: ChatCompletionRequest) -> list[Tool]:
    """Return the tools that the model may call."""
    tools, choice = request.tools or [], request.tool_choice
    if not isinstance(choice, AllowedToolsChoice):
        return tools
    allowed = {tool.function.name for tool in choice.allowed_tools.tools}
    if unknown := sorted(allowed - {tool.function.name for tool in tools}):
        raise ApiError(400, f"tool_choice allows {unknown[0]!r}, which is not among tools", "tool_choice")
    return [tool for tool in tools if tool.function.name in allowed]


def _check_tools(tools: list[Tool], choice: ToolChoice | None, options: ServerOptions) -> bool:
    """Return whether calls of tools are looked for in the answer."""
    if isinstance(choice, AllowedToolsChoice):
        choice = choice.allowed_tools.mode
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice names a tool, and the request has none: add tools", "tool_choice")
        return False
    if isinstance(choice, NamedTool):
        if all(tool.function.name != choice.function.name for tool in tools):
            raise ApiError(400, f"tool_choice names {choice.function.name!r}, which is not among tools", "tool_choice")
        raise _forced(f"the function {choice.function.name}")
    if choice == "required":
        raise _forced("required")
    if choice != "none" and not options.enable_auto_tool_choice:
        raise ApiError(
            400,
            'tool_choice "auto" needs a server started with --enable-auto-tool-choice and --tool-call-parser: start it '
            'so, or set tool_choice to "none"',
            "tool_choice",
        )
    return choice != "none"


def _forced(what: Any) -> ApiError:
    return ApiError(
        501, f"a forced tool_choice ({what}) needs structured output, which is not built yet", "tool_choice"
    )
