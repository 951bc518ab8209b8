"""The algorithms by themselves, on weights and inputs small enough to know what is right."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from teachllm.layers.weights.quantized_weights import GroupedWeight
from teachllm.quantization.algorithms import autoround
from teachllm.quantization.algorithms.awq import best_scales
from teachllm.quantization.algorithms.clipping import clipped
from teachllm.quantization.algorithms.gptq import blocks_of_columns, gptq, inverse_factor
from teachllm.quantization.algorithms.grid import Grid
from teachllm.quantization.algorithms.smoothquant import smoothing_scales
from teachllm_kernels.quantize_rows import quantize_rows
from tests.thorough import times

NUM_OUT, NUM_IN, NUM_TOKENS = 24, 64, 400
GRIDS = [Grid(4, 16), Grid(8, 32, is_symmetric=False), Grid(4, 16, is_symmetric=False), Grid(4, -1)]
GRIDS = GRIDS[: times(2, 4)]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    return normal(NUM_OUT, NUM_IN)


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    """[num_tokens, in] whose inputs go together, and of which two are ten times as large as the others."""
    x = normal(NUM_TOKENS, NUM_IN, seed=1) @ normal(NUM_IN, NUM_IN, seed=2) / NUM_IN**0.5
    x[:, [5, 40]] *= 10
    return x


@pytest.fixture(scope="module")
def hessian(x: torch.Tensor) -> torch.Tensor:
    return x.t() @ x / len(x)


def loss(x: torch.Tensor, weight: torch.Tensor, changed: torch.Tensor) -> float:
    """Mean squared error of the output."""
    return float((x @ (changed - weight).t()).square().mean())


def dequantized(quantized: GroupedWeight) -> torch.Tensor:
    return quantized.dequantize(torch.float32)


# -- GPTQ ------------------------------------------------------------------------------------------------------


def column_by_column(weight: torch.Tensor, hessian: torch.Tensor, grid: Grid, damping: float) -> torch.Tensor:
    """GPTQ by its definition: the least squares for the columns that are left, solved anew at each."""
    weight, hessian = weight.double(), hessian.double()
    hessian = hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.double)
    width = grid.width(weight.shape[1])
    done = torch.empty_like(weight)
    for i in range(weight.shape[1]):
        if i % width == 0:
            group = grid.nearest(weight[:, i : i + width].float())
            step, zero = group.scales[:, 0].double(), group.with_zeros()[:, 0]
        quantized = ((weight[:, i] / step).round() + zero).clamp(0, grid.most)
        done[:, i] = (quantized - zero) * step
        behind = slice(i + 1, None)
        moved = torch.linalg.solve(hessian[behind, behind], hessian[behind, i])
        weight[:, behind] += torch.outer(weight[:, i] - done[:, i], moved)
    return done.float()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_gptq_does_what_least_squares_for_the_columns_left_would(
    grid: Grid, weight: torch.Tensor, hessian: torch.Tensor
) -> None:
    ours = dequantized(gptq(weight, hessian, grid, damping=0.01))
    by_definition = column_by_column(weight, hessian, grid, damping=0.01)
    assert (ours != by_definition).float().mean() < 0.01  # a number between two quantized values may go either way


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_gptq_loses_less_of_the_output_than_round_to_nearest(
    grid: Grid, weight: torch.Tensor, x: torch.Tensor, hessian: torch.Tensor
) -> None:
    nearest = loss(x, weight, dequantized(grid.nearest(weight)))
    for desc_act in (False, True):
        assert loss(x, weight, dequantized(gptq(weight, hessian, grid, desc_act))) < 0.7 * nearest


def test_where_no_input_goes_with_another_gptq_has_nothing_to_make_up_for(weight: torch.Tensor) -> None:
    for grid in GRIDS:
        found, nearest = gptq(weight, torch.eye(NUM_IN), grid), grid.nearest(weight)
        assert torch.equal(found.qweight, nearest.qweight)
        assert torch.equal(found.scales, nearest.scales)
        assert torch.equal(found.with_zeros(), nearest.with_zeros())


@pytest.mark.parametrize("block_size", [24, 16, 48][: times(1, 3)])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_columns_between_two_products_change_only_the_time(
    grid: Grid, block_size: int, weight: torch.Tensor, hessian: torch.Tensor
) -> None:
    whole, parts = (gptq(weight, hessian, grid, block_size=size) for size in (NUM_IN, block_size))
    assert (parts.qweight != whole.qweight).float().mean() < 0.01
    assert torch.allclose(parts.scales.float(), whole.scales.float(), rtol=1e-2)


def test_a_group_wider_than_a_block_of_columns_is_cut_up() -> None:
    """Else a group of the whole row would be one block, and each column would change all that are behind it."""
    assert list(blocks_of_columns(300, 300, 128)) == [(0, 128), (128, 256), (256, 300)]
    assert list(blocks_of_columns(384, 192, 128)) == [(0, 128), (128, 192), (192, 320), (320, 384)]
    assert list(blocks_of_columns(240, 48, 128)) == [(0, 96), (96, 192), (192, 240)]


def test_desc_act_gives_the_largest_inputs_the_first_group(weight: torch.Tensor, hessian: torch.Tensor) -> None:
    quantized = gptq(weight, hessian, Grid(4, 16), desc_act=True)
    assert quantized.group_index is not None and quantized.group_index.bincount().tolist() == [16] * 4
    largest = hessian.diagonal().argsort(descending=True)
    assert quantized.group_index[largest].tolist() == [i // 16 for i in range(NUM_IN)]


def test_inputs_that_are_always_zero_get_zeros_and_do_no_harm(weight: torch.Tensor, hessian: torch.Tensor) -> None:
    hessian = hessian.clone()
    hessian[3], hessian[:, 3] = 0.0, 0.0
    found = dequantized(gptq(weight, hessian, Grid(4, 16)))
    assert found.isfinite().all() and (found[:, 3] == 0).all()
    assert (dequantized(gptq(weight, torch.zeros(NUM_IN, NUM_IN), Grid(4, 16))) == 0).all()


def test_fewer_tokens_than_inputs_are_enough(weight: torch.Tensor, x: torch.Tensor) -> None:
    few = x[:8]
    found = dequantized(gptq(weight, few.t() @ few, Grid(4, 16)))
    assert loss(few, weight, found) < 0.1 * loss(few, weight, dequantized(Grid(4, 16).nearest(weight)))


def test_the_factor_is_that_of_the_inverse(hessian: torch.Tensor) -> None:
    upper = inverse_factor(hessian, 0.0).double()
    assert torch.equal(upper, upper.triu())
    assert torch.allclose(upper.t() @ upper @ hessian.double(), torch.eye(NUM_IN, dtype=torch.double), atol=1e-3)


@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
def test_activations_that_overflow_are_named(broken: float, weight: torch.Tensor, hessian: torch.Tensor) -> None:
    hessian = hessian.clone()
    hessian[0, 0] = broken
    with pytest.raises(ValueError, match="not finite: the model's activations overflow"):
        gptq(weight, hessian, Grid(4, 16))


# -- AWQ -------------------------------------------------------------------------------------------------------


def test_awq_scales_up_the_weights_that_large_inputs_meet(weight: torch.Tensor, x: torch.Tensor) -> None:
    x, grid = x.clone(), Grid(4, 16)
    x[:, [5, 40]] *= 10
    scales = best_scales([weight, 2 * weight], x.t() @ x / len(x), x.abs().mean(dim=0), grid)
    assert set(scales.topk(2).indices.tolist()) == {5, 40}
    scaled = dequantized(grid.nearest(weight * scales)) / scales
    assert loss(x, weight, scaled) < 0.8 * loss(x, weight, dequantized(grid.nearest(weight)))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_awq_takes_no_scales_that_do_harm(grid: Grid, weight: torch.Tensor) -> None:
    x = normal(NUM_TOKENS, NUM_IN, seed=1)
    misleading = torch.logspace(0, 3, NUM_IN)  # means; the Hessian knows better
    scales = best_scales([weight], x.t() @ x / len(x), misleading, grid)
    scaled = dequantized(grid.nearest(weight * scales)) / scales
    assert loss(x, weight, scaled) <= 1.001 * loss(x, weight, dequantized(grid.nearest(weight)))


def test_awq_keeps_one_scale_where_inputs_come_from_one_output(
    weight: torch.Tensor, x: torch.Tensor, hessian: torch.Tensor
) -> None:
    sizes = x.abs().mean(dim=0).view(2, 32).mean(dim=0)
    scales = best_scales([weight], hessian, sizes, Grid(4, 16), lambda of_source: of_source.repeat(2))
    assert scales.shape == (32,) and scales.amax() > scales.amin()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_clipping_never_loses_more_of_a_group_than_its_whole_range(
    grid: Grid, weight: torch.Tensor, x: torch.Tensor, hessian: torch.Tensor
) -> None:
    found, nearest, width = (
        dequantized(clipped(weight, hessian, grid)),
        dequantized(grid.nearest(weight)),
        grid.width(NUM_IN),
    )
    for start in range(0, NUM_IN, width):
        part = slice(start, start + width)
        for row in range(NUM_OUT):
            parts = (x[:, part], weight[row : row + 1, part])
            assert loss(*parts, found[row : row + 1, part]) <= 1.001 * loss(*parts, nearest[row : row + 1, part])


def test_clipping_gives_up_a_number_that_nothing_large_meets(weight: torch.Tensor) -> None:
    weight, hessian = weight.clone(), torch.eye(NUM_IN)
    weight[:, 3], hessian[3, 3] = 10.0, 1e-6
    quantized = clipped(weight, hessian, Grid(4, 16))
    narrower = quantized.scales / Grid(4, 16).nearest(weight).scales
    assert narrower[:, 0].mean() < 0.75 < narrower[:, 1:].mean()


# -- AutoRound -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_autoround_begins_with_round_to_nearest(grid: Grid, weight: torch.Tensor) -> None:
    found, nearest = autoround.quantize_weight(weight, autoround.Choices.none(weight, grid), grid), grid.nearest(weight)
    assert torch.equal(found.qweight, nearest.qweight)
    assert torch.equal(found.scales, nearest.scales)
    assert torch.equal(found.with_zeros(), nearest.with_zeros())


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_autoround_learns_a_rounding_that_loses_less(grid: Grid, weight: torch.Tensor) -> None:
    x = normal(NUM_TOKENS, NUM_IN, seed=1) + 2 * normal(NUM_TOKENS, 1, seed=2)
    wanted = x @ weight.t()
    found = autoround.learn({"a": weight}, grid, lambda w: (x @ w["a"].t() - wanted).square().mean(), num_iters=100)[
        "a"
    ]
    assert loss(x, weight, dequantized(found)) < 0.7 * loss(x, weight, dequantized(grid.nearest(weight)))


def test_autoround_keeps_the_best_that_it_saw(weight: torch.Tensor, x: torch.Tensor) -> None:
    seen: list[float] = []

    def lost(weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        error = (x @ (weights["a"] - weight).t()).square().mean()
        seen.append(error.item())
        return error

    found = autoround.learn({"a": weight}, Grid(4, 16), lost, num_iters=30)["a"]
    assert seen[-1] > min(seen)  # outliers make it miss
    assert loss(x, weight, dequantized(found)) == pytest.approx(min(seen), rel=1e-3)


def test_autoround_moves_no_weight_further_than_a_step(weight: torch.Tensor, x: torch.Tensor) -> None:
    grid = Grid(8, 16)
    found = autoround.learn({"a": weight}, grid, lambda w: (x @ w["a"].t()).square().mean(), num_iters=50)["a"]
    steps = found.scales.float().repeat_interleave(16, dim=1)
    inside = (found.qweight > 0) & (found.qweight < grid.most)
    assert ((dequantized(found) - weight).abs() <= 1.001 * steps)[inside].all()
    assert (dequantized(found) - weight).abs().gt(0.5001 * steps)[inside].any()


def test_what_autoround_optimizes_is_the_dequantized_weight(weight: torch.Tensor) -> None:
    for grid in GRIDS:
        choices = autoround.Choices.none(weight, grid)
        choices.offsets.data = (normal(*weight.shape, seed=3) / 4).clamp(-0.5, 0.5)
        choices.low.data *= 0.8
        choices.high.data *= 0.7
        expected = autoround.rounded(weight, choices, grid)
        assert torch.allclose(dequantized(autoround.quantize_weight(weight, choices, grid)), expected, atol=1e-5)


# -- SmoothQuant -----------------------------------------------------------------------------------------------


def test_smoothquant_moves_outliers_so_that_rows_of_8_bits_lose_less(weight: torch.Tensor, x: torch.Tensor) -> None:
    x = x.clone()
    x[:, 5] *= 50

    def lost(x: torch.Tensor, weight: torch.Tensor) -> float:
        return float((quantize_rows(x, torch.int8).dequantize() @ weight.t() - x @ weight.t()).square().mean())

    scales = smoothing_scales([weight], x.abs().amax(dim=0))
    assert torch.allclose((x / scales) @ (weight * scales).t(), x @ weight.t(), atol=1e-2)
    assert lost(x / scales, weight * scales) < 0.2 * lost(x, weight)


def test_smoothquant_makes_inputs_and_weights_equally_wide(weight: torch.Tensor, x: torch.Tensor) -> None:
    widest = x.abs().amax(dim=0)
    scales = smoothing_scales([weight, weight / 2], widest)
    assert torch.allclose(widest / scales, (weight * scales).abs().amax(dim=0), rtol=1e-4)
    assert smoothing_scales([weight], widest * (torch.arange(NUM_IN) != 4))[4] == 1
