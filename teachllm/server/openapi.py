"""The OpenAPI schema: what FastAPI knows of the routes, with the bodies, which it does not read, put in.

Once the model is loaded, the limits that depend on it are in the schema, too.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from teachllm.server.openai.response_schemas import Error
from teachllm.server.service import Service

_REF = "#/components/schemas/"
_REASONS = {
    400: "The request is malformed, or asks for what cannot be.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    413: "The request is too large.",
    429: "The queue is full.",
    500: "The engine or the server failed.",
    501: "The feature is not built yet.",
    503: "The model is loading, the server is ending, or the engine has died.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Documents answers that are error objects."""
    return {status: {"model": Error, "description": _REASONS[status]} for status in statuses}


def body(*models: type[BaseModel]) -> dict[str, Any]:
    """Documents a JSON body that is one of some kinds of request."""
    schemas = [{"$ref": _REF + model.__name__} for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install(app: FastAPI, service: Service, requests: list[type[BaseModel]], has_keys: bool) -> None:
    """Replaces the application's schema."""

    def schema() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        servers = [{"url": service.options.root_path}] if service.options.root_path else None
        found = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes, servers=servers
        )
        components = found.setdefault("components", {}).setdefault("schemas", {})
        _, more = models_json_schema([(each, "validation") for each in requests], ref_template=_REF + "{model}")
        components.update(more.get("$defs", {}))
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which nothing answers
            components.pop(name, None)
        for path in found["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name, limit in _limits(service).items():
            components[name]["maximum"] = limit
        if service.client is not None and service.client.config.max_logprobs != -1:
            components["NumLogprobs"]["minimum"] = 0  # -1, the whole vocabulary, is not given
        if not service.options.trust_request_chat_template:
            for name in ("ChatCompletionRequest", "TokenizeChatRequest"):
                components[name]["properties"]["chat_template"] = {"type": "null"}
        if has_keys:
            found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            for path in found["paths"].values():
                for operation in path.values():
                    if "401" in operation["responses"]:
                        operation["security"] = [{"key": []}]
        if service.client is not None:  # before, the limits of the model are missing
            app.openapi_schema = found
        return found

    app.openapi = schema  # type: ignore[method-assign]


def _limits(service: Service) -> dict[str, int]:
    client = service.client
    if client is None or client.config.max_model_len is None:
        return {}
    limits = {"TokenId": client.vocab_size, "MaxTokens": client.config.max_model_len}
    largest = {name: limit - 1 for name, limit in limits.items()}
    return largest if client.config.max_logprobs == -1 else largest | {"NumLogprobs": client.config.max_logprobs}
