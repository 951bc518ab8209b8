"""The application: every route of the server, and what each answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from teachllm import __version__
from teachllm.server import openapi
from teachllm.server.http import errors
from teachllm.server.http.body import read_request
from teachllm.server.http.errors import ApiError
from teachllm.server.http.middleware import AccessMiddleware
from teachllm.server.http.sse import EventStream, encode
from teachllm.server.openai import response_schemas
from teachllm.server.openai.chat import create_chat_completion
from teachllm.server.openai.completions import create_completion
from teachllm.server.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadLoraRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
    UnloadLoraRequest,
)
from teachllm.server.openai.tokenization import detokenize, tokenize
from teachllm.server.openapi import body
from teachllm.server.options import ServerOptions
from teachllm.server.service import Service

Handler = Callable[[Service, Request], Awaitable[Response]]
_BODIES: list[type[BaseModel]] = [CompletionRequest, ChatCompletionRequest, TokenizeTextRequest, TokenizeChatRequest]
_BODIES += [DetokenizeRequest, LoadLoraRequest, UnloadLoraRequest]
_GENERATION_ERRORS = (400, 401, 404, 413, 429, 500, 501, 503)


def create_app(service: Service) -> ASGIApp:
    """An ASGI application around a service."""
    options = service.options
    app = FastAPI(
        title="teachllm",
        version=__version__,
        description="An OpenAI-compatible server.",
        docs_url=None,  # these load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    router = APIRouter()
    _add_information(router, service)
    _add_generation(router, service)
    _add_tokenization(router, service)
    _add_adapters(router, service)
    if options.dev_endpoints:
        _add_development(router, service)
    if service.traces:
        _add_trace(router, service)
    app.include_router(router)
    errors.install(app)
    openapi.install(app, service, _BODIES, has_keys=bool(options.api_keys))
    access = AccessMiddleware(app, service)
    return _allow_origins(access, options) if options.allowed_origins else access


def _add_information(router: APIRouter, service: Service) -> None:
    @router.get("/health", responses={200: {"model": response_schemas.Health}, 503: {"model": response_schemas.Health}})
    async def health() -> Response:
        """Return whether requests are taken: "starting", "healthy", "stopping" or "dead"."""
        startup = {"startup": service.startup} if service.status == "starting" and service.startup else {}
        return _json({"status": service.status} | startup, 200 if service.status == "healthy" else 503)

    @router.get("/version", responses={200: {"model": response_schemas.Version}})
    async def version() -> Response:
        return _json({"version": __version__})

    text = {"text/plain": {"schema": {"type": "string"}}}

    @router.get("/metrics", response_class=Response, responses={200: {"content": text}})
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @router.get("/v1/models", responses={200: {"model": response_schemas.ModelList}, **openapi.errors(401, 503)})
    async def models() -> Response:
        return _json({"object": "list", "data": [_card(service, name) for name in service.names]})

    path = "/v1/models/{model:path}"

    @router.get(path, responses={200: {"model": response_schemas.ModelCard}, **openapi.errors(401, 404, 503)})
    async def retrieve(model: str) -> Response:
        card = _card(service, service.names[0])
        return _json(card | {"id": service.name_of(model)})


def _add_generation(router: APIRouter, service: Service) -> None:
    for path, handler, request, answer in (
        ("/v1/completions", create_completion, CompletionRequest, response_schemas.TextCompletion),
        ("/v1/chat/completions", create_chat_completion, ChatCompletionRequest, response_schemas.ChatCompletion),
    ):
        documented = {200: {"model": answer, "content": response_schemas.EVENTS}, **openapi.errors(*_GENERATION_ERRORS)}
        _post(router, service, path, handler, body(request), documented)


def _add_tokenization(router: APIRouter, service: Service) -> None:
    may_fail = openapi.errors(400, 401, 404, 413, 500, 503)
    documented = {200: {"model": response_schemas.Tokens}, **may_fail}
    _post(router, service, "/tokenize", tokenize, body(TokenizeTextRequest, TokenizeChatRequest), documented)
    documented = {200: {"model": response_schemas.DetokenizedText}, **may_fail}
    _post(router, service, "/detokenize", detokenize, body(DetokenizeRequest), documented)


def _add_adapters(router: APIRouter, service: Service) -> None:
    async def unbuilt(model: Any, service: Service, http: Request) -> Response:
        await read_request(http, model, service.max_request_bytes)
        raise ApiError(501, "LoRA is not built yet: serve a checkpoint that the adapter has been merged into")

    for path, request in (
        ("/v1/load_lora_adapter", LoadLoraRequest),
        ("/v1/unload_lora_adapter", UnloadLoraRequest),
    ):
        _post(router, service, path, partial(unbuilt, request), body(request), openapi.errors(400, 401, 413, 501))


def _add_development(router: APIRouter, service: Service) -> None:
    async def reset(service: Service, http: Request) -> Response:
        """It has no body whose content type would keep a web page from sending it."""
        origin, own = http.headers.get("origin"), {*service.options.allowed_origins, _origin(http)}
        if origin is not None and not own & {origin, "*"}:
            raise ApiError(403, f"{origin} may not ask for this: name it with --allowed-origins")
        await service.engine.reset_prefix_cache()
        return _json({"reset": True})

    documented = {200: {"model": response_schemas.PrefixCacheReset}, **openapi.errors(401, 500, 503)}
    _post(router, service, "/reset_prefix_cache", reset, {}, documented)


def _origin(http: Request) -> str:
    """Return the origin of a page that this server itself would have sent."""
    return f"{http.url.scheme}://{http.headers.get('host', '')}"


def _add_trace(router: APIRouter, service: Service) -> None:
    documented = {200: {"content": response_schemas.EVENTS}, **openapi.errors(400, 401)}

    @router.get("/trace", response_class=Response, responses=documented)
    async def trace(replica: int = 0) -> Response:
        """The trace of the engine, or of one of its replicas: its header, then an event for every line."""
        if not 0 <= replica < len(service.traces):
            last = len(service.traces) - 1
            raise ApiError(
                400, f"there is no replica {replica}: each has a trace of its own, from 0 to {last}", "replica"
            )
        watcher = service.traces[replica].watch()
        return EventStream(watcher.events(), on_hangup=watcher.leave, on_end=watcher.leave)


def _post(
    router: APIRouter,
    service: Service,
    path: str,
    handler: Handler,
    extra: dict[str, Any],
    documented: dict[int | str, dict[str, Any]],
) -> None:
    async def endpoint(request: Request) -> Response:
        return await handler(service, request)

    name = path.strip("/").replace("/", "_").removeprefix("v1_")
    status = 200 if 200 in documented else 501
    router.post(path, name=name, status_code=status, responses=documented, openapi_extra=extra)(endpoint)


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "teachllm",
        "root": service.engine.config.model,
        "parent": None,
        "max_model_len": service.max_model_len,
    }


def _allow_origins(app: ASGIApp, options: ServerOptions) -> ASGIApp:
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(
        app,
        allow_origins=list(options.allowed_origins),
        allow_methods=list(options.allowed_methods),
        allow_headers=list(options.allowed_headers),
        allow_credentials=options.allow_credentials,
        expose_headers=["X-Request-Id"],
    )


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return Response(encode(content), status, media_type="application/json")
