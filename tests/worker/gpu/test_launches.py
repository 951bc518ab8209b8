"""Fixed workloads launch the kernels on record, no more and no fewer: see `launches.py`."""

from __future__ import annotations

import pytest
import torch

from tests.thorough import THOROUGH
from tests.worker.gpu.launches import (
    CARD_CASES,
    INTERPRETED,
    INTERPRETED_CASES,
    interpreted,
    on_card,
    recorded,
    this_device,
)

pytestmark = pytest.mark.slow


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU launches its own kernels, see the test below")
@pytest.mark.parametrize("case", INTERPRETED_CASES if THOROUGH else ["eagle, int8 KV cache"])
def test_the_interpreted_gpu_launches_the_kernels_on_record(case: str) -> None:
    assert interpreted(case) == recorded(INTERPRETED)["cases"][case]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CARD_CASES)
def test_a_card_launches_the_kernels_on_record(case: str) -> None:
    record = recorded(this_device())
    if record.get("torch") != torch.__version__:
        pytest.skip(f"launches.json has no record of {this_device()} with torch {torch.__version__}")
    assert on_card(case) == record["cases"][case]
