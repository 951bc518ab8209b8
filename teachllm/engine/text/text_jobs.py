"""Jobs with text that one request of a server may bring: each is plain data in, plain data out.

They run where the server wants them to: here and now if they are short, in a thread, or in a process that can be ended
(`engine/processes/text_process.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from teachllm.engine.text.tokenizer import Tokenizer


def run_text_job(tokenizer: Tokenizer, name: str, arguments: dict[str, Any]) -> Any:
    """Run one of the jobs below.

    Raises:
        ValueError: the text is refused.
    """
    return _JOBS[name](tokenizer, **arguments)


def _encode(tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens) for text in texts]


def _chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    chat_template: str | None,
    variables: dict[str, Any],
    add_special_tokens: bool,
    max_num_tokens: int,
) -> list[int]:
    """Token ids of a conversation. If its template fails, a message without content gets an empty text: most templates
    add the content to other text, and clients send null beside calls of tools.
    """
    try:
        text = tokenizer.render_chat_template(messages, tools=tools, chat_template=chat_template, **variables)
    except ValueError:
        texts = [message | {"content": ""} if message["content"] is None else message for message in messages]
        if texts == messages:
            raise
        text = tokenizer.render_chat_template(texts, tools=tools, chat_template=chat_template, **variables)
    tokenizer.check_length("the conversation", text, max_num_tokens)
    return tokenizer.encode_rendered(text, add_special_tokens)


def _decode(tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]) -> list[str]:
    return [tokenizer.decode(token_ids, skip_special_tokens=False) for token_ids in prompts]


def _token_texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    known: dict[int, str] = {}
    for token_id in token_ids:
        if token_id not in known:
            known[token_id] = tokenizer.token_text(token_id)
    return [known[token_id] for token_id in token_ids]


_JOBS: dict[str, Callable[..., Any]] = {
    "encode": _encode,
    "chat": _chat,
    "decode": _decode,
    "token_texts": _token_texts,
}
