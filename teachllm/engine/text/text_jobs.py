"""Jobs with text that one request of a server may bring: each is plain data in, plain data out.

They run where the server wants them to: here and now if they are short, in a thread, or in a process that can be ended
(`engine/processes/text_process.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from teachllm.engine.text.tokenizer import Tokenizer

MAX_INLINE = 4096  # characters of one request that are tokenized where it comes in: about three milliseconds


def run_text_job(tokenizer: Tokenizer, name: str, arguments: dict[str, Any]) -> Any:
    """Run one of the jobs below.

    Raises:
        ValueError: the text is refused.
    """
    return _JOBS[name](tokenizer, **arguments)


def _encode(tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens) for text in texts]


@dataclass(frozen=True, kw_only=True)
class ChatText:
    """A conversation that is to become token ids.

    Attributes:
        chat_template: None: the checkpoint's.
        variables: of the template, or options of `render_chat_template`.
        max_num_tokens: a text that cannot have so few is refused without being tokenized.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    chat_template: str | None
    variables: dict[str, Any]
    add_special_tokens: bool
    max_num_tokens: int


def _chat(tokenizer: Tokenizer, **arguments: Any) -> list[int]:
    """Return the token ids of a conversation. If its template fails, a message without content gets an empty text:
    most templates add the content to other text, and clients send null beside calls of tools."""
    chat = ChatText(**arguments)
    messages = chat.messages

    def render(conversation: list[dict[str, Any]]) -> str:
        return tokenizer.render_chat_template(
            conversation, tools=chat.tools, chat_template=chat.chat_template, **chat.variables
        )

    try:
        text = render(messages)
    except ValueError:
        texts = [message | {"content": ""} if message["content"] is None else message for message in messages]
        if texts == messages:
            raise
        text = render(texts)
    tokenizer.check_length("the conversation", text, chat.max_num_tokens)
    return tokenizer.encode_rendered(text, chat.add_special_tokens)


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
