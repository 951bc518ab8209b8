"""POST /v1/completions: what comes after a text, as it stands."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from teachllm.sampling_params import SamplingParams
from teachllm.server.http.body import read_request
from teachllm.server.http.errors import ApiError
from teachllm.server.http.request_ids import response_id
from teachllm.server.openai.completion_answer import CompletionAnswer, CompletionPrompt
from teachllm.server.openai.generation import Generation, Job, respond
from teachllm.server.openai.params import (
    check_answer,
    check_length,
    check_streaming,
    engine_options,
    refuse_unbuilt,
    sampling_params,
    token_style,
)
from teachllm.server.openai.prompts import prepared, truncated
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
    request = await read_request(http, CompletionRequest, service.max_request_bytes)
    model = service.name_of(request.model)
    _check(request)
    refuse_unbuilt(request)
    service.check_fits(_num_prompts(request) * (request.n or 1))
    prompts = await _prompts(service, http, request)
    asked, recommended = request.max_tokens, engine.generation_defaults
    usual = min(_DEFAULT_MAX_TOKENS, recommended.get("max_tokens", _DEFAULT_MAX_TOKENS))
    jobs = []
    known: dict[int, SamplingParams] = {}  # by their `max_tokens`; there may be thousands of prompts
    for prompt in prompts:
        # 0 scores the prompt: one token is sampled and not shown.
        wanted = 1 if asked == 0 else asked
        left = check_length(len(prompt.token_ids), wanted, service.max_model_len, "prompt")
        max_tokens = min(left, usual) if asked is None else left
        if max_tokens not in known:
            known[max_tokens] = sampling_params(
                request,
                recommended,
                max_tokens=max_tokens,
                logprobs=request.logprobs,
                prompt_logprobs=_num_prompt_logprobs(request),
            )
        jobs.append(Job(prompt.token_ids, known[max_tokens]))
    check_answer(service, jobs)
    context = ResponseContext.of(response_id("cmpl", http), model, request, service.options.force_include_usage)
    answer = CompletionAnswer(
        context,
        prompts,
        service.tokenizer.token_text,
        token_style(request, jobs[0].params, service.tokenizer),
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


async def _prompts(service: Service, http: Request, request: CompletionRequest) -> list[CompletionPrompt]:
    given = request.prompt
    is_one = isinstance(given, str) or isinstance(given[0], int)
    texts_or_ids: list[Any] = [given] if is_one else list(given)
    most, max_model_len = request.truncate_prompt_tokens, service.max_model_len
    if isinstance(texts_or_ids[0], str):
        for each in texts_or_ids:
            service.check_text(each, "prompt")
        encoding = service.text.encode(texts_or_ids, request.add_special_tokens is not False)
        encoded = await prepared(http, "prompt", encoding)
        kept = [truncated(token_ids, most, max_model_len) for token_ids in encoded]
        if not request.echo or kept == encoded:
            return list(map(CompletionPrompt, kept, texts_or_ids))
    else:
        kept = [truncated(token_ids, most, max_model_len) for token_ids in texts_or_ids]
    for token_ids in kept:
        check_length(len(token_ids), None, max_model_len, "prompt")
    texts = await prepared(http, "prompt", service.text.decode(kept)) if request.echo else [""] * len(kept)
    return list(map(CompletionPrompt, kept, texts))
