"""The pool hands out the least recently used free block, and every move is O(1)."""

from __future__ import annotations

from random import Random

import pytest

from teachllm.core.block_pool import BlockPool
from teachllm_lessons.helpers.lesson_02 import contract_my_pool


def order(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_blocks()]


def test_blocks_are_handed_out_in_order_of_their_release() -> None:
    pool = BlockPool(4)
    first, second, third = pool.take(3)
    assert [first.block_id, second.block_id, third.block_id] == [0, 1, 2]
    pool.release([second])
    pool.release([third, first])
    assert order(pool) == [3, 1, 2, 0]
    assert [block.block_id for block in pool.take(4)] == [3, 1, 2, 0]


def test_a_pool_with_too_few_says_so_and_keeps_them() -> None:
    pool = BlockPool(3)
    pool.take(1)
    with pytest.raises(IndexError, match="3 blocks are wanted, 2 are free"):
        pool.take(3)
    assert order(pool) == [1, 2]
    pool.take(2)
    assert order(pool) == [] == pool.take(0)


def test_sharing_takes_a_block_out_of_the_middle_of_the_list() -> None:
    pool = BlockPool(3)
    pool.share(pool.blocks[1])
    assert order(pool) == [0, 2]
    assert pool.num_free_blocks == 2
    assert pool.blocks[1].ref_count == 1


def test_removal_from_the_middle_touches_two_neighbours_however_long_the_list() -> None:
    pool = BlockPool(1000)
    before = {block: (block.previous, block.next) for block in pool.blocks}
    pool.share(pool.blocks[500])
    changed = [block.block_id for block in pool.blocks if (block.previous, block.next) != before[block]]
    assert changed == [499, 500, 501]


def test_a_block_is_free_only_when_its_last_user_lets_go() -> None:
    pool = BlockPool(2)
    [block] = pool.take(1)
    pool.share(block)
    pool.release([block])
    assert order(pool) == [1]
    pool.release([block])
    assert order(pool) == [1, 0]


def test_free_blocks_that_carry_a_hash_count_as_cached() -> None:
    pool = BlockPool(2)
    [block] = pool.take(1)
    block.block_hash = b"content"
    assert pool.num_cached_blocks == 0
    pool.release([block])
    assert pool.num_cached_blocks == 1
    pool.share(block)
    assert pool.num_cached_blocks == 0


def test_any_order_of_moves_leaves_the_list_that_a_plain_list_would_be() -> None:
    pool, plain, rng = BlockPool(9), list(range(9)), Random(0)
    for _ in range(2000):
        used = [block for block in pool.blocks if block.ref_count]
        if rng.random() < 0.5 and used:
            block = rng.choice(used)
            pool.release([block])
            plain += [block.block_id] if block.ref_count == 0 else []
        elif rng.random() < 0.5 and plain:
            count = rng.randint(0, len(plain))
            assert [block.block_id for block in pool.take(count)] == plain[:count]
            del plain[:count]
        else:
            block = rng.choice(pool.blocks)
            pool.share(block)
            plain = [i for i in plain if i != block.block_id]
        assert order(pool) == plain
        assert pool.num_free_blocks == len(plain)


def test_it_keeps_the_contract_that_readers_of_lesson_02_are_given() -> None:
    assert contract_my_pool(BlockPool) > 300
