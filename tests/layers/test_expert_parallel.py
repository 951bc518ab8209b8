"""Experts that lie with several ranks compute for all tokens what one holder of all experts computes."""

from __future__ import annotations

import pytest
import torch

from teachllm.distributed.layout import Layout
from teachllm.distributed.ranks import Ranks
from teachllm.distributed.shards import spread
from teachllm.layers.expert_parallel import AllToAll, SameTokens
from teachllm.layers.moe import Experts, route
from teachllm_kernels.moe.moe_routing import Routes
from tests.distributed.threads import on_ranks
from tests.kernels.cases import pairs

NUM_EXPERTS, TOP_K, HIDDEN, WIDTH = 7, 3, 16, 24


@pytest.fixture
def whole() -> Experts:
    torch.manual_seed(0)
    experts = Experts(HIDDEN, range(NUM_EXPERTS), WIDTH)
    for weight in experts.parameters():
        weight.data.normal_(0.0, 0.3)
    return experts


def part_of(whole: Experts, held: range) -> Experts:
    part = Experts(HIDDEN, held, WIDTH)
    part.gate_up.data.copy_(whole.gate_up[held.start : held.stop])
    part.down.data.copy_(whole.down[held.start : held.stop])
    return part


def some_tokens(num_tokens: int) -> tuple[torch.Tensor, Routes]:
    return torch.randn(num_tokens, HIDDEN), route(torch.randn(num_tokens, NUM_EXPERTS), TOP_K, True)


def test_things_are_spread_as_equally_as_can_be() -> None:
    assert spread(8, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    for size, count in ((7, 3), (5, 4), (128, 6)):
        runs = spread(size, count)
        assert [each for run in runs for each in run] == list(range(size))
        assert max(map(len, runs)) - min(map(len, runs)) == 1


@pairs(num_tokens=[[5, 9], [4, 0], [0, 0], [6, 1, 11]], num_twins=[1, 2])
def test_every_replica_gets_back_what_all_experts_make_of_its_tokens(
    whole: Experts, num_tokens: list[int], num_twins: int
) -> None:
    given = [some_tokens(count) for count in num_tokens]
    layout = Layout(num_twins, 1, True, len(given))
    holders = spread(NUM_EXPERTS, layout.num_expert_ranks)

    def work(ranks: Ranks) -> torch.Tensor:
        exchange = AllToAll(ranks.experts, holders, twins=ranks.tensor)
        return exchange(part_of(whole, holders[ranks.coords.expert_rank]), *given[ranks.coords.replica])

    for number, found in enumerate(on_ranks(layout, work)):
        x, routes = given[number // num_twins]
        torch.testing.assert_close(found, whole(x, routes), atol=1e-5, rtol=1e-5)


def test_a_row_goes_once_to_a_rank_and_only_where_it_has_an_expert(whole: Experts) -> None:
    x, routes = some_tokens(12)
    holders = spread(NUM_EXPERTS, 3)

    def work(ranks: Ranks) -> list[int]:
        seen: list[int] = []
        part = part_of(whole, holders[ranks.coords.expert_rank])

        def experts(rows: torch.Tensor, of_rows: Routes) -> torch.Tensor:
            seen.extend((x == row).all(1).nonzero().item() for row in rows)
            return part(rows, of_rows)

        own = slice(4 * ranks.coords.replica, 4 * ranks.coords.replica + 4)
        AllToAll(ranks.experts, holders, ranks.tensor)(experts, x[own], Routes(*(each[own] for each in routes)))
        return seen

    for held, seen in zip(holders, on_ranks(Layout(1, 1, True, 3), work), strict=True):
        assert seen == [token for token, chosen in enumerate(routes.experts.tolist()) if set(chosen) & set(held)]


def test_ranks_with_the_same_tokens_add_up(whole: Experts) -> None:
    x, routes = some_tokens(6)
    holders = spread(NUM_EXPERTS, 2)

    def work(ranks: Ranks) -> torch.Tensor:
        return SameTokens(ranks.tensor)(part_of(whole, holders[ranks.coords.expert_rank]), x, routes)

    for found in on_ranks(Layout(2, 1, True), work):
        torch.testing.assert_close(found, whole(x, routes), atol=1e-5, rtol=1e-5)
