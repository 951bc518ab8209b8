"""Tables, findable content and what becomes of both when a request lets go."""

from __future__ import annotations

from teachllm.core.block_pool import Block
from teachllm.core.kv_cache_manager import KVCacheManager
from teachllm.core.request import Request
from teachllm.sampling_params import SamplingParams


def make_request(name: str, num_tokens: int, **fields: object) -> Request:
    params = fields.pop("params", SamplingParams())
    return Request(name, list(range(num_tokens)), params, **fields)  # type: ignore[arg-type]


def compute(kv: KVCacheManager, request: Request, step: int = 0) -> list[Block]:
    """Takes hits and blocks for all its tokens and marks them as computed by `step`."""
    hits = kv.match(request)
    assert kv.allocate(request, len(request.token_ids), hits) is not None
    request.num_computed_tokens, request.last_step = len(request.token_ids), step
    kv.commit(request)
    return hits


def free_ids(kv: KVCacheManager) -> list[int]:
    return [block.block_id for block in kv.pool.free_blocks()]


def test_a_table_covers_its_tokens_and_not_a_block_more() -> None:
    kv, request = KVCacheManager(8, 4, True), make_request("a", 9)
    assert kv.allocate(request, 8) == [0, 1]
    assert kv.allocate(request, 8) == []
    assert kv.allocate(request, 9) == [2]
    assert request.block_ids == [0, 1, 2]


def test_too_few_blocks_change_nothing() -> None:
    kv, request = KVCacheManager(2, 4, True), make_request("a", 9)
    assert kv.allocate(request, 9) is None
    assert request.block_ids == []
    assert free_ids(kv) == [0, 1]


def test_hits_that_are_free_count_against_the_free_blocks() -> None:
    kv = KVCacheManager(3, 4, True)
    first = make_request("a", 9)
    compute(kv, first)
    kv.free(first)
    second = make_request("b", 13)
    hits = kv.match(second)
    assert [block.block_id for block in hits] == [0, 1]
    assert kv.num_missing_blocks(second, 13, hits) == 4
    assert kv.allocate(second, 13, hits) is None
    assert kv.allocate(second, 12, hits) == [0, 1, 2]


def test_at_least_the_last_token_is_left_to_compute() -> None:
    kv = KVCacheManager(8, 4, True)
    compute(kv, make_request("a", 8))
    assert len(kv.match(make_request("b", 8))) == 1
    assert len(kv.match(make_request("c", 9))) == 2


def test_a_prefix_ends_at_its_first_missing_block() -> None:
    kv = KVCacheManager(8, 4, True)
    request = make_request("a", 12)
    compute(kv, request)
    kv.cache.remove(kv.pool.blocks[request.block_ids[1]])
    assert len(kv.match(make_request("b", 12))) == 1


def test_only_full_blocks_are_committed() -> None:
    kv, request = KVCacheManager(8, 4, True), make_request("a", 7)
    compute(kv, request)
    assert request.num_committed_blocks == 1 == len(kv.cache)


def test_blocks_that_end_in_drafts_are_not_committed() -> None:
    kv, request = KVCacheManager(8, 4, True), make_request("a", 6)
    kv.allocate(request, 8)
    request.num_computed_tokens = 8  # two of them are guesses
    kv.commit(request)
    assert request.num_committed_blocks == 1 == len(kv.cache)


def launch(kv: KVCacheManager, request: Request, num_tokens: int) -> list[Block]:
    """As `compute`, for a step that is only being planned, as far as `num_tokens`."""
    hits = kv.match(request)
    assert kv.allocate(request, num_tokens, hits) is not None
    request.num_computed_tokens = num_tokens
    kv.commit_later(request)
    return hits


def test_what_a_planned_step_fills_is_hashed_when_somebody_asks_for_it_or_the_step_is_under_way() -> None:
    kv = KVCacheManager(32, 4, True)
    whole, stranger = make_request("a", 17), make_request("b", 17, cache_keys=("other",))
    assert launch(kv, whole, 16) == launch(kv, stranger, 16) == []
    assert len(kv.cache) == 0
    assert len(launch(kv, make_request("c", 11), 11)) == 2  # of "a"; what "b" fills stays unhashed
    assert [whole.num_committed_blocks, stranger.num_committed_blocks] == [4, 0]
    kv.commit_all()
    assert stranger.num_committed_blocks == 4 and len(kv.cache) == 8


def test_a_prefix_goes_on_from_cached_blocks_to_those_of_a_chunk_that_is_only_planned() -> None:
    kv, prompt = KVCacheManager(32, 4, True), make_request("a", 24)
    launch(kv, prompt, 8)
    kv.commit_all()
    kv.allocate(prompt, 20)
    prompt.num_computed_tokens = 20
    kv.commit_later(prompt)
    other = make_request("other", 24)
    other.token_ids[10] = 99  # shares what is cached and nothing of the chunk
    assert len(kv.match(other)) == 2 == len(kv.cache)
    assert len(kv.match(make_request("b", 24))) == 5


