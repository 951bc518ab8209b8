"""Equal hash means equal prefix, and nothing else is found."""

from __future__ import annotations

from array import array
from hashlib import sha256

from teachllm.core.block_pool import BlockPool
from teachllm.core.prefix_cache import PrefixCache, hash_block, hash_root
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
