"""Sums over ranks that share a device and take turns, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from teachllm_kernels.comm import one_shot_all_reduce as module
from teachllm_kernels.comm.one_shot_all_reduce import NUM_SLOTS, DeferredAllReduce, SymmetricBuffer, one_shot_all_reduce
from teachllm_kernels.rms_norm import rms_norm_quantized_triton, rms_norm_triton
from tests.kernels.cases import DEVICE, FLOATS, ON_GPU, pairs, per_device

pytestmark = [pytest.mark.gpu] if ON_GPU else []
NUM_ROWS, SIZE = per_device(2, 5), 24


def symmetric_buffers(
    num_ranks: int, dtype: torch.dtype, num_rows: int = NUM_ROWS, size: int = SIZE
) -> list[SymmetricBuffer]:
    """Of ranks that share a device, and so its memory."""
    shape = (NUM_SLOTS, num_ranks, num_rows, size)
    boxes = [torch.full(shape, -0.0, dtype=dtype, device=DEVICE) for _ in range(num_ranks)]
    return [SymmetricBuffer(rank, boxes) for rank in range(num_ranks)]


def box_of(symmetric_buffer: SymmetricBuffer) -> torch.Tensor:
    return symmetric_buffer._buffers[symmetric_buffer.rank]


def parts_of(num_ranks: int, num_rows: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Random numbers, of which some are 0.0 and some -0.0."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(num_ranks, num_rows, SIZE, generator=generator)
    wide[torch.rand(wide.shape, generator=generator) < 0.1] = 0.0
    wide[torch.rand(wide.shape, generator=generator) < 0.1] = -0.0
    return list(wide.to(DEVICE, dtype))


def by_all(boxes: Sequence[SymmetricBuffer], parts: Sequence[torch.Tensor], compute: Callable[[int], Any]) -> list[Any]:
    """What each rank computes of its part, one after the other: what those behind it send is put into its buffer
    beforehand, and must be what they send themselves when it is their turn. (Side by side on one device one might wait
    for another whose kernel cannot be loaded before the first one ends.)"""
    results = []
    for rank, symmetric_buffer in enumerate(boxes):
        for row in range(len(parts[0])):
            slot = int(symmetric_buffer._slots[row])
            for behind in range(rank + 1, len(parts)):
                box_of(symmetric_buffer)[slot, behind, row] = parts[behind][row] + 0.0  # which makes 0.0 of -0.0
            for other in boxes[:rank]:
                box_of(other)[slot, rank, row] = torch.nan  # what was put there for this one
        results.append(compute(rank))
        for other in boxes[:rank]:
            for row in range(len(parts[0])):
                slot = (int(other._slots[row]) - 1) % NUM_SLOTS
                assert torch.equal(box_of(other)[slot, rank, row], parts[rank][row])
    return results


@pytest.mark.parametrize("counts", [[2, 1, 2, 1], *per_device([], [[1], [3] * 8])], ids=str)
@pytest.mark.parametrize(
    ("num_ranks", "dtype"),
    per_device([(2, torch.float16), (3, torch.float32)], [(n, d) for n in (2, 3, 4) for d in FLOATS]),
)
def test_all_ranks_get_the_same_sum_again_and_again(num_ranks: int, dtype: torch.dtype, counts: list[int]) -> None:
    boxes = symmetric_buffers(num_ranks, dtype)
    for turn, count in enumerate(counts):
        parts = parts_of(num_ranks, count, dtype, turn)
        got = by_all(boxes, parts, lambda rank, parts=parts: one_shot_all_reduce(parts[rank], boxes[rank]))
        total = torch.zeros(count, SIZE, device=DEVICE)
        for part in parts:
            total = total + part.float()
        for each in got:
            assert torch.equal(each, total.to(dtype))
    for symmetric_buffer in boxes:
        for row in range(NUM_ROWS):
            num_sums = sum(count > row for count in counts)
            for slot in range(NUM_SLOTS):
                is_full = num_sums > 0 and slot == (num_sums - 1) % NUM_SLOTS
                others = [rank for rank in range(num_ranks) if rank != symmetric_buffer.rank]
                place = box_of(symmetric_buffer)[slot, others, row]
                is_empty = (place == 0) & place.signbit()
                assert not is_empty.any() if is_full else is_empty.all()


@pairs(dtype=FLOATS, num_rows=[1, NUM_ROWS])
def test_a_norm_adds_up_what_ranks_have(dtype: torch.dtype, num_rows: int) -> None:
    boxes, parts = symmetric_buffers(2, dtype), parts_of(2, num_rows, dtype, num_rows)
    residual, weight = (torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((num_rows, SIZE), (SIZE,)))
    got = by_all(
        boxes, parts, lambda rank: rms_norm_triton(DeferredAllReduce(parts[rank], boxes[rank]), residual, weight, 1e-6)
    )
    expected = rms_norm_triton(torch.stack(parts).float(), residual, weight, 1e-6)
    for each in got:
        assert torch.equal(each[0], expected[0]) and torch.equal(each[1], expected[1])


def test_a_rank_that_is_ahead_has_room_until_the_others_have_read() -> None:
    _, own = symmetric_buffers(2, torch.float16)
    for turn in range(2 * NUM_SLOTS):
        now, ahead = parts_of(2, 2, torch.float16, turn), parts_of(2, 2, torch.float16, turn + 1)
        for slot, parts in ((turn, now), (turn + 1, ahead)):  # the other rank has sent its part of the next sum, too
            box_of(own)[slot % NUM_SLOTS, 0, :2] = parts[0] + 0.0
        got = one_shot_all_reduce(now[1], own)
        assert torch.equal(got, (now[0].float() + now[1].float()).half())
        assert torch.equal(box_of(own)[(turn + 1) % NUM_SLOTS, 0, :2], ahead[0])


def test_a_norm_that_quantizes_does_so_too() -> None:
    dtype = torch.float16
    boxes, parts = symmetric_buffers(2, dtype), parts_of(2, NUM_ROWS, dtype, 0)
    residual, weight = (
        torch.randn(NUM_ROWS, SIZE, device=DEVICE).to(dtype),
        torch.ones(SIZE, device=DEVICE, dtype=dtype),
    )

    def norm(y: torch.Tensor | DeferredAllReduce) -> tuple[torch.Tensor, ...]:
        (values, scales), x = rms_norm_quantized_triton(y, residual, weight, 1e-6, torch.int8)
        return values, scales, x

    expected = norm(torch.stack(parts).float())
    for got in by_all(boxes, parts, lambda rank: norm(DeferredAllReduce(parts[rank], boxes[rank]))):
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def test_a_mailbox_takes_rows_of_its_own_kind() -> None:
    [symmetric_buffer, _] = symmetric_buffers(2, torch.float16)
    y = torch.zeros(NUM_ROWS, SIZE, dtype=torch.float16, device=DEVICE)
    assert symmetric_buffer.takes(y) and symmetric_buffer.takes(y[:1])
    for other in (y.float(), y[:, 1:], y[None], torch.cat((y, y))):
        assert not symmetric_buffer.takes(other)
    with pytest.raises(AssertionError, match="16 bytes"):
        symmetric_buffers(2, torch.float16, size=20)


def test_cost_counts_what_is_sent() -> None:
    assert module.cost(64, 4096, 2) == (64 * 4096 * 2, 64 * 4096)
    assert module.cost(1, 10, 4, 4) == (120, 30)
