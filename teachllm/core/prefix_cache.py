"""Cache prefixes (lesson 05): full blocks are findable by a hash of everything that decided their content.

A block's K and V depend on its tokens and on every token before them, so its hash covers its parent's hash, its
token ids, and extra keys (adapter, cache salt). Equal hash means equal prefix, and finding a prefix is walking a
chain of dictionary look-ups. SHA-256, because a collision would answer one user with another one's context.

Requests that begin alike, with a system prompt of thousands of tokens, have their common blocks hashed once: to compare
them takes a fifth of the time. Of requests whose first block is the same, the last four are remembered that are not the
beginning of one another.

Source: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", 2024 (reuse across
requests); the hash chain over fixed blocks is vLLM's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import sha256

from teachllm.core.block_pool import Block
from teachllm.core.request import Request

HASH_VERSION = 1
_MOST_FIRST_BLOCKS, _MOST_OF_EACH = 128, 4  # of requests that are remembered


def hash_block(parent: bytes, token_ids: array[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    """Return the 32-byte hash of a full block.

    Args:
        parent: hash of the block before it, or the cache's root.
        token_ids: its tokens, of typecode "q": 64 bits each.
        extra_keys: what else decided the content. Given for the first block they hold for the whole chain.
    """
    content = parent + token_ids  # as it lies in memory
    for key in extra_keys:  # the length keeps ("ab", "c") apart from ("a", "bc")
        encoded = key.encode()
        content += len(encoded).to_bytes(8, "little") + encoded
    return sha256(content).digest()


HashBlock = Callable[..., bytes]  # as `hash_block`


def hash_root(*facts: object) -> bytes:
    """Return the parent of every first block: a digest of what decides all KV (model, dtype, block size, ...)."""
    return hash_block(b"", array("q", [HASH_VERSION]), tuple(str(fact) for fact in facts))


def num_equal_blocks(one: array[int], other: array[int], size: int, most: int) -> int:
    """Return how many of the first `most` blocks of `size` tokens are equal; the first one is."""
    fewest = most if one[: most * size] == other[: most * size] else 1
    while fewest < most - 1:  # `fewest` are equal, `most` are not
        middle = (fewest + most) // 2
        if one[: middle * size] == other[: middle * size]:
            fewest = middle
        else:
            most = middle
    return fewest


class _Beginnings:
    """Remember requests and the hashes of their blocks, by the hash of their first one; the oldest come first."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._known: dict[bytes, list[tuple[array[int], list[bytes]]]] = {}

    def extend(self, hashes: list[bytes], first: bytes, token_ids: array[int]) -> None:
        """Append the hashes that are known of a request's blocks, `first` at least, and remember the request.

        Args:
            hashes: the request's own list, empty; what it gets later is remembered, too.
        """
        most, best, is_within, kept = len(token_ids) // self._block_size, [first], False, []
        for known_ids, known in self._known.pop(first, []):
            num_equal = num_equal_blocks(token_ids, known_ids, self._block_size, min(len(known), most))
            best = max(best, known[:num_equal], key=len)
            if num_equal < len(known):
                kept.append((known_ids, known))
                is_within |= num_equal == most
        hashes += best
        if not is_within:
            kept.append((token_ids, hashes))
        self._known[first] = kept[-_MOST_OF_EACH:]
        if len(self._known) > _MOST_FIRST_BLOCKS:
            del self._known[next(iter(self._known))]


class PrefixCache:
    """Map hashes to blocks, for all blocks whose content is known, used or not.

    Two requests may compute the same block at once, so several blocks can carry one hash; block tables are
    append-only, so neither is swapped for the other. Any of them answers.
    """

    def __init__(self, block_size: int, root: bytes, hash_block: HashBlock = hash_block) -> None:
        self.block_size = block_size
        self.root = root
        self._hash_block = hash_block
        self._blocks: dict[bytes, dict[int, Block]] = {}
        self._beginnings = _Beginnings(block_size)

    def __len__(self) -> int:
        return sum(map(len, self._blocks.values()))

    def hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """Return the request's block hashes, at least `num_blocks` of them; its tokens must be known that far."""
        hashes = request.block_hashes
        token_ids = request.token_ids
        size = self.block_size
        if not hashes and num_blocks:
            first = self._hash_block(self.root, token_ids[:size], request.cache_keys)
            self._beginnings.extend(hashes, first, token_ids)
        for start in range(len(hashes) * size, num_blocks * size, size):
            hashes.append(self._hash_block(hashes[-1], token_ids[start : start + size]))
        return hashes

    def find(self, block_hash: bytes) -> Block | None:
        """Return a block with this content, the longest known one if there are several."""
        return next(iter(self._blocks.get(block_hash, {}).values()), None)

    def blocks_with(self, block_hash: bytes) -> list[Block]:
        """Return all blocks with this content."""
        return list(self._blocks.get(block_hash, {}).values())

    def insert(self, block: Block, block_hash: bytes) -> None:
        """Make a block findable."""
        block.block_hash = block_hash
        self._blocks.setdefault(block_hash, {})[block.block_id] = block

    def remove(self, block: Block) -> None:
        """Forget a block's content; nothing happens if it has none."""
        if block.block_hash is None:
            return
        same = self._blocks[block.block_hash]
        del same[block.block_id]
        if not same:
            del self._blocks[block.block_hash]
        block.block_hash = None
