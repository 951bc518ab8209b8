"""A rank's part of a quantized projection stands for the same numbers, whatever its format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from teachllm.config import EngineConfig
from teachllm.distributed.layout import Layout
from teachllm.distributed.shards import ALL, Shard
from teachllm.errors import ModelError
from teachllm.layers.weights.quantized_weights import Activations, part_of
from teachllm.models.build import describe
from teachllm.models.model_config import load_model_config
from teachllm.models.own_model import model_of_rank
from teachllm.models.sharding import stage_layers
from tests.checkpoints import build_config, make_checkpoint
from tests.distributed.test_model_parts import run
from tests.quantization.format_checkpoints import FORMATS, write_checkpoint, write_dequantized
from tests.thorough import THOROUGH, times

SEQUENCES: Any = [torch.arange(5, 45), torch.arange(100, 109), torch.arange(300, 323)]
PARTS = [ALL, Shard(0, 2), Shard(1, 2), Shard(2, 4), Shard(3, 4)]


@pytest.fixture(scope="module")
def unquantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_checkpoint("llama2", tmp_path_factory.mktemp("plain") / "model"))


def assert_no_worse(found: Any, alone: Any, exact: Any) -> None:
    """Return the logits of sequences, of one rank and of one that computes alone.

    Where activations are quantized, a part of a row has a scale of its own: its values are rounded differently, so what
    counts is how far either is from the unquantized model.
    """
    errors = [torch.cat(each) - torch.cat(exact) for each in (found, alone)]
    ours, theirs = (error.square().mean().sqrt().item() for error in errors)
    assert ours < 1.1 * theirs


def assert_same(found: Any, alone: Any) -> None:
    for ours, theirs in zip(found, alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@settings(max_examples=times(15, 500))
@given(st.sampled_from(list(FORMATS)), st.sampled_from(PARTS), st.sampled_from(PARTS), st.sampled_from([1, 2]))
def test_a_part_dequantizes_to_the_same_values(name: str, rows: Shard, columns: Shard, scale: int) -> None:
    shape = (256 * scale, 512 * scale)
    quantized = FORMATS[name].quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    ranges = rows.of(shape[0]), columns.of(shape[1])
    part = part_of(quantized, *ranges)
    expected = quantized.dequantize(torch.float32)[ranges]
    assert torch.equal(part.dequantize(torch.float32), expected)
    assert part.qweight.untyped_storage().nbytes() == part.qweight.nbytes, "the rest is kept as well"


def test_blocks_that_would_be_cut_are_named() -> None:
    quantized = FORMATS["fp8 by block"].quantize(torch.randn(384, 256))
    with pytest.raises(
        ValueError, match="from 192 on cuts blocks of 128, which have a scale: set tensor_parallel_size"
    ):
        part_of(quantized, slice(192, 384), slice(None))


@pytest.mark.parametrize(
    "name", list(FORMATS) if THOROUGH else ["gptq in another order", "fp8 by block", "int8", "nvfp4"]
)
def test_ranks_compute_with_quantized_weights_what_one_does(name: str, unquantized: Path, tmp_path: Path) -> None:
    quantized = write_checkpoint(name, unquantized, tmp_path / "quantized")
    [alone] = run(str(tmp_path / "quantized"), Layout(), SEQUENCES)
    found = run(str(tmp_path / "quantized"), Layout(2, 1), SEQUENCES)
    if FORMATS[name].activations is Activations.UNQUANTIZED:
        for logits in found:
            assert_same(logits, alone)
        return
    write_dequantized(quantized, unquantized, tmp_path / "exact")
    [exact] = run(str(tmp_path / "exact"), Layout(), SEQUENCES)
    for logits in found:
        assert_no_worse(logits, alone, exact)


@pytest.mark.parametrize("method", ["int8", "fp8", "int4"] if THOROUGH else ["int8", "int4"])
def test_unquantized_weights_are_quantized_whole_before_they_are_shared(method: str, unquantized: Path) -> None:
    [alone] = run(str(unquantized), Layout(), SEQUENCES, quantization=method)
    [exact] = run(str(unquantized), Layout(), SEQUENCES)
    for logits in run(str(unquantized), Layout(2, 2), SEQUENCES, quantization=method)[2:]:
        if method == "int4":
            assert_same(logits, alone)
        else:
            assert_no_worse(logits, alone, exact)


def test_what_quantization_saves_is_counted_at_the_stage_that_has_it(unquantized: Path, tmp_path: Path) -> None:
    write_checkpoint("fp8", unquantized, tmp_path / "quantized", without="layers.2.")
    config = EngineConfig(model=str(tmp_path / "quantized"), dtype="bfloat16")
    layout, whole = Layout(1, 2), load_model_config(config, "cuda")
    first, last = (model_of_rank(whole, layout.coords(rank)) for rank in range(2))
    assert stage_layers(describe(whole.raw), whole.vocab_size * whole.hidden_size, 2)[1] == range(2, 3)
    assert last.active_bytes == 2 * last.num_active_parameters and last.num_w8a8_parameters == 0
    assert first.active_bytes + last.active_bytes == whole.active_bytes < 2 * whole.num_active_parameters
    assert first.num_w8a8_parameters == whole.num_w8a8_parameters > 0


def test_a_checkpoint_whose_blocks_ranks_would_cut_is_refused_with_the_layer(tmp_path: Path) -> None:
    config = build_config("llama2")
    config.intermediate_size = 384
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    write_checkpoint("fp8 by block", tmp_path / "plain", tmp_path / "quantized")
    sequences = [torch.arange(40), torch.arange(9), torch.arange(23)]
    with pytest.raises(ModelError, match=r"mlp\.\w+_proj: a part from 192 on cuts blocks of 128.* set tensor_par"):
        run(str(tmp_path / "quantized"), Layout(2, 1), sequences)
