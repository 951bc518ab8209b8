"""What a step holds where a mixture's experts are spread over ranks: bytes by hand, and the exchange as it runs.

Of Qwen3-30B-A3B's layers: hidden states of 2048, 128 experts of 768, 8 for each token. Widths are elements of 2 bytes
per token, as in `test_memory_needs.py`. A rank allocates room for all 8 experts of a row that it computes, wherever
they are: all of them may be its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from teachllm.core.memory import format_bytes
from teachllm.distributed.group import Alone
from teachllm.distributed.layout import layout_of
from teachllm.layers.expert_parallel import AllToAll
from teachllm.models.own_model import model_of_rank
from teachllm.worker.gpu.memory.balanced_routing import BalancedRouting
from teachllm.worker.gpu.memory.live_bytes import LiveBytes
from teachllm.worker.gpu.memory.meta_model import MetaGroup
from teachllm.worker.gpu.memory.predicted import PredictedNeeds, predict_needs
from teachllm_kernels.dry_run import dry_run
from teachllm_kernels.gpu_type import GPUType
from teachllm_kernels.moe.moe_routing import Routes
from tests.bench.h200_script import h200
from tests.worker.gpu.imagined_gpu import AMPERE, HOPPER, NOWHERE, describe
from tests.worker.gpu.test_memory_needs import EIGHT, MORE_SHAPES

SPREAD = {"enable_expert_parallel": True}
TWO_RANKS = SPREAD | {"tensor_parallel_size": 2}
TWO_REPLICAS = SPREAD | {"data_parallel_size": 2}
FOUR_RANKS = TWO_RANKS | TWO_REPLICAS
TOKENS = 16392
ANGLES, HIDDEN, EXPERTS = 2 * 128, 2048, 8 * (768 + 2048)
# Ids and weights of a token's experts, and pairs of tokens and experts in the experts' order: int32 or float32.
ROUTES, PAIRS = 2 * 8 * 2, 8 * 2

WIDTHS: dict[str, tuple[dict[str, Any], int]] = {
    # Every rank has all tokens. Their sum is not added to the residual in place, nor is that of the attention output.
    "two ranks": (TWO_RANKS, ANGLES + (2 + 3) * HIDDEN + EXPERTS + ROUTES + PAIRS),
    # A token's row goes to both ranks, and as many rows come. Before: a flag (a byte) and the rank (int64) of each
    # expert, and token indices (int64 [rows, 2]). Ids and weights travel in one tensor, and are taken apart on arrival.
    "two replicas": (
        TWO_REPLICAS,
        ANGLES + (2 + 2) * HIDDEN + ROUTES + (1 + 8 * 4 + 2 * 2 * 4) + ROUTES
        + 2 * (HIDDEN + EXPERTS + 2 * ROUTES + PAIRS),
    ),
    # Each rank dispatches half of its tokens to four ranks.
    "two replicas of two ranks": (
        FOUR_RANKS,
        ANGLES + (2 + 3) * HIDDEN + ROUTES + (1 + 4 * 4 + 2 * 2 * 4) + ROUTES // 2
        + 2 * (HIDDEN + EXPERTS + 2 * ROUTES + PAIRS),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def many_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(h200.SHAPES, "many", MORE_SHAPES["many"])


def predicted(folder: Path, card: GPUType, **settings: Any) -> PredictedNeeds:
    config, model = describe("many", folder, **EIGHT, **settings)
    with dry_run(card):
        return predict_needs(config, model_of_rank(model, layout_of(config).coords(0)), NOWHERE)


@pytest.mark.parametrize("case", list(WIDTHS))
@pytest.mark.parametrize("card", [AMPERE, HOPPER])
def test_a_step_with_spread_experts_holds_what_can_be_told_by_hand(case: str, card: GPUType, tmp_path: Path) -> None:
    settings, width = WIDTHS[case]
    found = predicted(tmp_path, card, **settings).needs["activations"]
    expected = 2 * TOKENS * width
    assert found == pytest.approx(expected, rel=1e-4), (format_bytes(found), format_bytes(expected))


def test_what_replicas_exchange_is_not_left_to_a_step_of_padding(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    shared, alone = predicted(tmp_path, HOPPER, **TWO_REPLICAS), predicted(tmp_path / "alone", HOPPER, **TWO_RANKS)
    assert shared.unmeasured == shared.needs["activations"] and not alone.unmeasured


def test_a_group_on_meta_receives_as_many_rows_as_it_is_told() -> None:
    x = torch.empty((3, 4), device=NOWHERE)
    with LiveBytes() as live:
        received = MetaGroup(2).all_to_all(x, sends=[1, 2], receives=[4, 1])
        assert received.shape == (5, 4) and live.now == 5 * 4 * 4


class _Mirror(Alone):
    """A group whose other ranks send as much as this one, and here the same."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def all_to_all(self, x: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        assert len(x) == sum(sends) == sum(receives)
        return x.clone()


@pytest.mark.parametrize(("num_ranks", "top_k"), [(2, 2), (2, 3), (4, 2), (4, 1)])
def test_a_balanced_exchange_allocates_what_one_with_values_does(num_ranks: int, top_k: int) -> None:
    num_tokens, hidden_size = 24, 16
    # Each token's experts are on as many ranks as possible, and each rank has equally many.
    first = torch.arange(num_tokens)[:, None]
    ids = ((first + torch.arange(top_k)) % num_ranks * top_k + torch.arange(top_k)).int()
    x, weights = torch.ones(num_tokens, hidden_size, dtype=torch.bfloat16), torch.ones(num_tokens, top_k)
    holders = [range(rank * top_k, (rank + 1) * top_k) for rank in range(num_ranks)]
    num_rows: list[int] = []

    def experts(rows: torch.Tensor, routes: Routes) -> torch.Tensor:
        num_rows.append(len(rows))
        assert len(routes.experts) == len(routes.weights) == len(rows)
        return torch.empty((len(rows), top_k, hidden_size), device=rows.device).sum(1).to(rows.dtype)

    exchange = AllToAll(_Mirror(num_ranks), holders, twins=Alone())
    with LiveBytes() as real:
        y = exchange(experts, x, Routes(ids, weights))
    exchange = AllToAll(MetaGroup(num_ranks), holders, twins=MetaGroup(1))
    x, routes = x.to(NOWHERE), Routes(ids.to(NOWHERE), weights.to(NOWHERE))
    with BalancedRouting(top_k), LiveBytes() as imagined:
        on_meta = exchange(experts, x, routes)
    assert on_meta.shape == y.shape == x.shape
    assert num_rows == [num_tokens * min(top_k, num_ranks)] * 2
    assert imagined.peak == pytest.approx(real.peak, rel=0.01)
