"""Equal hash means equal prefix, and nothing else is found."""

from __future__ import annotations

from array import array
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teachllm.core.block_pool import BlockPool
from teachllm.core.prefix_cache import PrefixCache, hash_block, hash_root, num_equal_blocks
from teachllm.core.request import Request
from teachllm.sampling_params import SamplingParams
from teachllm_lessons.helpers.lesson_05 import contract_hash_block

ROOT = b"root"


def make_request(token_ids: list[int], cache_keys: tuple[str, ...] = ()) -> Request:
    return Request("r", token_ids, SamplingParams(), cache_keys=cache_keys)


def test_the_hash_is_sha256_over_parent_tokens_as_64_bit_integers_and_keys_with_their_lengths() -> None:
    by_hand = sha256(
        b"parent"
        + (5).to_bytes(8, "little")
        + (300).to_bytes(8, "little")
        + (4).to_bytes(8, "little")
        + b"salt"
        + (2).to_bytes(8, "little")
        + "é".encode()
    )
    assert hash_block(b"parent", array("q", [5, 300]), ("salt", "é")) == by_hand.digest()


def test_the_root_is_the_same_in_every_process() -> None:
    """Each has its own seed for `hash`, so a root that depended on one could not be written down here."""
    assert hash_root("m", 16).hex() == "9b39fb27ddab6d45ddddb828c5c1b921854752dd3f7f5ba36df2d0b2a624ac4a"


def test_a_hash_covers_everything_before_it() -> None:
    hashes = PrefixCache(2, ROOT).hashes
    one, other = hashes(make_request([1, 2, 3, 4]), 2), hashes(make_request([9, 2, 3, 4]), 2)
    assert one[0] != other[0]
    assert one[1] != other[1]  # the same tokens in their own block
    assert one == hashes(make_request([1, 2, 3, 4, 5, 6]), 2)


def test_each_block_is_the_parent_of_the_next_and_the_root_of_the_first() -> None:
    first, second = PrefixCache(2, ROOT).hashes(make_request([1, 2, 3, 4], ("salt",)), 2)
    assert first == hash_block(ROOT, array("q", [1, 2]), ("salt",))
    assert second == hash_block(first, array("q", [3, 4]))


def test_other_roots_and_other_keys_never_meet() -> None:
    tokens = [1, 2, 3, 4]
    chains = [
        PrefixCache(2, root).hashes(make_request(tokens, keys), 2)
        for root in (hash_root("model", "float32"), hash_root("model", "bfloat16"))
        for keys in ((), ("a",), ("b",), ("a", "b"), ("ab",), ("", "ab"))
    ]
    assert len({chain[0] for chain in chains}) == len({chain[1] for chain in chains}) == 12


def test_hashes_grow_with_the_request_and_are_computed_once() -> None:
    cache, request = PrefixCache(2, ROOT), make_request([1, 2, 3])
    first = cache.hashes(request, 1)[0]
    request.token_ids.append(4)
    assert cache.hashes(request, 2) is request.block_hashes
    assert request.block_hashes[0] is first


def test_equal_blocks_live_side_by_side_and_either_answers() -> None:
    pool, cache = BlockPool(2), PrefixCache(2, ROOT)
    one, other = pool.take(2)
    cache.insert(one, b"h")
    cache.insert(other, b"h")
    assert cache.find(b"h") is one
    assert cache.blocks_with(b"h") == [one, other]
    assert len(cache) == 2
    cache.remove(one)
    assert one.block_hash is None
    assert cache.find(b"h") is other
    cache.remove(other)
    cache.remove(other)  # nothing to forget
    assert cache.find(b"h") is None
    assert len(cache) == 0


def test_the_hash_keeps_the_contract_by_which_lesson_05_judges() -> None:
    assert contract_hash_block(hash_block) > 4000


