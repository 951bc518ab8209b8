"""Experts' kernels: who goes where, each expert's products, and the sums of what they made, against plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm_kernels.moe.grouped_gemm import (
    _most_tiles,
    grouped_down_reference,
    grouped_down_triton,
    grouped_gated_reference,
    grouped_gated_triton,
)
from teachllm_kernels.moe.moe_routing import (
    Groups,
    Routes,
    combine_reference,
    combine_triton,
    group_reference,
    group_triton,
    route_reference,
    route_triton,
)
from tests.kernels.cases import DEVICE, FLOATS, ON_GPU, pairs, per_device
from tests.thorough import THOROUGH, times

pytestmark = [pytest.mark.gpu] if ON_GPU else []  # natively where there is a GPU, else interpreted
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# (experts, experts per token): one for all, all for each, and numbers that are no powers of two.
MIXTURES = per_device([(1, 1), (5, 2), (3, 3)], [(1, 1), (2, 2), (5, 2), (8, 3), (20, 8)])
NUMS_TOKENS = per_device([1, 7], [1, 9, 40, 700])
SIZES = per_device([(128, 8), (140, 33)], [(16, 8), (72, 33), (130, 80)])  # of a token, of an expert's activations


def scores(num_tokens: int, num_experts: int, is_crowded: bool) -> torch.Tensor:
    """Return [num_tokens, num_experts]; if crowded, all tokens go to the first experts, and the others get none."""
    logits = torch.randn(num_tokens, num_experts)
    if is_crowded:
        logits += torch.linspace(20, 0, num_experts)
    return logits.to(DEVICE)


def some_of(num_experts: int) -> range:
    """Return the experts that a rank in the middle holds."""
    return range(num_experts // 3, max(num_experts // 3 + 1, num_experts - 1))


@pairs(mixture=MIXTURES, num_tokens=NUMS_TOKENS, is_crowded=[False, True], renormalizes=[False, True], dtype=FLOATS)
def test_a_token_goes_to_its_most_probable_experts(
    mixture: tuple[int, int], num_tokens: int, is_crowded: bool, renormalizes: bool, dtype: torch.dtype
) -> None:
    num_experts, top_k = mixture
    logits = scores(num_tokens, num_experts, is_crowded).to(dtype)
    experts, weights = route_triton(logits, top_k, renormalizes)
    expected = route_reference(logits.float(), top_k, renormalizes)
    assert torch.allclose(weights, expected.weights, atol=1e-6)  # of equal scores any expert may come first
    assert all(len(set(row)) == top_k for row in experts.tolist())
    shares = logits.float().softmax(dim=-1).gather(1, experts.long())
    assert torch.allclose(shares / shares.sum(1, keepdim=True) if renormalizes else shares, weights, atol=1e-6)


def test_scores_of_nan_lead_to_no_expert_that_does_not_exist() -> None:
    logits = torch.full((3, 5), float("nan"), device=DEVICE)
    experts, _ = route_triton(logits, 2, True)
    assert ((experts >= 0) & (experts < 5)).all()


@pairs(mixture=MIXTURES, num_tokens=NUMS_TOKENS, is_crowded=[False, True])
def test_each_expert_gets_its_pairs_in_the_order_of_tokens(
    mixture: tuple[int, int], num_tokens: int, is_crowded: bool
) -> None:
    num_experts, top_k = mixture
    held = some_of(num_experts)
    experts = route_reference(scores(num_tokens, num_experts, is_crowded), top_k, True).experts
    for group in (group_triton, group_reference):
        counts, pairs = group(experts, held)
        chosen = experts.flatten().tolist()
        expected = [[pair for pair, expert in enumerate(chosen) if expert == own] for own in held]
        assert counts.tolist() == [len(each) for each in expected]
        assert pairs[: counts.sum()].tolist() == [pair for each in expected for pair in each]


def test_more_pairs_than_a_program_looks_through_at_once_are_all_found() -> None:
    experts = torch.randint(3, (1100, 2), dtype=torch.int32, device=DEVICE)
    found, expected = group_triton(experts, range(1, 3)), group_reference(experts, range(1, 3))
    assert torch.equal(found.counts, expected.counts)
    assert torch.equal(found.pairs[: found.counts.sum()], expected.pairs[: found.counts.sum()])


def naive(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, routes: Routes, held: range) -> torch.Tensor:
    """Token by token and expert by expert, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, (chosen, weights) in enumerate(zip(routes.experts.tolist(), routes.weights.tolist(), strict=True)):
        for expert, weight in zip(chosen, weights, strict=True):
            if expert in held:
                gate, up = (gate_up[expert - held.start].double() @ x[token].double()).chunk(2)
                y = down[expert - held.start].double() @ (gate * gate.sigmoid() * up)
                out[token] += weight * y
    return out


