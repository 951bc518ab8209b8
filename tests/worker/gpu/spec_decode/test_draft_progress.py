"""What a draft model on a GPU is told to catch up with: all that it was not shown, and little else."""

from __future__ import annotations

from teachllm.core.scheduler_output import NewRow, ScheduledRequest
from teachllm.sampling_params import SamplingParams
from teachllm.worker.gpu.spec_decode.draft_progress import Behind, DraftProgress, in_parts

BLOCK_SIZE, MAX_DRAFTS = 4, 2


def scheduled(
    start: int, num_tokens: int, num_next: int, num_drafts: int = 0, blocks: tuple[int, ...] = (), samples: bool = True
) -> ScheduledRequest:
    """A request that has run before, in its first row."""
    found = ScheduledRequest("r", start, num_tokens, [-1] * num_drafts, samples, 0, list(blocks))
    found.num_next_drafts, found.first_new_block = num_next, -(-start // BLOCK_SIZE)
    return found


def begins(
    num_prompt: int, num_next: int, blocks: tuple[int, ...], num_found: int = 0, num_tokens: int | None = None
) -> ScheduledRequest:
    """One that starts, with `num_found` tokens in cached blocks."""
    num_tokens = num_prompt - num_found if num_tokens is None else num_tokens
    found = scheduled(num_found, num_tokens, num_next, blocks=blocks, samples=num_found + num_tokens == num_prompt)
    found.new_row = NewRow(list(range(num_prompt)), num_prompt, SamplingParams(), 0, 0, frozenset(), ())
    found.first_new_block = 0
    return found


def progress() -> DraftProgress:
    return DraftProgress(BLOCK_SIZE, MAX_DRAFTS)


def test_a_prompt_is_computed_once_and_decodes_never() -> None:
    known = progress()
    assert known.note([begins(9, 2, (5, 6, 7), num_tokens=6)], [0]) == [Behind(0, 0, 6)]
    assert known.note([scheduled(6, 3, 2)], [0]) == [Behind(0, 6, 3)]
    assert known.note([scheduled(9, 3, 2, num_drafts=2)], [0]) == []


def test_what_was_said_while_nobody_asked_is_made_up_for() -> None:
    known = progress()
    known.note([begins(9, 0, (5, 6, 7))], [0])
    for start in (9, 10):
        assert known.note([scheduled(start, 1, 0)], [0]) == []
    assert known.note([scheduled(11, 1, 1)], [0]) == [Behind(0, 0, 12)]
    known.note([scheduled(12, 2, 0, num_drafts=1)], [0])  # nobody asks: from here on it is behind again
    ((row, start, num_tokens),) = known.note([scheduled(14, 1, 2)], [0])
    assert row == 0 and start + num_tokens == 15
    assert 12 - 2 * MAX_DRAFTS <= start <= 12  # what two plans had in flight may have fallen


def test_while_anybody_asks_it_follows_whom_it_has_followed_and_nobody_else() -> None:
    known = progress()
    known.note([begins(4, 1, (5,)), begins(4, 0, (6,))], [0, 1])
    for start in range(4, 8):
        assert known.note([scheduled(start, 1, start % 2), scheduled(start, 1, 1 - start % 2)], [0, 1]) == (
            [Behind(1, 0, 5)] if start == 4 else []
        )


def test_a_prompt_that_asks_and_does_not_sample_makes_it_follow_nobody() -> None:
    """No drafts are made behind such a step, and nothing is computed for those who ask for none."""
    known = progress()
    known.note([begins(4, 1, (5,))], [0])
    known.note([scheduled(4, 2, 0, num_drafts=1), begins(8, 1, (6, 7), num_tokens=5)], [0, 1])
    behind = known.note([scheduled(6, 1, 1), scheduled(5, 3, 1)], [0, 1])
    assert [each.row for each in behind] == [0, 1]
    assert behind[1] == Behind(1, 5, 3)


def test_cached_blocks_are_known_to_hold_what_it_computed_or_not() -> None:
    known = progress()
    known.note([begins(9, 0, (1, 2, 3))], [0])  # not asked
    known.close_row(0)
    assert known.note([begins(10, 1, (1, 2, 4), num_found=8)], [0]) == [Behind(0, 0, 10)]
    for start in range(10, 16):
        known.note([scheduled(start, 1, 1)], [0])
    known.close_row(0)
    assert known.note([begins(10, 1, (1, 2, 7), num_found=8)], [0]) == [Behind(0, 8, 2)]
    known.close_row(0)
    known.note([begins(5, 0, (2, 9))], [0])  # the second block is another's now
    known.close_row(0)
    assert known.note([begins(10, 1, (1, 2, 7), num_found=8)], [0]) == [Behind(0, 4, 6)]


def test_what_is_too_much_for_one_pass_is_cut_in_parts() -> None:
    parts = list(in_parts([Behind(0, 3, 4), Behind(2, 0, 9), Behind(1, 5, 1)], room=5))
    assert parts == [[(0, 3, 4), (2, 0, 1)], [(2, 1, 5)], [(2, 6, 3), (1, 5, 1)]]
    assert list(in_parts([], room=5)) == []
