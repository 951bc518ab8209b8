"""POST /tokenize and /detokenize: what a text is to the model, and back."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from teachllm.server.http.body import check, read_json, read_request
from teachllm.server.http.errors import ApiError
from teachllm.server.http.sse import encode as encode_json
from teachllm.server.openai.prompts import chat_prompt, prepared, truncated
from teachllm.server.openai.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from teachllm.server.service import Service


async def tokenize(service: Service, http: Request) -> Response:
    """Token ids of a text or of a conversation.

    Raises:
        ApiError: 400, a text that is longer than the model's context can be.
    """
    text = service.text
    content = await read_json(http, service.max_request_bytes)
    request: TokenizeChatRequest | TokenizeTextRequest
    if content.get("messages") is not None and content.get("prompt") is not None:
        raise ApiError(400, "there are messages and a prompt: send one of them", "prompt")
    if content.get("messages") is not None:
        request = check(TokenizeChatRequest, content)
        service.name_of(request.model)
        token_ids = await chat_prompt(service, http, request, request.tools, request.truncate_prompt_tokens)
    else:
        request = check(TokenizeTextRequest, {name: value for name, value in content.items() if name != "messages"})
        service.name_of(request.model)
        service.check_text(request.prompt, "prompt")
        [token_ids] = await prepared(
            http, "prompt", text.encode([request.prompt], request.add_special_tokens is not False)
        )
        token_ids = truncated(token_ids, request.truncate_prompt_tokens, service.max_model_len)
    texts = await prepared(http, "prompt", text.token_texts(token_ids)) if request.return_token_strs else None
    answer = {"count": len(token_ids), "max_model_len": service.max_model_len, "tokens": token_ids, "token_strs": texts}
    return Response(encode_json(answer), media_type="application/json")


async def detokenize(service: Service, http: Request) -> Response:
    """The text of token ids.

    Raises:
        ApiError: 400, an id that the model does not have, or more than its context has.
    """
    text, vocab_size = service.text, service.engine.vocab_size
    request = await read_request(http, DetokenizeRequest, service.max_request_bytes)
    service.name_of(request.model)
    if len(request.tokens) > service.max_model_len:
        raise ApiError(
            400,
            f"{len(request.tokens)} tokens are more than max_model_len={service.max_model_len}: send fewer",
            "tokens",
        )
    if request.tokens and max(request.tokens) >= vocab_size:
        raise ApiError(400, f"token id {max(request.tokens)} is not in the vocabulary of {vocab_size}", "tokens")
    [decoded] = await prepared(http, "tokens", text.decode([request.tokens]))
    return Response(encode_json({"prompt": decoded}), media_type="application/json")
