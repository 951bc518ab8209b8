"""InputBatch: rows that stay with their request, and flat tensors equal to what a loop over tokens would write."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teachllm import SamplingParams
from teachllm.core.scheduler_output import NewRow, ScheduledRequest, SchedulerOutput
from teachllm.worker.cpu.input_batch import InputBatch, StepInputs

MAX_MODEL_LEN = 40
PARAMS = SamplingParams()


def make_batch(max_num_seqs: int = 3, block_size: int = 4) -> InputBatch:
    return InputBatch(max_num_seqs, MAX_MODEL_LEN, block_size, torch.device("cpu"))


def new_row(token_ids: list[int]) -> NewRow:
    return NewRow(token_ids, len(token_ids), PARAMS, child_index=0, seed=0, stop_token_ids=frozenset())


def scheduled(
    name: str,
    start: int,
    num_tokens: int,
    first_new_block: int,
    new_block_ids: list[int],
    drafts: list[int] | None = None,
) -> ScheduledRequest:
    return ScheduledRequest(name, start, num_tokens, drafts or [], True, first_new_block, new_block_ids)


def prepare(batch: InputBatch, *scheduled_requests: ScheduledRequest) -> StepInputs:
    return batch.prepare(SchedulerOutput(0, list(scheduled_requests)))


def test_a_row_is_free_again_when_its_request_is_closed() -> None:
    batch = make_batch(max_num_seqs=2)
    rows = [batch.open(name, new_row([1, 2])) for name in "ab"]
    assert sorted(rows) == [0, 1]
    assert batch.close("a") == rows[0]
    assert batch.open("c", new_row([3])) == rows[0]


def test_closing_a_request_without_a_row_changes_nothing() -> None:
    batch = make_batch(max_num_seqs=1)
    assert batch.close("never opened") is None
    batch.open("a", new_row([1]))
    assert batch.close("a") == 0 and batch.close("a") is None
    batch.open("b", new_row([1]))
    with pytest.raises(IndexError):
        batch.open("c", new_row([1]))  # one row, and it was not freed twice


def test_others_keep_their_rows_when_one_leaves() -> None:
    batch = make_batch()
    rows = {name: batch.open(name, new_row([ord(name)] * 3)) for name in "abc"}
    batch.close("b")
    inputs = prepare(batch, scheduled("c", 0, 3, 0, [5]), scheduled("a", 0, 3, 0, [6]))
    assert inputs.rows == [rows["c"], rows["a"]]
    assert inputs.input_ids.tolist() == [ord("c")] * 3 + [ord("a")] * 3


def test_a_reused_row_shows_nothing_of_its_last_request() -> None:
    batch = make_batch(max_num_seqs=1)
    batch.open("a", new_row(list(range(30))))
    prepare(batch, scheduled("a", 0, 30, 0, [9, 8, 7, 6, 5, 4, 3, 2]))
    batch.close("a")
    batch.open("b", new_row([50, 51, 52, 53, 54]))
    inputs = prepare(batch, scheduled("b", 0, 5, 0, [11, 12]))
    assert inputs.input_ids.tolist() == [50, 51, 52, 53, 54]
    assert inputs.metadata.block_tables.tolist() == [[11, 12]]
    assert inputs.metadata.slot_mapping.tolist() == [44, 45, 46, 47, 48]


def test_every_token_of_a_block_has_a_slot_of_its_own() -> None:
    batch = make_batch()
    batch.open("a", new_row([1, 2, 3, 4, 5, 6]))
    slots = prepare(batch, scheduled("a", 0, 6, 0, [5, 2])).metadata.slot_mapping.tolist()
    assert slots == [20, 21, 22, 23, 8, 9]
    assert slots == batch.slots(0, range(6))


def test_new_blocks_are_written_where_the_plan_says() -> None:
    batch = make_batch()
    batch.open("a", new_row(list(range(10))))
    prepare(batch, scheduled("a", 0, 6, 0, [7, 3]))
    inputs = prepare(batch, scheduled("a", 6, 4, 2, [9]))
    assert inputs.metadata.block_tables.tolist() == [[7, 3, 9]]
    assert inputs.metadata.slot_mapping.tolist() == [14, 15, 36, 37]
    batch.append(0, [90, 91])
    inputs = prepare(batch, scheduled("a", 10, 1, 3, []))
    assert inputs.metadata.block_tables.tolist() == [[7, 3, 9]] and inputs.input_ids.tolist() == [90]


def test_a_plan_made_before_drafts_were_rejected_starts_at_the_last_known_token() -> None:
    batch = make_batch()
    row = batch.open("a", new_row([1, 2, 3, 4]))
    first = prepare(batch, scheduled("a", 3, 4, 0, [5, 6], drafts=[10, 11, 12]))
    assert first.input_ids.tolist() == [4, 10, 11, 12] and first.starts == [3]
    batch.append(row, [10, 20])  # one draft accepted, two rejected
    second = prepare(batch, scheduled("a", 7, 1, 2, []))  # counted on all three
    assert second.starts == [5] and second.input_ids.tolist() == [20] and second.positions.tolist() == [5]
    assert second.metadata.kv_lens == [6]


def test_a_draft_that_was_rejected_is_overwritten() -> None:
    batch = make_batch()
    row = batch.open("a", new_row([1, 2]))
    prepare(batch, scheduled("a", 1, 3, 0, [0], drafts=[30, 31]))
    batch.append(row, [40])
    inputs = prepare(batch, scheduled("a", 2, 2, 1, [], drafts=[50]))
    assert inputs.input_ids.tolist() == [40, 50]


@dataclass
class Sequence:
    """A request as the loop below sees it."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