def counting_cache(size: int) -> tuple[PrefixCache, list[int]]:
    """A cache, and the first token of each block that it has hashed."""
    hashed: list[int] = []

    def count(parent: bytes, token_ids: array[int], extra_keys: tuple[str, ...] = ()) -> bytes:
        hashed.append(token_ids[0])
        return hash_block(parent, token_ids, extra_keys)

    return PrefixCache(size, ROOT, count), hashed


def test_what_two_requests_begin_with_is_hashed_once() -> None:
    cache, hashed = counting_cache(2)
    shared = list(range(0, 40))
    cache.hashes(make_request([*shared, 50, 51, 52, 53]), 22)
    assert len(hashed) == 22
    hashed.clear()
    second = cache.hashes(make_request([*shared, 60, 61, 62]), 21)
    assert hashed == [0, 60]
    assert second == PrefixCache(2, ROOT).hashes(make_request([*shared, 60, 61, 62]), 21)
    hashed.clear()
    cache.hashes(make_request(shared[:9]), 4)
    cache.hashes(make_request(shared), 20)  # the last one that began so was shorter
    assert hashed == [0, 0]
    hashed.clear()
    cache.hashes(make_request(shared, ("salt",)), 20)
    assert len(hashed) == 20  # another salt is another beginning


def test_a_chain_of_a_growing_request_goes_on_from_its_own_tokens() -> None:
    cache, _ = counting_cache(2)
    request = make_request([1, 2, 3, 4])
    cache.hashes(request, 2)
    request.token_ids.extend([5, 6])
    twin, other = make_request([1, 2, 3, 4, 5, 6]), make_request([1, 2, 3, 4, 5, 7])
    plain = PrefixCache(2, ROOT)
    assert cache.hashes(request, 3) == cache.hashes(twin, 3) == plain.hashes(make_request([1, 2, 3, 4, 5, 6]), 3)
    assert cache.hashes(other, 3) == plain.hashes(make_request([1, 2, 3, 4, 5, 7]), 3)


def test_beginnings_that_were_not_seen_for_long_are_forgotten() -> None:
    cache, hashed = counting_cache(1)
    for first in range(300):
        cache.hashes(make_request([first, 1000]), 2)
    hashed.clear()
    cache.hashes(make_request([299, 1000]), 2)
    cache.hashes(make_request([0, 1000]), 2)
    assert hashed == [299, 0, 1000]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=12), st.sampled_from(["", "a"])), max_size=8),
    st.integers(1, 3),
)
def test_chains_are_those_of_a_cache_that_remembers_nothing(requests: list[tuple[list[int], str]], size: int) -> None:
    cache = PrefixCache(size, ROOT)
    for token_ids, salt in requests:
        keys = (salt,) if salt else ()
        for num_blocks in range(len(token_ids) // size + 1):
            found = cache.hashes(make_request(token_ids, keys), num_blocks)
            expected = PrefixCache(size, ROOT).hashes(make_request(token_ids, keys), len(token_ids) // size)
            assert found == expected[: len(found)] and len(found) >= num_blocks


@pytest.mark.parametrize("num_equal", range(1, 10))
def test_equal_blocks_are_counted(num_equal: int) -> None:
    one = array("q", range(20))
    other = array("q", [token if token < 2 * num_equal else -1 for token in range(20)])
    assert num_equal_blocks(one, other, 2, 9) == num_equal


def test_prompts_that_share_their_first_block_alone_are_remembered_side_by_side() -> None:
    cache, hashed = counting_cache(2)
    prompts = [[1, 2, *range(100 * i, 100 * i + 40)] for i in range(1, 6)]
    for prompt in prompts[:4]:
        cache.hashes(make_request(prompt), 21)
    hashed.clear()
    for prompt in prompts[:4]:
        cache.hashes(make_request([*prompt, 7, 8]), 22)
    assert hashed == [1, 7] * 4
    cache.hashes(make_request(prompts[4]), 21)  # which takes the place of the oldest
    hashed.clear()
    for prompt in prompts[1:]:
        cache.hashes(make_request(prompt), 21)
    assert hashed == [1] * 4
    cache.hashes(make_request(prompts[0]), 21)
    assert len(hashed) == 4 + 21
