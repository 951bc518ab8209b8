"""Hopper's attention kernels, interpreted: what they compute, and that their warps wait for each other rightly."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from teachllm_kernels.attention import decode_plan, hopper_prefill
from teachllm_kernels.attention.hopper_kv_dequantize import channel_of, in_order_of_values
from tests.kernels.attention.decode_cases import FP8, INT8, Kind, check_fused
from tests.kernels.attention.prefill_cases import Shape, check, prefill_on_hopper
from tests.kernels.interpreted_gluon import interpreted
from tests.thorough import THOROUGH, times

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a Hopper runs them itself: test_paged_decode.py")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_plan, "_MULTIPROCESSORS", 2)
    monkeypatch.setattr(decode_plan, "_MAX_UNSORTED_SEQS", 2)


KINDS = [
    Kind((4, 2), 128, torch.float16),
    Kind((4, 2), 128, torch.float16, kv_dtype=FP8),
    Kind((4, 1), 128, torch.bfloat16, 48, kv_dtype=INT8),
    Kind((6, 2), 64, torch.float16, window=100, kv_dtype=FP8),
    Kind((12, 1), 128, torch.bfloat16, window=1, kv_dtype=FP8),
]


@pytest.mark.parametrize("kind", KINDS[: times(2, 5)], ids=str)
def test_decode_of_fewer_tiles_than_there_are_stages(kind: Kind) -> None:
    with interpreted("_hopper_decode"):
        check_fused([1, 64, 130], kind, False, on_hopper=True)


@pytest.mark.parametrize("kind", KINDS if THOROUGH else KINDS[2:4], ids=str)
def test_decode_of_more_tiles_than_there_are_stages(kind: Kind) -> None:
    with interpreted("_hopper_decode") as launches:
        check_fused([700, 129], kind, True, on_hopper=True)
    assert kind.window == 1 or all(all(barriers) for barriers in launches), "a barrier that nothing waits for"


@pytest.mark.parametrize("head_size", [64, 128])
def test_the_rows_of_sums_are_the_channels_that_they_are_said_to_be(head_size: int) -> None:
    channels = torch.arange(head_size)[:, None].expand(-1, 16)
    rows = in_order_of_values.fn(channels)[:, 0]
    assert rows.tolist() == channel_of.fn(torch.arange(head_size), head_size).tolist()
    assert sorted(rows.tolist()) == list(range(head_size))


def check_prefill(shape: Shape, longest: int = 0, num_programs: int = 2) -> list[list[bool]]:
    """Return what `interpreted` yields."""
    with interpreted("_hopper_prefill") as launches, pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_prefill, "num_multiprocessors", lambda device: num_programs)
        check(shape, prefill=partial(prefill_on_hopper, longest=longest))
    return launches


OF_FLOAT16 = Shape([], [], head_size=128, dtype=torch.float16)
SHAPES = [
    OF_FLOAT16,
    replace(OF_FLOAT16, kv_dtype=FP8),
    replace(OF_FLOAT16, group=4, kv_dtype=INT8, window=100, block_size=32),
    Shape([], [], head_size=64, group=8, kv_dtype=FP8, block_size=48, dtype=torch.bfloat16),
    replace(OF_FLOAT16, group=64, num_kv_heads=1, kv_dtype=FP8, window=1),
]


@pytest.mark.parametrize("shape", SHAPES if THOROUGH else [SHAPES[0], *SHAPES[2:]], ids=str)
def test_prefill_of_more_tiles_than_there_are_stages(shape: Shape) -> None:
    query_lens = [70, 5] if shape.group < 64 else [3, 3]
    launches = check_prefill(replace(shape, query_lens=query_lens, context_lens=[300, 0]), num_programs=1)
    assert all(all(barriers) for barriers in launches), "a barrier that nothing waits for"


@pytest.mark.parametrize("shape", SHAPES[: times(2, 5)], ids=str)
def test_prefill_in_large_tiles_by_several_programs(shape: Shape) -> None:
    shape = replace(shape, query_lens=[1, 100, 64], context_lens=[64, 127, 64])
    check_prefill(shape, longest=10_000, num_programs=3)
