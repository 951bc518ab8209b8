"""The tokenizer that a configuration asks for, and the text of single ids as a trace shows them."""

from __future__ import annotations

from collections.abc import Sequence

from teachllm.config import EngineConfig
from teachllm.engine.text.tokenizer import Tokenizer


def load_tokenizer(config: EngineConfig, folder: str) -> Tokenizer | None:
    """Load the tokenizer of a model in `folder`, or the one named in its place; return None where none is wanted.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    if config.skip_tokenizer_init:
        return None
    return Tokenizer.load(
        config.tokenizer or folder,
        revision=config.revision if config.tokenizer else None,
        trust_remote_code=config.trust_remote_code,
    )


class TokenTexts:
    """Token ids -> the text of each id alone; what it would be without a tokenizer is its number."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        known = self._known
        for token_id in token_ids:
            if token_id not in known:
                known[token_id] = self._text(token_id)
        return [known[token_id] for token_id in token_ids]

    def _text(self, token_id: int) -> str:
        return f"<{token_id}>" if self._tokenizer is None else self._tokenizer.token_text(token_id)
