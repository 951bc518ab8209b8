"""From a request's fields to SamplingParams; what is not built yet is named and refused.

Defaults: what the request says, else what the checkpoint recommends (generation_config.json), else OpenAI's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from teachllm.errors import counted
from teachllm.sampling_params import PARAMETERS, SamplingParams
from teachllm.server.http.errors import ApiError, refused_as
from teachllm.server.openai.logprobs import TokenStyle
from teachllm.server.openai.protocol import Sampling

if TYPE_CHECKING:
    from teachllm.engine.text.tokenizer import Tokenizer
    from teachllm.server.openai.generation import Job
    from teachllm.server.service import Service

_LEAST_MOST_ENTRIES = 1 << 17
_OPENAI_DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0}


def sampling_params(
    request: Sampling,
    recommended: Mapping[str, Any],
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Return what the engine is asked for.

    Args:
        recommended: the checkpoint's defaults, under SamplingParams' names.

    Raises:
        ApiError: 400 where fields contradict each other.
    """
    given = {name: value for name in PARAMETERS if (value := getattr(request, name, None)) is not None}
    if request.logit_bias is not None:
        given["logit_bias"] = {int(token_id): bias for token_id, bias in request.logit_bias.items()}
    chosen = {**_OPENAI_DEFAULTS, **recommended, **given}
    chosen |= {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    with refused_as():
        return SamplingParams(**chosen)


def refuse_unbuilt(request: Sampling) -> None:
    """Refuse what is understood, and checked as far as it can be, but not built yet.

    Raises:
        ApiError: 501, naming the feature; 400 if it is asked for in a wrong way.
    """
    wanted = request.structured_outputs
    if wanted is not None:
        kinds = [name for name in type(wanted).model_fields if getattr(wanted, name) not in (None, False)]
        if len(kinds) != 1:
            raise ApiError(400, f"structured_outputs takes exactly one kind, not {len(kinds)}", "structured_outputs")
        raise _unbuilt("structured output", "structured_outputs")
    if request.response_format is not None and request.response_format.type != "text":
        raise _unbuilt(f"structured output (response_format {request.response_format.type})", "response_format")
    if request.use_beam_search:
        raise _unbuilt("beam search", "use_beam_search")


def check_streaming(request: Sampling) -> None:
    """Raises ApiError: 400, `stream_options` without a stream, or `prompt_logprobs` with one."""
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options says how to stream: set stream to true, or leave it out", "stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs are not streamed: set stream to false", "prompt_logprobs")


def check_length(
    num_prompt_tokens: int, max_tokens: int | None, max_model_len: int, param: str, name: str = "max_tokens"
) -> int:
    """Return how many tokens there may be: `max_tokens`, or without it what the model's length leaves.

    Args:
        param, name: what the request calls the prompt and `max_tokens`.

    Raises:
        ApiError: 400 if prompt and output are longer than the model's length together.
    """
    left = max_model_len - num_prompt_tokens
    if left < 1:
        raise ApiError(
            400,
            f"the prompt has {counted(num_prompt_tokens, 'token')} and max_model_len={max_model_len} is the most that "
            f"prompt and output may have together: shorten it to {max_model_len - 1}",
            param,
        )
    if max_tokens is not None and max_tokens > left:
        raise ApiError(
            400,
            f"the prompt has {counted(num_prompt_tokens, 'token')}, and with {name}={max_tokens} more there would be "
            f"{num_prompt_tokens + max_tokens}, more than max_model_len={max_model_len}: lower {name} to {left}, "
            "or shorten the prompt",
            name,
        )
    return left if max_tokens is None else max_tokens


def check_answer(service: Service, jobs: Sequence[Job]) -> None:
    """Refuse a request whose answer would hold more log-probabilities than one may.

    Raises:
        ApiError: 400, naming what to lower.
    """
    total = sum(_num_entries(service, job) for job in jobs)
    if total > (most := _most_entries(service)):
        params = jobs[0].params
        name = "prompt_logprobs" if params.logprobs is None else "logprobs"
        raise ApiError(
            400,
            f"{name}: the answer could hold {total} log-probabilities, and {most} is the most: lower {name}, n or "
            "max_tokens, or send fewer prompts",
            name,
        )


def most_tokens(service: Service, request: Sampling, num_prompt_tokens: int, logprobs: int | None) -> int:
    """Return how long each completion may get where the request does not say, so that its answer is not refused."""
    if logprobs is None:
        return service.max_model_len
    scored = request.prompt_logprobs
    left = _most_entries(service) - (0 if scored is None else num_prompt_tokens * _width(service, scored))
    return max(left // ((request.n or 1) * _width(service, logprobs)), 1)


def _num_entries(service: Service, job: Job) -> int:
    params = job.params
    of_prompt = 0 if params.prompt_logprobs is None else _width(service, params.prompt_logprobs)
    of_output = 0 if params.logprobs is None else _width(service, params.logprobs)
    return len(job.prompt_token_ids) * of_prompt + params.n * (params.max_tokens or 0) * of_output


def _width(service: Service, logprobs: int) -> int:
    return 1 + (service.engine.vocab_size if logprobs == -1 else logprobs)


def _most_entries(service: Service) -> int:
    """Return how many one answer may hold: what one completion as long as the context can have, and some at least."""
    most = service.engine.config.max_logprobs
    width = 1 if most == -1 else _width(service, most)
    return max(_LEAST_MOST_ENTRIES, service.max_model_len * width)


def token_style(request: Sampling, params: SamplingParams, tokenizer: Tokenizer) -> TokenStyle:
    """Return how log-probabilities name their tokens."""
    hidden = frozenset(tokenizer.special_ids) if params.skip_special_tokens else frozenset()
    return TokenStyle(bool(request.return_tokens_as_token_ids), hidden)


def engine_options(request: Sampling, policy: str) -> dict[str, Any]:
    """Return what the engine takes beside the parameters.

    Raises:
        ApiError: 400 for a priority that nothing looks at.
    """
    if request.priority and policy != "priority":
        raise ApiError(
            400,
            f"priority={request.priority} means nothing with scheduling_policy={policy}: leave it out, or start the "
            "server with --scheduling-policy priority",
            "priority",
        )
    return {"priority": request.priority or 0, "cache_salt": request.cache_salt}


def _unbuilt(feature: str, param: str) -> ApiError:
    return ApiError(501, f"{feature} is not built yet: leave {param} out", param)
