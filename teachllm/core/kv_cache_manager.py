"""Manage the block tables (lessons 02 and 05): match prefixes, allocate, commit content, and free.

The token at index i of a sequence lives in slot `block_table[i // block_size] * block_size + i % block_size`.
A table only grows while its request runs. What each block may be doing:

    table of a request   [ shared | shared | shared |  own  |  own  |  spare ]
                           full and hashed: read-only  | written by it alone |

    "own" becomes findable, and from then on read-only, when its last slot is scheduled to be written with a token
    that is known (in every layer KV is written before attention reads it, so a request of the same step may
    already share it). Hashing is put off until that step is under way, or another request begins with the same
    tokens. "spare" was reserved for drafts that were rejected; the next tokens use it.

When a request ends while a plan in flight names it, its blocks stay pinned until that plan, which writes, retires.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from teachllm.core.block_pool import Block, BlockEvent, BlockPool
from teachllm.core.prefix_cache import HashBlock, PrefixCache, hash_block
from teachllm.core.request import Request


class KVCacheManager:
    """Keep the block tables of all requests over one pool.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        enable_prefix_caching: False still shares blocks within a group (`n` completions of one prompt).
        root: digest of what decides the content of every block, see `prefix_cache.hash_root`.
        recomputes_last_hit: a drafter needs hidden states from just before where a request begins to compute.
        make_pool, hash_block: build the pool, and hash a block's content; either may be your own.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        root: bytes = b"",
        recomputes_last_hit: bool = False,
        make_pool: Callable[[int], BlockPool] = BlockPool,
        hash_block: HashBlock = hash_block,
    ) -> None:
        self.block_size = block_size
        self.pool = make_pool(num_blocks)
        self.cache = PrefixCache(block_size, root, hash_block)
        self.pinned: dict[int, list[tuple[str, list[int]]]] = defaultdict(list)  # step -> (request id, blocks)
        self._enable_prefix_caching = enable_prefix_caching
        self._recomputes_last_hit = recomputes_last_hit
        self._committed: dict[int, list[Block]] = defaultdict(list)  # step -> blocks it is to fill
        self._uncommitted: dict[bytes, list[Request]] = {}  # hash of their first block to commit -> requests
        self._events: list[BlockEvent] | None = None

    # -- finding and taking --------------------------------------------------------------------------------

    def looks_up(self, request: Request) -> bool:
        """Return whether a request's prefix is looked for at all."""
        findable = self._enable_prefix_caching or request.group is not None
        return findable and request.sampling_params.prompt_logprobs is None

    def match(self, request: Request) -> list[Block]:
        """Return the longest cached prefix of a request's known tokens. At least the last token is left to compute."""
        if not self.looks_up(request):
            return []
        hits: list[Block] = []
        for i in range((len(request.token_ids) - 1) // self.block_size):
            block_hash = self.cache.hashes(request, i + 1)[i]
            for other in self._uncommitted.pop(block_hash, ()):  # it begins where this one has come to
                self.commit(other)
            block = self.cache.find(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits[:-1] if self._recomputes_last_hit else hits

    def num_missing_blocks(self, request: Request, num_tokens: int, hits: Sequence[Block] = ()) -> int:
        """Return how many blocks leave the free list if the table is to cover `num_tokens` tokens."""
        revived = sum(block.ref_count == 0 for block in hits)
        return max(-(-num_tokens // self.block_size) - len(request.block_ids) - len(hits), 0) + revived

    def allocate(self, request: Request, num_tokens: int, hits: Sequence[Block] = ()) -> list[int] | None:
        """Extend the table, first by `hits`, then by new blocks, to cover `num_tokens` tokens.

        Returns:
            The block ids appended, or None, with nothing changed, if too few blocks are free.
        """
        num_new = -(-num_tokens // self.block_size) - len(request.block_ids) - len(hits)
        if num_new <= 0 and not hits:
            return []  # as for most decodes
        if self.num_missing_blocks(request, num_tokens, hits) > self.pool.num_free_blocks:
            return None
        for block in hits:
            self.pool.share(block)
        self._record("hit", hits, request.request_id)
        taken = self.pool.take(max(num_new, 0))
        self._forget(taken)
        self._record("allocate", taken, request.request_id)
        new_ids = [block.block_id for block in (*hits, *taken)]
        request.block_ids += new_ids
        request.num_committed_blocks += len(hits)
        return new_ids

    # -- content -------------------------------------------------------------------------------------------

    def commit(self, request: Request) -> None:
        """Make findable every block whose tokens are known and computed, or being computed by a plan in flight."""
        first = request.num_committed_blocks
        end = self._num_full_blocks(request)
        if first >= end:
            return
        hashes = self.cache.hashes(request, end)
        for i in range(first, end):
            block = self.pool.blocks[request.block_ids[i]]
            self.cache.insert(block, hashes[i])
            self._committed[request.last_step].append(block)
            self._record("commit", [block], request.request_id, hashes[i], hashes[i - 1] if i else self.cache.root)
        request.num_committed_blocks = end

    def commit_later(self, request: Request) -> None:
        """Commit at the next `commit_all`, or earlier if another request looks up the same content."""
        first = request.num_committed_blocks
        if first < self._num_full_blocks(request):
            block_hash = self.cache.hashes(request, first + 1)[first]
            self._uncommitted.setdefault(block_hash, []).append(request)

    def commit_all(self) -> None:
        """Do now what `commit_later` has put off."""
        put_off = self._uncommitted
        self._uncommitted = {}
        for request in chain.from_iterable(put_off.values()):
            self.commit(request)

    def _num_full_blocks(self, request: Request) -> int:
        """Return how many blocks may be findable: their tokens are known, and computed or being computed."""
        if not self._enable_prefix_caching and request.group is None:
            return 0
        return min(len(request.token_ids), request.num_computed_tokens) // self.block_size

    # -- letting go ----------------------------------------------------------------------------------------

    def free(self, request: Request, until_step: int | None = None) -> None:
        """Empty the table. The blocks stay pinned until `until_step` retires, if a plan in flight names them."""
        self.commit_all()
        if until_step is None:
            self._release(request.request_id, request.block_ids)
        elif request.block_ids:
            self.pinned[until_step].append((request.request_id, request.block_ids))
        request.block_ids = []
        request.num_committed_blocks = 0

    def retire(self, step: int, failed: bool = False) -> None:
        """Free what was pinned for a plan that has come back; if it failed, forget the content that it was to write."""
        filled = self._committed.pop(step, ())
        if failed:
            self._forget(filled)
        for request_id, block_ids in self.pinned.pop(step, ()):
            self._release(request_id, block_ids)

    def reset_prefix_cache(self) -> None:
        """Forget the content of every free block."""
        self._forget(self.pool.free_blocks())

    def _release(self, request_id: str, block_ids: list[int]) -> None:
        # The tail of a sequence goes first in the free list: evicting it leaves the shorter prefix usable.
        blocks = [self.pool.blocks[block_id] for block_id in reversed(block_ids)]
        self.pool.release(blocks)
        self._record("free", blocks, request_id)

    def _forget(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.block_hash is not None:
                self._record("evict", [block])
                self.pool.num_cached_blocks -= block.ref_count == 0
                self.cache.remove(block)

    # -- figures and events --------------------------------------------------------------------------------

    @property
    def num_used_blocks(self) -> int:
        return len(self.pool) - self.pool.num_free_blocks

    def record_events(self) -> None:
        """Start keeping block events for `drain_events`."""
        self._events = []

    def drain_events(self) -> list[BlockEvent]:
        """Return the events since the last call."""
        events = self._events or []
        self._events = self._events and []
        return events

    def _record(self, kind: str, blocks: Sequence[Block], request_id: str | None = None, *hashes: bytes) -> None:
        if self._events is not None:
            self._events += [BlockEvent(kind, block.block_id, request_id, *hashes) for block in blocks]
