"""POST /tokenize and /detokenize: what a text is to the model, and back."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from teachllm.server.http.body import check, read_json, read_request
from teachllm.server.http.errors import ApiError
from teachllm.server.http.sse import encode as encode_json
from teachllm.server.openai.prompts import chat_prompt, encode
from teachllm.server.openai.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from teachllm.server.service import Service


async def tokenize(service: Service, http: Request) -> Response:
    """Token ids of a text or of a conversation."""
    tokenizer = service.tokenizer
    content = await read_json(http, service.options.max_request_bytes)
    request: TokenizeChatRequest | TokenizeTextRequest
    if "messages" in content:
        request = check(TokenizeChatRequest, content)
        service.name_of(request.model)
        token_ids = await chat_prompt(tokenizer, request, service.options)
    else:
        request = check(TokenizeTextRequest, content)
        service.name_of(request.model)
        token_ids = await encode(tokenizer, request.prompt, request.add_special_tokens is not False)
    texts = [tokenizer.token_text(token_id) for token_id in token_ids] if request.return_token_strs else None
    answer = {"count": len(token_ids), "max_model_len": service.max_model_len, "tokens": token_ids, "token_strs": texts}
    return Response(encode_json(answer), media_type="application/json")


async def detokenize(service: Service, http: Request) -> Response:
    """The text of token ids.

    Raises:
        ApiError: 400, an id that the model does not have.
    """
    tokenizer, vocab_size = service.tokenizer, service.engine.vocab_size
    request = await read_request(http, DetokenizeRequest, service.options.max_request_bytes)
    service.name_of(request.model)
    if request.tokens and max(request.tokens) >= vocab_size:
        raise ApiError(400, f"token id {max(request.tokens)} is not in the vocabulary of {vocab_size}", "tokens")
    text = tokenizer.decode(request.tokens, skip_special_tokens=False)
    return Response(encode_json({"prompt": text}), media_type="application/json")
