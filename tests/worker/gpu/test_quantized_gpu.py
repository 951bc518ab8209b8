"""With quantized weights, too, graphs and running ahead change no bit on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from teachllm.layers.attention_backends import triton
from tests.quantization.format_checkpoints import write_checkpoint
from tests.worker.gpu.test_gpu_model_runner import TEACHLM, recorded, replayed, workload

pytestmark = pytest.mark.gpu


def assert_no_bit_changes(**how: Any) -> None:
    plans, made = recorded(workload(), async_scheduling=True, dtype="bfloat16", **how)
    eager = replayed(plans, 0, enforce_eager=True, dtype="bfloat16", **how)
    assert made == eager and replayed(plans, 1, dtype="bfloat16", **how) == eager


@pytest.mark.parametrize("short", [triton.SHORT, 0], ids=["quick launches", "hopper_prefill"])
@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_graphs_and_running_ahead_equal_eager_bit_for_bit(
    quantization: str, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "SHORT", short)
    assert_no_bit_changes(quantization=quantization)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_nor_does_a_bit_change_if_keys_and_values_are_quantized_as_well(kv_cache_dtype: str) -> None:
    assert_no_bit_changes(quantization="fp8", kv_cache_dtype=kv_cache_dtype)


@pytest.mark.parametrize(
    "name", ["fp8 by block", "fp8 static", "int8 of weights alone", "gptq in another order", "awq", "nvfp4"]
)
def test_nor_in_other_formats(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, Path(TEACHLM), tmp_path)
    assert_no_bit_changes(model=str(tmp_path))
