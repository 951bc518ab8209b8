"""The reference for greedy tokens of a quantized model: transformers in float64 with dequantized projections.

What it computes for `GOLDEN_NAMES` lies in greedy.npz, which `python -m tests.quantization.judge` writes again.

It is independent of the engine. The input of a W8A8 projection is divided by its scale, rounded, and multiplied back.
Where it lies between two quantized values, float32 and float64 may take different ones, and models as small as these
show one such value in their logits: so the permitted gap is wider than that of unquantized models. One wrong token in a
prompt changes the log-probabilities after it by 0.2 to 1. `tests/engine/quantized_reference.py` judges with a narrower
gap what batching may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from teachllm.layers.weights.quantized_weights import BLOCK, Activations
from tests.engine.reference import MAX_GAP, MAX_LOGPROB_ERROR, Reference, reference
from tests.engine.test_lossless_settings import PROMPTS
from tests.quantization.format_checkpoints import FORMATS, write_checkpoint


def rounded(x: torch.Tensor, dtype: torch.dtype, static: torch.Tensor | None, width: int | None = None) -> torch.Tensor:
    """Quantize x and dequantize it: by token, or each `width` numbers of one, if there is no static scale."""
    groups = x.float().split(width or x.shape[-1], dim=-1)
    return torch.cat([_rounded_alike(group, dtype, static) for group in groups], dim=-1)


def _rounded_alike(x: torch.Tensor, dtype: torch.dtype, static: torch.Tensor | None) -> torch.Tensor:
    amax = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-10)
    scale = static if static is not None else amax / (127.5 if dtype is torch.int8 else 448.0)
    if dtype is torch.int8:
        return (x / scale).round().clamp(-128, 127).double() * scale.double()
    return (x * (1 / scale)).clamp(-448, 448).to(dtype).double() * scale.double()


GOLDEN = Path(__file__).with_name("greedy.npz")
GOLDEN_FAMILY, GOLDEN_NAMES = "qwen3", ["int8", "fp8", "fp8 by tensor", "fp8 by block", "fp8 static"]
GOLDEN_PROMPTS, NUM_GREEDY = PROMPTS[::3], 24


class TransformersReference(Reference):
    """The reference for the checkpoint `family` in a format, which is written when it is first asked for."""

    def __init__(self, family: str, name: str, folder: Path) -> None:
        super().__init__(family, reference(family).path)
        self.quantized_by, self._unquantized = name, Path(self.path)
        self._checkpoint = write_checkpoint(name, self._unquantized, folder)
        self.path = str(folder)
        self.max_gap, self.max_logprob_error = MAX_GAP, MAX_LOGPROB_ERROR
        if FORMATS[name].activations is not Activations.UNQUANTIZED:
            self.max_gap, self.max_logprob_error = 0.1, 0.15

    @cached_property
    def model(self) -> Any:
        """transformers' model in float64, whose projections have the dequantized values."""
        from tests.golden.make import load

        model = load(str(self._unquantized), torch.float64)
        for key, each in self._checkpoint.items():
            layer: Any = model.get_submodule(key)
            layer.weight.data = each.dequantize(torch.float64)
            if FORMATS[self.quantized_by].activations is not Activations.UNQUANTIZED:
                how = (each.qweight.dtype, each.input_scale, None if each.block is None else BLOCK)
                layer.forward = lambda x, layer=layer, how=how: F.linear(rounded(x, *how), layer.weight, layer.bias)
        return model

    def _greedy(self, prompt: Sequence[int]) -> tuple[list[int], Any, Any]:
        return compute_greedy(self.model, prompt)

    def judge(self, prompt: list[int], output_ids: list[int], logprobs: list[float] | None = None) -> None:
        compare(self._greedy(prompt), output_ids, logprobs, self.max_gap, self.max_logprob_error)


def compute_greedy(model: Any, prompt: Sequence[int]) -> tuple[list[int], Any, Any]:
    """Return ids, log-probabilities and gaps of a prompt's greedy continuation."""
    from tests.golden.make import greedy

    with torch.inference_mode():
        made = greedy(model, [list(prompt)])
    ids, logprobs, gaps = (made[f"greedy_{key}"][0] for key in ("ids", "logprobs", "gaps"))
    return ids.tolist(), logprobs, gaps


def compare(
    expected: tuple[list[int], Any, Any],
    output_ids: list[int],
    logprobs: list[float] | None,
    max_gap: float,
    max_logprob_error: float,
) -> list[float]:
    """Fail unless an output is the expected one, up to the first permitted difference.

    Returns:
        How far the log-probabilities of its tokens are off up to there.
    """
    errors: list[float] = []
    for i, (token_id, wanted) in enumerate(zip(output_ids, expected[0], strict=False)):
        if token_id != wanted:
            assert expected[2][i] < max_gap, f"output {i}: {token_id}, the reference has {wanted}"
            break
        if logprobs is not None:
            errors.append(abs(logprobs[i] - float(expected[1][i])))
            assert errors[-1] < max_logprob_error, f"output {i}: log-probability differs by {errors[-1]:.2e}"
    return errors


def golden_of(name: str) -> list[tuple[list[int], Any, Any]]:
    """Return ids, log-probabilities and gaps for each of the golden prompts."""
    with np.load(GOLDEN) as arrays:
        ids, logprobs, gaps = (arrays[f"{name}: {key}"] for key in ("ids", "logprobs", "gaps"))
    return [(row.tolist(), *rest) for row, *rest in zip(ids, logprobs, gaps, strict=True)]


def make_golden() -> dict[str, Any]:
    """Compute the arrays of the golden file."""
    arrays: dict[str, Any] = {}
    for name in GOLDEN_NAMES:
        judge = transformers_reference(GOLDEN_FAMILY, name)
        rows = zip(*(compute_greedy(judge.model, prompt) for prompt in GOLDEN_PROMPTS), strict=True)
        for (key, dtype), values in zip(
            (("ids", np.int16), ("logprobs", np.float32), ("gaps", np.float32)), rows, strict=True
        ):
            arrays[f"{name}: {key}"] = np.array(values)[:, :NUM_GREEDY].astype(dtype)
    return arrays


@cache
def _folder() -> Path:
    import tempfile

    return Path(tempfile.mkdtemp(prefix="teachllm-quantized-"))


def folder_of(family: str, name: str) -> Path:
    """Where a checkpoint may be written, of this test run alone."""
    return _folder() / f"{family} {name}"


@cache
def transformers_reference(family: str, name: str) -> TransformersReference:
    """Made once a test run."""
    return TransformersReference(family, name, folder_of(family, name))


if __name__ == "__main__":
    np.savez_compressed(GOLDEN, **make_golden())
