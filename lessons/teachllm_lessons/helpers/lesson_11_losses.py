"""Lesson 11: what rounding costs, in nats per token of a text and in the outputs of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from teachllm.bench import quantization_loss
from teachllm.checkpoint.files import EMBEDDED_MODEL, find_folder


@dataclass(frozen=True)
class Loss:
    """Measure the loss on answers that no model here was made with.

    Attributes:
        perplexity: exp of the mean of -log p.
        divergence: KL from the model that was rounded, nats per token.
        error: the standard error of that mean, as answers are few.
    """

    perplexity: float
    divergence: float
    error: float


@cache
def _documents() -> Sequence[Any]:
    every = quantization_loss.read(None, EMBEDDED_MODEL)
    return list({tuple(each.ids[each.first :]): each for each in every}.values())  # each answer once: 99 of 504


def _scores(model: str) -> quantization_loss.Scores:
    folder = find_folder(model)
    few = quantization_loss.Decoding(1, 4, 2)
    return quantization_loss.measure(folder, _documents(), few, dtype="float32", device="cpu")[0]


@cache
def _unquantized_scores() -> quantization_loss.Scores:
    return _scores(EMBEDDED_MODEL)


def loss(model: str = EMBEDDED_MODEL) -> Loss:
    """Return perplexity of the held-out answers, and how far the probabilities of all tokens have moved."""
    plain = _unquantized_scores()
    found = plain if model == EMBEDDED_MODEL else _scores(model)
    divergence, error = quantization_loss.mean_and_error(quantization_loss.divergences(plain, found), found.answers)
    return Loss(found.perplexity, divergence, error or 0.0)


@dataclass(frozen=True)
class LayerErrors:
    """Describe what a layer's output is off by, as a part of it, in the same grid.

    Attributes:
        layer: its name.
        of: by method.
    """

    layer: str
    of: dict[str, float]


def layer_errors(layer: str = "mlp.down_proj", bits: int = 4, group_size: int = 128) -> LayerErrors:
    """The first block's layer by three methods, on 16 rows of the calibration text: squared error of the output."""
    from transformers.utils import logging

    from teachllm.checkpoint.files import stored_tensors
    from teachllm.quantization.algorithms import blocks
    from teachllm.quantization.algorithms.awq import best_scales
    from teachllm.quantization.algorithms.calibrate import InputStatistics
    from teachllm.quantization.algorithms.clipping import clipped
    from teachllm.quantization.algorithms.gptq import gptq
    from teachllm.quantization.algorithms.grid import Grid
    from teachllm.quantization.algorithms.texts import CALIBRATION_TEXT, calibration_rows, read_tokenizer

    logging.disable_progress_bar()
    folder, grid = find_folder(EMBEDDED_MODEL), Grid(bits, group_size, is_symmetric=False)
    model = blocks.load(folder)
    parts = blocks.blocks_of(model, stored_tensors(folder))
    hidden = blocks.enter(model, parts, calibration_rows(CALIBRATION_TEXT, read_tokenizer(folder), 16, 256))
    parts[0].to("cpu", torch.float32)
    statistics = InputStatistics.of(parts[0], layer, hidden)
    weight, hessian = parts[0].linears()[layer].weight, statistics.hessian

    def error(found: torch.Tensor) -> float:
        off = found - weight
        return float(((off @ hessian) * off).sum() / ((weight @ hessian) * weight).sum())

    scales = best_scales([weight], hessian, statistics.mean_abs, grid)
    awq = clipped(weight * scales, hessian / torch.outer(scales, scales), grid).dequantize(torch.float32) / scales
    return LayerErrors(
        f"{parts[0].name}.{layer}",
        {
            "nearest": error(grid.nearest(weight).dequantize(torch.float32)),
            "AWQ": error(awq),
            "GPTQ": error(gptq(weight, hessian, grid).dequantize(torch.float32)),
        },
    )