@given(data=st.data(), block_size=st.sampled_from([1, 3, 4, 16, MAX_MODEL_LEN]))
def test_tensors_equal_a_loop_over_tokens(data: st.DataObject, block_size: int) -> None:
    """Several steps of chunks, decodes and drafts, with requests that come and go."""
    batch = make_batch(4, block_size)
    live: dict[str, Sequence] = {}
    free_blocks = data.draw(st.permutations(range(4 * -(-MAX_MODEL_LEN // block_size))))
    for step in range(data.draw(st.integers(1, 6))):
        for name in [name for name in live if data.draw(st.integers(0, 4)) == 0]:
            free_blocks += live.pop(name).blocks
            batch.close(name)
        if len(live) < 4:
            tokens = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=20))
            live[str(step)] = Sequence(tokens)
            batch.open(str(step), new_row(list(tokens)))
        scheduled_requests, expected = [], []
        for name, sequence in live.items():
            num_uncomputed = len(sequence.tokens) - sequence.computed
            if num_uncomputed == 0 or len(sequence.tokens) > MAX_MODEL_LEN - 4 or data.draw(st.integers(0, 3)) == 0:
                continue
            num_tokens = data.draw(st.integers(1, num_uncomputed))
            drafts = data.draw(st.lists(st.integers(0, 99), max_size=3)) if num_tokens == num_uncomputed else []
            first_new = len(sequence.blocks)
            end = sequence.computed + num_tokens + len(drafts)
            while len(sequence.blocks) * block_size < end:
                sequence.blocks.append(free_blocks.pop())
            entry = scheduled(
                name, sequence.computed, num_tokens + len(drafts), first_new, sequence.blocks[first_new:], drafts
            )
            scheduled_requests.append(entry)
            expected.append((sequence, (sequence.tokens + drafts)[sequence.computed : end], end))
        if not scheduled_requests:
            continue
        inputs = prepare(batch, *scheduled_requests)
        check(inputs, scheduled_requests, expected, block_size)
        for entry, (sequence, _, _), row in zip(scheduled_requests, expected, inputs.rows, strict=True):
            sequence.computed += entry.num_tokens - len(entry.draft_token_ids)
            if sequence.computed == len(sequence.tokens):
                num_accepted = data.draw(st.integers(0, len(entry.draft_token_ids)))
                sampled = [*entry.draft_token_ids[:num_accepted], data.draw(st.integers(0, 99))]
                batch.append(row, sampled)
                sequence.tokens += sampled
                sequence.computed += num_accepted


def check(
    inputs: StepInputs,
    scheduled_requests: list[ScheduledRequest],
    expected: list[tuple[Sequence, list[int], int]],
    block_size: int,
) -> None:
    ids, positions, slots, starts, ends = [], [], [], [0], []
    for entry, (sequence, chunk, end) in zip(scheduled_requests, expected, strict=True):
        for position in range(entry.start, end):
            ids.append(chunk[position - entry.start])
            positions.append(position)
            slots.append(sequence.blocks[position // block_size] * block_size + position % block_size)
        starts.append(len(ids))
        ends.append(end)
    metadata = inputs.metadata
    assert inputs.input_ids.tolist() == ids and inputs.input_ids.dtype == torch.int64
    assert inputs.positions.tolist() == positions and inputs.positions.dtype == torch.int64
    assert metadata.slot_mapping.tolist() == slots and metadata.slot_mapping.dtype == torch.int64
    assert metadata.query_start.tolist() == starts and inputs.query_ends == starts[1:]
    assert metadata.seq_lens.tolist() == metadata.kv_lens == ends
    assert metadata.query_lens == [entry.num_tokens for entry in scheduled_requests]
    assert inputs.starts == [entry.start for entry in scheduled_requests]
    for table, (sequence, _, end) in zip(metadata.block_tables.tolist(), expected, strict=True):
        num_blocks = -(-end // block_size)
        assert table[:num_blocks] == sequence.blocks[:num_blocks]