def draw_weights(num_experts: int, size: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = torch.randn(num_experts, 2 * width, size, device=DEVICE) * size**-0.5
    return gate_up.to(dtype), (torch.randn(num_experts, size, width, device=DEVICE) * width**-0.5).to(dtype)


@pairs(
    few=5,
    mixture=MIXTURES,
    num_tokens=NUMS_TOKENS,
    is_crowded=[False, True],
    size=SIZES,
    dtype=FLOATS,
    is_fixed=[False, True],
)
def test_the_experts_make_of_a_token_what_each_alone_would(
    mixture: tuple[int, int],
    num_tokens: int,
    is_crowded: bool,
    size: tuple[int, int],
    dtype: torch.dtype,
    is_fixed: bool,
) -> None:
    num_experts, top_k = mixture
    held = some_of(num_experts)
    x = torch.randn(num_tokens, size[0], device=DEVICE).to(dtype)
    gate_up, down = draw_weights(len(held), *size, dtype)
    chosen = route_reference(scores(num_tokens, num_experts, is_crowded), top_k, True).experts
    routes = Routes(chosen, torch.rand(chosen.shape, device=DEVICE) + 0.1)  # one near 0 would be none in float16
    expected = naive(x, gate_up, down, routes, held)

    groups = group_triton(routes.experts, held)
    h = grouped_gated_triton(x, gate_up, groups, is_fixed)
    y = combine_triton(grouped_down_triton(h, down, groups, routes, is_fixed), routes.experts, held)
    assert y.dtype == dtype and y.isfinite().all()
    assert (y.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()

    groups = group_reference(routes.experts, held)
    h = grouped_gated_reference(x, gate_up, groups)
    y = combine_reference(grouped_down_reference(h, down, groups, routes), routes.experts, held)
    assert y.dtype == dtype
    assert (y.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize("num_tokens", [10, 40, 80, 140])  # 5, 20, 40 and 70 rows per expert, all of them one's
def test_every_size_of_tile_is_right_for_as_many_rows_as_fill_it(num_tokens: int) -> None:
    x = torch.randn(num_tokens, 40, device=DEVICE).half()
    gate_up, down = draw_weights(2, 40, 24, torch.float16)
    routes = route_reference(scores(num_tokens, 2, is_crowded=True), 1, False)
    groups = group_reference(routes.experts, range(2))
    h = grouped_gated_triton(x, gate_up, groups)
    y = combine_reference(grouped_down_triton(h, down, groups, routes), routes.experts, range(2))
    expected = naive(x, gate_up, down, routes, range(2))
    assert (y.double() - expected).norm() <= TOLERANCE[torch.float16] * expected.norm()


@pytest.mark.usefixtures("products_in_order")
@pairs(num_tokens=per_device([4], [2, 40, 700]), dtype=FLOATS if THOROUGH or ON_GPU else FLOATS[:1])
def test_with_fixed_tiles_a_token_gets_the_same_alone_and_among_others(num_tokens: int, dtype: torch.dtype) -> None:
    x = torch.randn(num_tokens, 72, device=DEVICE).to(dtype)
    gate_up, down = draw_weights(3, 72, 40, dtype)
    routes = route_reference(scores(num_tokens, 3, is_crowded=False), 2, True)

    def run(x: torch.Tensor, routes: Routes) -> torch.Tensor:
        groups = group_triton(routes.experts, range(3))
        h = grouped_gated_triton(x, gate_up, groups, is_fixed=True)
        return combine_triton(grouped_down_triton(h, down, groups, routes, is_fixed=True), routes.experts, range(3))

    together = run(x, routes)
    for token in (0, num_tokens - 1) if THOROUGH or ON_GPU else (num_tokens - 1,):
        own = slice(token, token + 1)
        assert torch.equal(run(x[own], Routes(routes.experts[own], routes.weights[own])), together[own])


@settings(max_examples=times(30, 500))
@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.sampled_from([16, 32, 64, 128]))
def test_there_are_programs_for_every_tile_however_the_pairs_are_spread(counts: list[int], rows: int) -> None:
    assert sum(-(-count // rows) for count in counts) <= _most_tiles(sum(counts), len(counts), rows)


def test_one_tokens_pairs_have_a_tile_each_and_no_more() -> None:
    assert _most_tiles(8, 128, 16) == 8 and _most_tiles(1, 1, 64) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_a_recording_takes_tokens_to_other_experts_than_it_was_recorded_with(num_tokens: int) -> None:
    """On a GPU no shape may depend on who goes where, and the host must not wait to know."""
    device = torch.device("cuda")
    x = torch.randn(num_tokens, 128, device=device).bfloat16()
    logits = torch.zeros(num_tokens, 16, device=device)
    gate_up = torch.randn(16, 2 * 64, 128, device=device).bfloat16()
    down = torch.randn(16, 128, 64, device=device).bfloat16()

    def run() -> torch.Tensor:
        routes = route_triton(logits, 4, True)
        groups: Groups = group_triton(routes.experts, range(16))
        h = grouped_gated_triton(x, gate_up, groups)
        return combine_triton(grouped_down_triton(h, down, groups, routes), routes.experts, range(16))

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = run()
    for _ in range(3):
        logits.normal_()
        graph.replay()
        assert torch.equal(recorded, run())
