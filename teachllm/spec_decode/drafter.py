"""Drafters: guess the next few tokens cheaply, so that the model, the target, can check them all in one step.

A step reads every weight once, whether it computes one token of a request or five. So drafts are verified for little
more than the price of one token, and each that is accepted is a step saved. A draft can be wrong at no risk: the tokens
that come out are the target's own (`sampling/verify.py`). The field calls it speculative decoding, and with random
tokens speculative sampling.

Two kinds. A `Drafter` reads token ids and is ordinary Python; to write one takes ten lines:

    class Echo:
        def propose(self, token_ids, num_tokens):
            return token_ids[-num_tokens:]          # whatever was said will be said again

    LLM(drafter=Echo(), speculative_config={"method": "custom", "num_speculative_tokens": 3})

A `ModelDrafter` is made of tensors and works in the step itself, on the rows of the batch that was just computed.

Sources: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from teachllm.layers.attention import AttentionMetadata
from teachllm.models.base import Model

KVCache = list[tuple[torch.Tensor, torch.Tensor]]
# input_ids and positions, [num_tokens] int64 each, and where those tokens read and write KV
FlatTokens = tuple[torch.Tensor, torch.Tensor, AttentionMetadata]


class Drafter(Protocol):
    def propose(self, token_ids: Sequence[int], num_tokens: int) -> Sequence[int]:
        """Return up to `num_tokens` guesses for what follows a request's prompt and output; none is an answer, too."""


def check_drafter(drafter: object) -> None:
    """Check a user's drafter before it is needed.

    Raises:
        ValueError: it is a class, or has no `propose` that takes what `Drafter.propose` does.
    """
    wanted = "propose(token_ids, num_tokens)"
    if isinstance(drafter, type):
        raise ValueError(f"drafter={drafter.__name__} is a class: pass an object of it, drafter={drafter.__name__}()")
    propose, name = getattr(drafter, "propose", None), type(drafter).__name__
    if not callable(propose):
        raise ValueError(f"drafter is of type {name}, which has no method {wanted}: give it one")
    try:
        signature = inspect.signature(propose)
    except (TypeError, ValueError):
        return  # compiled code may not say
    try:
        signature.bind([], 1)
    except TypeError as error:
        raise ValueError(f"drafter is called as {wanted}, and {name}.propose{signature} is not: {error}") from None


class DraftBatch(Protocol):
    """The rows of a batch while tokens are drafted for them.

    Attributes:
        num_levels: how many tokens deep the drafts of a request go, at most.
        last: [num_asking] integers, of the requests that ask for drafts the last token of `behind` or `verified`.
        hidden: [num_tokens, hidden_size], what the model's head reads, of tokens of the step: of all, if the drafter
            `reads_all_hidden`.
        newest: [num_asking] integers, of the requests that ask for drafts, where in `hidden` their newest token was
            predicted from.
        features: by feature layer [num_tokens, hidden_size], the residual stream that comes into it.
    """

    num_levels: int
    last: torch.Tensor
    hidden: torch.Tensor
    newest: torch.Tensor
    features: Mapping[int, torch.Tensor]

    def behind(self) -> FlatTokens:
        """Return all known tokens whose K and V the drafter has not computed, the newest included."""

    def verified(self) -> tuple[torch.Tensor, FlatTokens]:
        """Return the step's own tokens that turned out to be true, each paired with the id of the token after it.

        Returns:
            Their places among the step's tokens, [num_tokens] int64; and their flat tokens, whose ids are those of
            the following tokens.
        """

    def push(self, level: int, logits: torch.Tensor) -> None:
        """Draw the drafts of one level.

        A request draws as it samples: the most likely tokens, or at random at its temperature.

        Args:
            level: 0 for those right after the newest token.
            logits: [num_rows, vocab_size] of any float dtype, what the model would say after each token of the level
                before: of each request the newest one, then the rows of `pushed`. The first rows are taken.
        """

    def pushed(self, level: int, shift: int = 0) -> FlatTokens:
        """Return the drafts of a level, of all requests that ask for more after them.

        Args:
            shift: how many positions after where they will stand.
        """

    def parents(self, level: int) -> torch.Tensor:
        """Return for each row of `pushed(level)` the row that its token was drawn from, in the level before:
        [num_rows]."""


class ModelDrafter(Protocol):
    """A drafter with weights: what it says of itself tells the worker what it must be given, and when.

                   feature_layers  follows_always  has_layers  reads_all_hidden
        DraftModel      none             no            yes           no         reads tokens; catches up when asked
        EAGLE           none             yes           yes           yes        continues the last hidden states
        EAGLE-3      some, as 3          yes           yes           no         continues what comes into those layers
        Medusa          none             no            no            no         reads the newest token's hidden state

    What a step computes is gone after it. So a drafter whose own K and V are made from hidden states follows every
    step, as it could not make up for one that it missed; one that reads tokens can, as they are kept.

    Attributes:
        feature_layers: of which layers of the target it reads the residual stream, see `DraftBatch.features`.
        follows_always: it must see every step, also of requests that nothing is drafted for.
        has_layers: it has K and V of its own, and catches up by `DraftBatch.behind` unless it follows always.
        reads_all_hidden: see `DraftBatch.hidden`.
    """

    feature_layers: tuple[int, ...]
    follows_always: bool
    has_layers: bool
    reads_all_hidden: bool

    @property
    def module(self) -> Model | nn.Module:
        """Return the model, or the heads, that it has beside its target."""
        ...

    def propose(self, batch: DraftBatch) -> None:
        """Catch up with what is known, and push drafts."""
