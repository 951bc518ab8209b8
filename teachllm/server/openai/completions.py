"""POST /v1/completions: what comes after a text, as it stands."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from teachllm.engine.text.tokenizer import Tokenizer
from teachllm.server.http.body import read_request
from teachllm.server.http.errors import ApiError
from teachllm.server.http.request_ids import response_id
from teachllm.server.openai.completion_answer import CompletionAnswer, CompletionPrompt
from teachllm.server.openai.generation import Generation, Job, respond
from teachllm.server.openai.params import check_length, check_streaming, engine_options, refuse_unbuilt, sampling_params
from teachllm.server.openai.prompts import encode
from teachllm.server.openai.protocol import CompletionRequest
from teachllm.server.openai.response_context import ResponseContext
from teachllm.server.service import Service

_DEFAULT_MAX_TOKENS = 16


async def create_completion(service: Service, http: Request) -> Response:
    """Completes one prompt or several.

    Raises:
        ApiError: what is wrong with the request.
    """
    engine = service.engine
    request = await read_request(http, CompletionRequest, service.options.max_request_bytes)
    model = service.name_of(request.model)
    _check(request)
    refuse_unbuilt(request)
    tokenizer = service.tokenizer
    service.check_fits(_num_prompts(request) * (request.n or 1))
    prompts = await _prompts(tokenizer, request)
    asked, recommended = request.max_tokens, engine.generation_defaults
    usual = min(_DEFAULT_MAX_TOKENS, recommended.get("max_tokens", _DEFAULT_MAX_TOKENS))
    jobs = []
    for prompt in prompts:
        # 0 scores the prompt: one token is sampled and not shown.
        wanted = 1 if asked == 0 else asked
        left = check_length(len(prompt.token_ids), wanted, service.max_model_len, "prompt")
        params = sampling_params(
            request,
            recommended,
            max_tokens=min(left, usual) if asked is None else left,
            logprobs=request.logprobs,
            prompt_logprobs=_num_prompt_logprobs(request),
        )
        jobs.append(Job(prompt.token_ids, params))
    context = ResponseContext.of(response_id("cmpl", http), model, request)
    answer = CompletionAnswer(
        context,
        prompts,
        tokenizer.token_text,
        echo=bool(request.echo),
        wants_logprobs=request.logprobs is not None,
        is_scoring=asked == 0,
    )
    options = engine_options(request, engine.config.scheduling_policy)
    generation = Generation(service, context.id, jobs, options)
    return await respond(http, generation, answer, bool(request.stream))


def _check(request: CompletionRequest) -> None:
    check_streaming(request)
    if request.max_tokens == 0 and not request.echo:
        raise ApiError(400, "max_tokens=0 generates nothing: ask for more, or set echo to true", "max_tokens")


def _num_prompts(request: CompletionRequest) -> int:
    is_one = isinstance(request.prompt, str) or isinstance(request.prompt[0], int)
    return 1 if is_one else len(request.prompt)


def _num_prompt_logprobs(request: CompletionRequest) -> int | None:
    if request.prompt_logprobs is None and request.echo:
        return request.logprobs
    return request.prompt_logprobs


async def _prompts(tokenizer: Tokenizer, request: CompletionRequest) -> list[CompletionPrompt]:
    given = request.prompt
    if isinstance(given, str):
        given = [given]
    elif isinstance(given[0], int):
        given = [given]  # type: ignore[list-item]
    prompts = []
    for each in given:
        if isinstance(each, str):
            token_ids = await encode(tokenizer, each, request.add_special_tokens is not False)
            prompts.append(CompletionPrompt(token_ids, each))
            await asyncio.sleep(0)  # others wait for one prompt, not for a list of them
        else:
            assert isinstance(each, list)
            text = tokenizer.decode(each, skip_special_tokens=False) if request.echo else ""
            prompts.append(CompletionPrompt(each, text))
    return prompts
