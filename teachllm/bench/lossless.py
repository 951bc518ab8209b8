"""Check that settings which must not change a greedy token did not.

    float32     tokens are identical
    bfloat16    other batches round otherwise: a request's first token that is not the best one in float32 may lie below
                it by twice the most that transformers' own forward pass in bfloat16 is off on the same tokens

Behind a first difference the texts differ anyway, so a request's comparison ends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Tokens = Sequence[Sequence[int]]  # of each request


@dataclass(frozen=True)
class Difference:
    """A request's first token that is not the best.

    Attributes:
        request: its index.
        position: of the token among the outputs.
        gap: how far below the best logit it is.
        rounding: the most that rounding changes a logit of the request.
    """

    request: int
    position: int
    gap: float
    rounding: float

    @property
    def is_rounding(self) -> bool:
        return self.gap <= 2 * self.rounding


class Judge:
    """A model by transformers, in float32 and in a narrower dtype.

    Args:
        path: of a checkpoint with weights.
    """

    def __init__(self, path: str, dtype: str, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        load: Any = AutoModelForCausalLM.from_pretrained
        dtypes = (torch.float32, getattr(torch, dtype))
        self._models: list[Any] = [load(path, dtype=each).to(device).eval() for each in dtypes]

    def differences(self, prompts: Tokens, outputs: Tokens) -> list[Difference]:
        """Return the differences of the requests that have any."""
        pairs = enumerate(zip(prompts, outputs, strict=True))
        found = [self._first(index, prompt, made) for index, (prompt, made) in pairs]
        return [each for each in found if each is not None]

    def _first(self, request: int, prompt: Sequence[int], made: Sequence[int]) -> Difference | None:
        import torch

        ids = torch.tensor([[*prompt, *made]], device=self._models[0].device)
        with torch.inference_mode():
            exact, rounded = (model(ids).logits[0, len(prompt) - 1 : -1].float() for model in self._models)
        wrong = (exact.argmax(dim=-1) != ids[0, len(prompt) :]).nonzero()
        if not len(wrong):
            return None
        at = int(wrong[0])
        gap = float(exact[at].max() - exact[at, made[at]])
        return Difference(request, at, gap, float((rounded - exact).abs().max()))


def first_difference(expected: Tokens, found: Tokens) -> tuple[int, int] | None:
    """Return (request, position) of the first token that differs; None if none does."""
    for index, (wanted, got) in enumerate(zip(expected, found, strict=True)):
        if wanted != got:
            pairs = zip(wanted, got, strict=False)
            return index, next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(wanted), len(got)))
    return None
