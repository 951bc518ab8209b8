"""The list of splits: every key that is seen is read once, and no launch is too small for it."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from teachllm_kernels.attention import decode_plan
from teachllm_kernels.attention.decode_plan import TILE, DecodeKernel, DecodePlan, decode_shape, max_splits, plan_decode
from tests.kernels.cases import DEVICE, ON_GPU, pairs, per_device

pytestmark = [pytest.mark.gpu] if ON_GPU else []  # natively where there is a GPU, else interpreted
MAX_SEQS = 16


@pairs(
    few=7,
    longest=[0, 70, *per_device([700], [1500, 5000])],  # of sequences of which one may be padding
    num_seqs=[1, 5, MAX_SEQS],
    window=[None, 100],
    num_kv_heads=[1, 8],
    multiprocessors=[2, 10, *per_device([], [128])],
    kernel=get_args(DecodeKernel),
)
def test_every_visible_key_is_in_one_split(
    longest: int,
    num_seqs: int,
    window: int | None,
    num_kv_heads: int,
    multiprocessors: int,
    kernel: DecodeKernel,
) -> None:
    lens = [longest, *(torch.rand(num_seqs - 1).pow(3) * longest).int().tolist()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_plan, "_MULTIPROCESSORS", multiprocessors)
        plan = DecodePlan.allocate(MAX_SEQS, 8, num_kv_heads, 16, DEVICE)
        plan.items.fill_(-77)
        rows = torch.randperm(MAX_SEQS, dtype=torch.int32)[: len(lens)].to(DEVICE)
        starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=DEVICE)
        seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        plan_decode(plan, seq_lens, starts, rows, num_kv_heads, window, kernel)
        bound = max_splits(len(lens), num_kv_heads, decode_shape(len(lens), num_kv_heads, kernel))
    items = plan.items.tolist()[:bound]
    read: dict[int, list[tuple[int, int]]] = {}
    for index, (seq, row, token, begin, end, length, first, num_splits) in enumerate(items):
        if begin == end:
            continue
        assert (row, token, length) == (rows[seq], seq, lens[seq])
        assert first <= index < first + num_splits
        assert all(items[i][0] == seq for i in (first, first + num_splits - 1))
        read.setdefault(seq, []).append((begin, end))
    for seq, length in enumerate(lens):
        seen = length if window is None else min(length, window)
        splits = sorted(read.pop(seq, []))
        edges = [length - seen, *(end for _, end in splits)]
        assert [begin for begin, _ in splits] == edges[:-1]
        assert edges[-1] == length
        sizes = [end - begin for begin, end in splits]
        assert all(size % TILE == 0 and size == sizes[0] for size in sizes[:-1])
    assert not read


def test_the_longest_sequences_come_first_where_there_are_many() -> None:
    lens = [64 * (i * 7 % 31 + 1) for i in range(31)]
    plan = DecodePlan.allocate(31, 8, 8, 16, DEVICE)
    starts = torch.arange(32, dtype=torch.int32, device=DEVICE)
    plan_decode(plan, torch.tensor(lens, dtype=torch.int32, device=DEVICE), starts, starts[:31], 8)
    order = [length for _, _, _, begin, end, length, *_ in plan.items.tolist() if begin < end]
    assert order == sorted(order, reverse=True) and set(order) == set(lens)


def test_the_shapes_of_programs_make_whole_waves() -> None:
    at_once = {num_seqs: decode_shape(num_seqs, 8).at_once for num_seqs in (40, 48, 64, 96, 128, 160, 192)}
    assert at_once == {40: 5, 48: 3, 64: 4, 96: 3, 128: 4, 160: 5, 192: 6}
    for num_seqs in (48, 64, 96, 128, 160, 192):
        assert num_seqs * 8 in (128 * at_once[num_seqs], 2 * 128 * at_once[num_seqs])
