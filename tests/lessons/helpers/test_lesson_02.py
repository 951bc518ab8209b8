"""Lesson 02: the engine's own pool keeps the contract, wrong ones are told why, and waste is counted as it is."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import pytest

from teachllm.core.block_pool import Block, BlockPool
from teachllm_lessons.helpers.lesson_02 import (
    MYPOOL,
    add_a_dozen,
    memory_map,
    reserved,
    short_and_long,
    two_holes,
    usage_of,
)
from teachllm_lessons.watch import Watch
from tests.lessons.wrong_answers import keeps_contract, rejected
from tests.thorough import only_thorough


class Plain(BlockPool):
    """Right, as hint 3 has it; those below make one mistake each."""

    def take(self, count: int) -> list[Block]:
        if count > self.num_free_blocks:
            raise IndexError(count)
        blocks = list(islice(self.free_blocks(), count))
        for block in blocks:
            self._unlink(block)
            block.ref_count = 1
        return blocks

    def release(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count == 0:
                self._append(block)


class WithoutUsers(Plain):
    def take(self, count: int) -> list[Block]:
        blocks = super().take(count)
        for block in blocks:
            block.ref_count = 0
        return blocks


class StaysInTheList(Plain):
    def take(self, count: int) -> list[Block]:
        blocks = list(islice(self.free_blocks(), count))
        for block in blocks:
            block.ref_count = 1
        return blocks


class GivesWhatThereIs(Plain):
    def take(self, count: int) -> list[Block]:
        return super().take(min(count, self.num_free_blocks))


class RefusesTooLate(Plain):
    def take(self, count: int) -> list[Block]:
        return [block for _ in range(count) for block in self._first()]

    def _first(self) -> list[Block]:
        if not self.num_free_blocks:
            raise IndexError
        return super().take(1)


class FreesWithTheFirst(Plain):
    def release(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_count = 0
            self._append(block)


class ForgetsToFree(Plain):
    def release(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_count -= 1


class LastFirst(Plain):
    def take(self, count: int) -> list[Block]:
        if count > self.num_free_blocks:
            raise IndexError(count)
        blocks = list(self.free_blocks())[::-1][:count]
        for block in blocks:
            self._unlink(block)
            block.ref_count = 1
        return blocks


class GivesIds(Plain):
    def take(self, count: int) -> list[Block]:
        return [block.block_id for block in super().take(count)]  # type: ignore[misc]


def test_the_engines_own_is_right() -> None:
    keeps_contract(MYPOOL, "steps took blocks, all came back")


def test_what_the_last_hint_says_is_right() -> None:
    assert MYPOOL.contract(Plain) > 300


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (WithoutUsers, r"after take\(1\): blocks have \[0\] users \(ref_count\), and should have \[1\]"),
        (StaysInTheList, r"after take\(1\): the free list is \[0\], and should be \[\]"),
        (GivesWhatThereIs, r"take\(1\) gives \[\], and should raise IndexError"),
        (RefusesTooLate, r"after a take of 2 that was refused: blocks have \[1, 1, 1\] users"),
        (FreesWithTheFirst, r"a block of two users, after one release: the other one still reads it"),
        (ForgetsToFree, r"after take\(1\) and release: the free list is \[\], and should be \[0\]"),
        (LastFirst, r"the first blocks of the free list are to be taken"),
        (GivesIds, r"blocks are given, not their ids"),
    ],
)
def test_wrong_ones_are_told_why(piece: object, words: str) -> None:
    rejected(MYPOOL, piece, words)


def test_waste_is_what_one_counts_by_hand() -> None:
    assert (reserved([100], 16), reserved([50], 16)) == (7 * 16, 4 * 16)
    assert reserved([100, 500, 1000], 2048) == 6144
    says = memory_map([100, 500, 1000], 2048, 16).says
    assert says == "slots of 2048: 1,600 of 6,144 used, 74.0% wasted; blocks of 16: 1,600 of 1,632 used, 2.0% wasted"


@only_thorough
def test_b_leaves_a_hole_between_a_and_c() -> None:
    with two_holes() as watch:
        used = [bool(block.users) for block in watch.state.blocks]
    assert used == [*[True] * 6, *[False] * 6, *[True] * 6, *[False] * 6]


@only_thorough
def test_more_run_at_once_in_blocks_than_in_slots() -> None:
    at_once, words = [], []
    for size, count in ((256, 4), (16, 64)):
        settings = {"block_size": size, "num_gpu_blocks_override": count, "enable_prefix_caching": False}
        with Watch(max_model_len=256, **settings) as watch:
            add_a_dozen(watch)
            usage = usage_of(watch)
            at_once.append(max(len(step.lengths) for step in usage))
            words.append(watch.all_tokens)
            assert all(step.used <= step.held <= size * count for step in usage)
            assert all(step.held == reserved(step.lengths, size) for step in usage)
    assert at_once == [4, 12] and words[0] == words[1]


@only_thorough
def test_without_a_fault_both_answers_are_about_what_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    short_and_long()
    short, long = capsys.readouterr().out.splitlines()
    assert "of 14 tokens: 'A KV cache keeps" in short and "which physical block holds" in long