def test_a_request_that_leaves_before_its_step_is_under_way_keeps_its_content_findable() -> None:
    kv, request = KVCacheManager(8, 4, True), make_request("a", 9)
    launch(kv, request, 9)
    kv.free(request, until_step=request.last_step)
    assert len(kv.match(make_request("b", 9))) == 2
    kv.retire(request.last_step, failed=True)
    assert kv.match(make_request("c", 9)) == []


def test_the_tail_of_a_freed_table_is_evicted_first() -> None:
    kv, request = KVCacheManager(3, 4, True), make_request("a", 12)
    compute(kv, request)
    kv.free(request)
    assert free_ids(kv) == [2, 1, 0]
    other = make_request("b", 4, cache_keys=("other",))
    kv.allocate(other, 4)
    assert other.block_ids == [2]
    assert len(kv.match(make_request("c", 13))) == 2  # the shorter prefix is still there


def test_freed_content_is_found_until_the_block_is_taken() -> None:
    kv, request = KVCacheManager(2, 4, True), make_request("a", 8)
    compute(kv, request)
    kv.free(request)
    assert len(kv.match(make_request("b", 9))) == 2
    other = make_request("c", 8, cache_keys=("other",))
    kv.allocate(other, 8)
    assert kv.match(make_request("d", 9)) == []
    assert kv.pool.num_cached_blocks == 0


def test_a_request_for_prompt_logprobs_reads_nothing_and_leaves_its_blocks_to_others() -> None:
    kv = KVCacheManager(8, 4, True)
    compute(kv, make_request("a", 8))
    asks = make_request("b", 8, params=SamplingParams(prompt_logprobs=1))
    assert compute(kv, asks) == []
    assert len(kv.cache) == 4


def test_without_prefix_caching_only_a_group_shares() -> None:
    kv = KVCacheManager(8, 4, False)
    compute(kv, make_request("a", 8))
    assert len(kv.cache) == 0
    compute(kv, make_request("b", 8, group="g", cache_keys=("group g",)))
    assert len(kv.match(make_request("c", 8, group="g", cache_keys=("group g",)))) == 1
    assert kv.match(make_request("d", 8)) == []
    assert kv.match(make_request("e", 8, group="h", cache_keys=("group h",))) == []


def test_blocks_stay_pinned_until_the_plan_that_names_them_retires() -> None:
    kv, request = KVCacheManager(2, 4, True), make_request("a", 8)
    compute(kv, request, step=5)
    kv.free(request, until_step=5)
    kv.retire(4)
    assert free_ids(kv) == []
    assert request.block_ids == []
    kv.retire(5)
    assert free_ids(kv) == [1, 0]
    assert not kv.pinned


def test_what_a_failed_plan_was_to_fill_is_not_findable() -> None:
    kv = KVCacheManager(8, 4, True)
    compute(kv, make_request("a", 8), step=1)
    compute(kv, make_request("b", 8, cache_keys=("other",)), step=2)
    kv.retire(1)
    kv.retire(2, failed=True)
    assert len(kv.match(make_request("c", 9))) == 2
    assert kv.match(make_request("d", 9, cache_keys=("other",))) == []
    assert len(kv.cache) == 2


def test_a_reset_forgets_free_blocks_and_no_others() -> None:
    kv = KVCacheManager(8, 4, True)
    done, running = make_request("a", 8), make_request("b", 8, cache_keys=("other",))
    compute(kv, done)
    compute(kv, running)
    kv.free(done)
    kv.reset_prefix_cache()
    assert kv.pool.num_cached_blocks == 0
    assert kv.match(make_request("c", 9)) == []
    assert len(kv.match(make_request("d", 9, cache_keys=("other",)))) == 2


def test_events_tell_what_happened_in_order() -> None:
    kv = KVCacheManager(3, 4, True, root=b"root")
    silent = make_request("silent", 4, cache_keys=("other",))
    compute(kv, silent)
    assert kv.drain_events() == []
    kv.record_events()
    first, second = make_request("a", 5), make_request("b", 5)
    compute(kv, first)
    kv.free(silent)
    compute(kv, second)
    kinds = [(event.kind, event.block_id, event.request_id) for event in kv.drain_events()]
    assert kinds == [
        ("allocate", 1, "a"),
        ("allocate", 2, "a"),
        ("commit", 1, "a"),
        ("free", 0, "silent"),
        ("hit", 1, "b"),
        ("evict", 0, None),
        ("allocate", 0, "b"),
    ]
    assert kv.drain_events() == []


def test_blocks_in_tables_are_used() -> None:
    kv = KVCacheManager(4, 4, True)
    kv.allocate(make_request("a", 12), 12)
    assert kv.num_used_blocks == 3
