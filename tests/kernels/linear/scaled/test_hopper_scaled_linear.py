"""Hopper's products of 8-bit weights, interpreted: what they compute, and that their warps wait for each other."""

from __future__ import annotations

import pytest
import torch

from teachllm_kernels.linear import hopper_tiling
from teachllm_kernels.linear.scaled import hopper_scaled_mm
from tests.kernels.cases import pairs
from tests.kernels.interpreted_gluon import interpreted
from tests.kernels.linear.scaled.scaled_cases import OF_HOPPER, check_few_rows_on_hopper, check_many_rows_on_hopper
from tests.thorough import times

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a Hopper runs them itself: test_scaled_linear.py")
FP8 = torch.float8_e4m3fn
FORMS = ["plain", "gated", "parts"]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_scaled_mm, "num_multiprocessors", lambda device: 2)


@pairs(
    few=8,
    num_rows=[1, 9, 64],
    shape=[(80, 40), (times(528, 1040), 200)],
    kind=OF_HOPPER,
    has_bias=[False, True],
    form=FORMS,
)
def test_few_rows(
    num_rows: int, shape: tuple[int, int], kind: tuple[torch.dtype, str], has_bias: bool, form: str
) -> None:
    with interpreted("_hopper_linear"):
        check_few_rows_on_hopper(num_rows, shape, kind[0], kind[1], has_bias, form)


@pairs(few=7, num_rows=[96, 130, 200], kind=[*OF_HOPPER[1:3], OF_HOPPER[-1]], form=FORMS)
def test_further_rows(num_rows: int, kind: tuple[torch.dtype, str], form: str) -> None:
    with interpreted("_hopper_linear"):
        check_few_rows_on_hopper(num_rows, (272, 40), kind[0], kind[1], has_bias=True, form=form)


@pytest.mark.parametrize(("num_rows", "form"), [(9, "plain"), (64, "gated"), (130, "parts")][times(1, 0) :])
def test_few_rows_of_many_tiles_and_several_stripes(num_rows: int, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with interpreted("_hopper_linear") as launches:
        check_few_rows_on_hopper(num_rows, (times(2064, 4000), 128), FP8, "block", True, form)
        monkeypatch.setattr(hopper_tiling, "PLACES", 10)  # as 9000 columns on a GPU: more programs than places
        monkeypatch.setattr(hopper_tiling, "_PARTS_WANTED", 10)
        check_few_rows_on_hopper(num_rows, (528, 696), FP8, "block", False, form)
    assert all(all(barriers) for barriers in launches), "a barrier that nothing waits for"


@pytest.mark.parametrize(("columns", "gated"), [(128, False), (256, True)])
def test_many_rows_of_blocks(columns: int, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_scaled_mm, "_columns", lambda *sizes: columns)
    with interpreted("_hopper_scaled_mm") as launches:
        # More tiles than there are stages, and fewer.
        for num_rows, shape in ((140, (1040, times(264, 520))), (70, (128, times(40, 264)))):
            check_many_rows_on_hopper(num_rows, shape, FP8, "block", True, gated)
    assert all(all(barriers) for barriers in launches), "a barrier that nothing waits for"


@pairs(
    few=6,
    num_rows=[1, 150],
    shape=[(80, 40), (272, 264)],
    kind=OF_HOPPER,
    has_bias=[False, True],
    gated=[False, True],
    level=[0, 512],
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
        check_many_rows_on_hopper(num_rows, shape, kind[0], kind[1], has_bias, gated, level)
