"""Hopper's products of 8-bit values, interpreted: what they compute, and that their warps wait for each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm_kernels.linear import hopper_tiling
from teachllm_kernels.linear.scaled import hopper_scaled_mm
from tests.kernels.interpreted_gluon import interpreted
from tests.kernels.linear.scaled_cases import check_few_rows_on_hopper, check_many_rows_on_hopper, hopper_kinds

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a Hopper runs them itself: test_scaled_linear.py")
FLOATS = (torch.float8_e4m3fn, "block")
forms = st.sampled_from(["plain", "gated", "parts"])


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_scaled_mm, "num_multiprocessors", lambda device: 2)


@settings(max_examples=15)
@given(
    *(st.sampled_from([1, 7, 8, 9, 31, 64]), st.sampled_from([(128, 64), (80, 40), (1040, 200), (2064, 72)])),
    *(hopper_kinds, st.booleans(), forms),
)
def test_few_rows(
    num_rows: int, shape: tuple[int, int], kind: tuple[torch.dtype, str], has_bias: bool, form: str
) -> None:
    with interpreted("_hopper_linear"):
        check_few_rows_on_hopper(num_rows, shape, *kind, has_bias, form)


@settings(max_examples=10)
@given(
    *(st.sampled_from([65, 96, 100, 128, 130, 180, 200]), st.sampled_from([(80, 40), (1040, 200)])),
    *(hopper_kinds, st.booleans(), forms),
)
def test_further_rows(
    num_rows: int, shape: tuple[int, int], kind: tuple[torch.dtype, str], has_bias: bool, form: str
) -> None:
    with interpreted("_hopper_linear"):
        check_few_rows_on_hopper(num_rows, shape, *kind, has_bias, form)


@pytest.mark.parametrize(("num_rows", "form"), [(9, "gated"), (64, "plain"), (70, "gated"), (130, "parts")])
def test_few_rows_of_many_tiles_and_several_stripes(num_rows: int, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with interpreted("_hopper_linear") as launches:
        check_few_rows_on_hopper(num_rows, (4000, 128), *FLOATS, True, form)
        monkeypatch.setattr(hopper_tiling, "PLACES", 10)  # as 9000 columns on a GPU: more programs than places
        monkeypatch.setattr(hopper_tiling, "_PARTS_WANTED", 10)
        check_few_rows_on_hopper(num_rows, (528, 696), *FLOATS, False, form)
    assert all(all(barriers) for barriers in launches), "a barrier that nobody waits for"


@pytest.mark.parametrize("columns", [128, 256])
@pytest.mark.parametrize("gated", [False, True])
def test_many_rows_of_blocks(columns: int, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_scaled_mm, "_columns", lambda *sizes: columns)
    with interpreted("_hopper_scaled_mm") as launches:
        for num_rows, shape in ((140, (1040, 520)), (70, (128, 264))):  # more tiles than there are stages, and fewer
            check_many_rows_on_hopper(num_rows, shape, *FLOATS, True, gated)
    assert all(all(barriers) for barriers in launches), "a barrier that nobody waits for"


@settings(max_examples=10)
@given(
    *(st.integers(1, 300), st.sampled_from([(128, 128), (80, 40), (1040, 200), (528, 520)])),
    *(hopper_kinds, st.booleans(), st.booleans(), st.sampled_from([0, 128, 512])),
)
def test_many_rows(
    num_rows: int,
    shape: tuple[int, int],
    kind: tuple[torch.dtype, str],
    has_bias: bool,
    gated: bool,
    level: int,
) -> None:
    with interpreted("_hopper_scaled_mm"):
        check_many_rows_on_hopper(num_rows, shape, *kind, has_bias, gated, level)
