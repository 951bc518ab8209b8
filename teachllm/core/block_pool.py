"""Pool the blocks (lesson 02): all KV memory in equal blocks, the free ones in a list, least recently used first.

    used    ref_count > 0, in the block table of that many requests
    cached  ref_count = 0 and has a hash: free, but a request with the same prefix may still claim it
    free    ref_count = 0 and no hash: no request can find its content

Cached and free blocks wait in one doubly linked list. The head is handed out next, so a block's content lives
until the list has turned over once. A prefix hit takes a cached block out of the middle: that is why the list
is linked, and why the links are fields of the blocks.

Source: Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", SOSP 2023.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """Record what happened to a block.

    Attributes:
        kind: "allocate" (a request takes it empty), "hit" (a request shares its content), "commit" (its content
            becomes findable), "evict" (its content is forgotten), "free" (a request lets it go).
        request_id: the request, for allocate, hit, commit and free.
        block_hash, parent_hash: of its content, for commit.
    """

    kind: str
    block_id: int
    request_id: str | None = None
    block_hash: bytes | None = None
    parent_hash: bytes | None = None


class Block:
    """One block of KV memory: its place (`block_id`), its users (`ref_count`), its content (`block_hash`)."""

    __slots__ = ("block_hash", "block_id", "next", "previous", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.previous = self.next = self  # in the free list, while it is free

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, hashed={self.block_hash is not None})"


class BlockPool:
    """`num_blocks` blocks, ids 0 to num_blocks - 1, all free at first."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.num_free_blocks = 0  # in the list, cached ones included
        self.num_cached_blocks = 0
        self._ring = Block(-1)  # the list is a ring through this sentinel: no end is a special case
        for block in self.blocks:
            self._append(block)

    def __len__(self) -> int:
        return len(self.blocks)

    def take(self, count: int) -> list[Block]:
        """Take the `count` least recently used free blocks, with one user each. Evict the hashes that they still carry.

        Raises:
            IndexError: fewer blocks are free.
        """
        if count > self.num_free_blocks:
            raise IndexError(f"{count} blocks are wanted, {self.num_free_blocks} are free")
        blocks = list(islice(self.free_blocks(), count))
        if blocks:  # out of the ring all at once
            first_left = blocks[-1].next
            self._ring.next = first_left
            first_left.previous = self._ring
        for block in blocks:
            block.ref_count = 1
        self.num_free_blocks -= count
        self.num_cached_blocks -= sum(block.block_hash is not None for block in blocks)
        return blocks

    def share(self, block: Block) -> None:
        """Add a user to a block, which leaves the free list if it was there."""
        if block.ref_count == 0:
            self._unlink(block)
        block.ref_count += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Remove one user from each block; unused ones become the free list's most recently used, in this order."""
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count == 0:
                self._append(block)

    def free_blocks(self) -> Iterator[Block]:
        """Yield the free list, from the block that is taken next to the one that is taken last."""
        block = self._ring.next
        while block is not self._ring:
            yield block
            block = block.next

    def _append(self, block: Block) -> None:
        last = self._ring.previous
        block.previous = last
        block.next = self._ring
        last.next = block
        self._ring.previous = block
        self.num_free_blocks += 1
        self.num_cached_blocks += block.block_hash is not None

    def _unlink(self, block: Block) -> None:
        block.previous.next = block.next
        block.next.previous = block.previous
        block.previous = block
        block.next = block
        self.num_free_blocks -= 1
        self.num_cached_blocks -= block.block_hash is not None
