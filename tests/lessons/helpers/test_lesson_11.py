"""Lesson 11: the engine's own rounding keeps the contract, and wrong ones are told why they are."""

from __future__ import annotations

import pytest
import torch

from teachllm.checkpoint.files import find_folder
from teachllm_lessons.helpers.lesson_11 import (
    PERCENT_LEFT,
    QUANTIZE,
    Parts,
    documented,
    nearest_4_bits,
    on_a_gpu,
    own,
    rounded,
    rounded_smollm2,
    size_on_disk,
    three_packings,
    told_bytes,
)
from teachllm_lessons.helpers.lesson_11_losses import loss
from teachllm_lessons.helpers.pictures.lesson_11 import bits_per_weight, draw_trade
from tests.lessons.wrong_answers import keeps_contract, rejected
from tests.thorough import only_thorough


def laid(groups: torch.Tensor, low: torch.Tensor, high: torch.Tensor, bits: int) -> Parts:
    """Quantize each group between its two ends."""
    most = (1 << bits) - 1
    scales = ((high - low) / most).clamp_min(1e-8)
    zeros = (-low / scales).round().clamp(0, most)
    values = ((groups / scales.unsqueeze(2)).round() + zeros.unsqueeze(2)).clamp(0, most)
    return values.flatten(1), scales, zeros


def ends(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = weight.unflatten(1, (-1, group_size))
    return groups, groups.amin(2).clamp(max=0.0), groups.amax(2).clamp(min=0.0)


def right(weight: torch.Tensor, bits: int, group_size: int) -> Parts:
    return laid(*ends(weight, group_size), bits)


def without_zero(weight: torch.Tensor, bits: int, group_size: int) -> Parts:
    groups = weight.unflatten(1, (-1, group_size))
    return laid(groups, groups.amin(2), groups.amax(2), bits)


def divides_by_nothing(weight: torch.Tensor, bits: int, group_size: int) -> Parts:
    groups, low, high = ends(weight, group_size)
    scales = (high - low) / ((1 << bits) - 1)
    zeros = (-low / scales).round()
    return ((groups / scales.unsqueeze(2)).round() + zeros.unsqueeze(2)).flatten(1), scales, zeros


def of_the_whole_row(weight: torch.Tensor, bits: int, group_size: int) -> Parts:
    values, scales, zeros = right(weight, bits, weight.shape[1])
    count = weight.shape[1] // group_size
    return values, scales.repeat(1, count), zeros.repeat(1, count)


def symmetric(weight: torch.Tensor, bits: int, group_size: int) -> Parts:
    groups, low, high = ends(weight, group_size)
    largest = torch.maximum(high, -low)
    return laid(groups, -largest, largest, bits)


def truncates(weight: torch.Tensor, bits: int, group_size: int) -> Parts:
    values, scales, zeros = right(weight, bits, group_size)
    groups = weight.unflatten(1, (-1, group_size))
    values = ((groups / scales.unsqueeze(2)).floor() + zeros.unsqueeze(2)).clamp(0, (1 << bits) - 1)
    return values.flatten(1), scales, zeros


def zero_of_any_size(weight: torch.Tensor, bits: int, group_size: int) -> Parts:
    values, scales, zeros = right(weight, bits, group_size)
    return values, scales, zeros + 0.25


def as_a_matrix(weight: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    return right(weight, bits, group_size)[0]


def test_the_engines_own_is_right() -> None:
    keeps_contract(QUANTIZE, "the same words as with its own quantized weights")


def test_another_right_one_is_accepted() -> None:
    assert QUANTIZE.contract(right) == QUANTIZE.contract(own)


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (without_zero, r"3 came back as .*Its group is \[3 3 3 3\].*unless it reaches to 0\.0"),
        (divides_by_nothing, r"quantize\(\[0 0 0 0\], 4, 4\): scales are \[0\]: each must be above 0"),
        (of_the_whole_row, r"groups see each other: \[0\.1 -0\.2 0\.3 -0\.4\] .* beside a group with 100"),
        (symmetric, r"four weights and four quantized values: \[-1 0 1 2\] in 2 bits fits exactly"),
        (truncates, r"came back as .* nothing need be off by more than half of one"),
        (zero_of_any_size, r"zeros are \[1\.25\]: round them to whole numbers"),
        (as_a_matrix, r"is Tensor: return three tensors, quantized values, scales and zeros"),
    ],
)
def test_wrong_ones_are_told_why(piece: object, words: str) -> None:
    rejected(QUANTIZE, piece, words)


@only_thorough
def test_the_same_quantized_weights_are_read_from_three_formats(capsys: pytest.CaptureFixture[str]) -> None:
    three_packings()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["gptq", "awq", "autoround"]
    assert len({line.split(maxsplit=1)[1] for line in lines}) == 1


@only_thorough
def test_two_bits_are_useless_in_one_group_and_hardly_lossy_in_small_ones() -> None:
    assert loss(rounded(2, 0)).perplexity > 4096  # guessing
    assert loss(rounded(2, 16)).perplexity < 1.5


def test_what_was_measured_once_is_found() -> None:
    assert documented().keys() >= {"bfloat16", "int8", "fp8", "rtn", "gptq", "awq", "autoround"}
    ways, source = on_a_gpu()
    assert ways.keys() >= {"bf16", "fp8", "int8", "int4", "fp8-kv"}
    assert "NVIDIA" in source


def test_what_is_left_of_the_model_is_what_the_lesson_expects() -> None:
    before, after = find_folder("teachlm"), nearest_4_bits()
    left = 100 * size_on_disk(after) / size_on_disk(before)
    told = {"before": told_bytes(before), "after": told_bytes(after)}
    by_hand = 100 * (11.8 * 4.125 / 16 + 2.1) / 13.9
    assert PERCENT_LEFT.compare(by_hand, left, **told).verdict == "right"
    assert "without the scales" in PERCENT_LEFT.compare(25, left, **told).text
    assert "embedding 2.10 MB" in PERCENT_LEFT.compare(by_hand, left, **told).text


@only_thorough
def test_how_much_more_a_real_model_loses_for_the_same_bits() -> None:
    rows, _ = rounded_smollm2()
    nats = {row["bits"]: row["nats"] for row in rows["rounded"] if row["group_size"] == 64}
    ours = {bits: loss(rounded(bits, 64)).divergence for bits in (4, 3, 2)}
    assert [round(nats[bits] / ours[bits]) for bits in (4, 3, 2)] == [82, 62, 7]
    assert loss(rounded(2, 16)).divergence / ours[4] == pytest.approx(34, abs=1)


def test_a_real_model_loses_more_and_less_in_smaller_groups() -> None:
    found, source = rounded_smollm2()
    nats = {(row["bits"], row["group_size"]): row["nats"] for row in found["rounded"]}
    for bits in (4, 3, 2):
        assert nats[bits, 64] < nats[bits, 192] < nats[bits, 0]
    assert found["commit"][:9] in source


def test_the_picture_of_bits_and_loss_has_all_its_numbers() -> None:
    assert bits_per_weight(2, 16) == 3.125
    picture = draw_trade({"a model": {(4, 64): (0.5, 0.1), (4, 16): (0.25, 0.1)}})
    assert "a model, 4 bits: 0.5 in groups of 64, 0.25 in groups of 16" in picture.says
