"""A rank's part of a quantized projection stands for the same numbers, whatever its format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from teachllm.distributed.layout import Layout
from teachllm.distributed.slices import ALL, Slice
from teachllm.models.registry import ModelError
from teachllm.quantization.codes import Activations, part_of
from tests.checkpoints import build_config, make_checkpoint
from tests.distributed.test_model_parts import run
from tests.quantization.formats import FORMATS, write_checkpoint

PARTS = [ALL, Slice(0, 2), Slice(1, 2), Slice(2, 4), Slice(3, 4)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_checkpoint("llama2", tmp_path_factory.mktemp("plain") / "model"))


@given(st.sampled_from(list(FORMATS)), st.sampled_from(PARTS), st.sampled_from(PARTS), st.sampled_from([1, 2]))
def test_a_part_stands_for_the_same_numbers(name: str, rows: Slice, columns: Slice, scale: int) -> None:
    shape = (256 * scale, 512 * scale)
    codes = FORMATS[name].quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    ranges = rows.of(shape[0]), columns.of(shape[1])
    part = part_of(codes, *ranges)
    expected = codes.dequantize(torch.float32)[ranges]
    assert torch.equal(part.dequantize(torch.float32), expected)
    assert part.codes.untyped_storage().nbytes() == part.codes.nbytes, "the rest is kept as well"


def test_blocks_that_would_be_cut_are_named() -> None:
    codes = FORMATS["fp8 by block"].quantize(torch.randn(384, 256))
    with pytest.raises(
        ValueError, match="from 192 on cuts blocks of 128, which have a scale: set tensor_parallel_size"
    ):
        part_of(codes, slice(192, 384), slice(None))


@pytest.mark.parametrize("name", [name for name, how in FORMATS.items() if "by other" not in name])
def test_ranks_compute_with_codes_what_one_does(name: str, plain: Path, tmp_path: Path) -> None:
    write_checkpoint(name, plain, tmp_path / "quantized")
    sequences: Any = [torch.arange(5, 45), torch.arange(100, 109), torch.arange(300, 323)]
    [expected] = run(str(tmp_path / "quantized"), Layout(), sequences)
    # Codes of x: a part of a row has a scale of its own, so its numbers are other ones, and nearer.
    is_plain = FORMATS[name].activations is Activations.PLAIN
    within: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4} if is_plain else {"rtol": 0.0, "atol": 0.5}
    for logits in run(str(tmp_path / "quantized"), Layout(2, 1), sequences):
        for ours, theirs in zip(logits, expected, strict=True):
            torch.testing.assert_close(ours, theirs, **within)


@pytest.mark.parametrize("method", ["int8", "fp8", "int4"])
def test_plain_numbers_are_quantized_whole_before_they_are_shared(method: str, plain: Path) -> None:
    sequences: Any = [torch.arange(5, 45), torch.arange(100, 109), torch.arange(300, 323)]
    [expected] = run(str(plain), Layout(), sequences, quantization=method)
    within: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4} if method == "int4" else {"rtol": 0.0, "atol": 0.5}
    for logits in run(str(plain), Layout(2, 2), sequences, quantization=method)[2:]:
        for ours, theirs in zip(logits, expected, strict=True):
            torch.testing.assert_close(ours, theirs, **within)


def test_a_checkpoint_whose_blocks_ranks_would_cut_is_refused_with_the_layer(tmp_path: Path) -> None:
    config = build_config("llama2")
    config.intermediate_size = 384
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    write_checkpoint("fp8 by block", tmp_path / "plain", tmp_path / "quantized")
    sequences = [torch.arange(40), torch.arange(9), torch.arange(23)]
    with pytest.raises(ModelError, match=r"mlp\.\w+_proj: a part from 192 on cuts blocks of 128.* set tensor_par"):
        run(str(tmp_path / "quantized"), Layout(2, 1), sequences)
