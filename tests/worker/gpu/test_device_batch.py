"""The batch on a device: what a plan becomes there. In Triton's interpreter, natively where there is a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teachllm import SamplingParams
from teachllm.core.scheduler_output import NewRow, ScheduledRequest, SchedulerOutput
from teachllm.worker.gpu.cuda_graphs import GraphSizes
from teachllm.worker.gpu.device_batch import DeviceBatch
from teachllm.worker.gpu.device_step import DeviceStep

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_batch(max_num_seqs: int = 5, max_num_tokens: int = 40) -> DeviceBatch:
    return DeviceBatch(max_num_seqs, 32, 4, max_num_tokens, DEVICE)


def scheduled(
    name: str, start: int, num_tokens: int, samples: bool, blocks: list[int] | None = None, prompt: int = 0
) -> ScheduledRequest:
    """One request's share; with `prompt` it starts now, with that many tokens 100, 101, ..."""
    ids = list(range(100, 100 + prompt))
    new_row = NewRow(ids, prompt, SamplingParams(), 0, 0, frozenset()) if prompt else None
    return ScheduledRequest(name, start, num_tokens, [], samples, start // 4, blocks or [], new_row)


def launch(batch: DeviceBatch, *scheduled_requests: ScheduledRequest) -> DeviceStep:
    for each in scheduled_requests:
        if each.new_row is not None:
            batch.open(each.request_id, each.new_row)
    return batch.prepare(SchedulerOutput(0, list(scheduled_requests)))


def test_a_mixed_step_with_padding() -> None:
    batch = make_batch()
    step = launch(batch, scheduled("a", 0, 6, True, [7, 3], prompt=6))
    batch.send(step, 1, 6)
    batch.build(1)
    batch.append(torch.tensor([55], device=DEVICE))  # what the first step sampled
    first = batch.output
    step = launch(batch, scheduled("a", 6, 1, True), scheduled("b", 0, 5, False, [1, 9], prompt=9))
    assert (step.num_decodes, step.sampling, step.num_tokens, step.is_decode) == (1, [0], 6, False)
    batch.send(step, 3, 9)
    batch.build(3)
    assert batch.header.query_start[:4].tolist() == [0, 1, 6, 9]
    assert batch.input_ids[:9].tolist() == [55, 100, 101, 102, 103, 104, 0, 0, 0]
    assert batch.positions[:9].tolist() == [6, 0, 1, 2, 3, 4, 0, 0, 0]
    assert batch.slot_mapping[:9].tolist() == [3 * 4 + 2, 4, 5, 6, 7, 36, -1, -1, -1]
    assert batch.seq_lens[:3].tolist() == [7, 5, 0]
    assert (
        batch.header.sample_rows[:2].tolist() == [batch.header.rows[0].item(), -1] and batch.header.logit_index[0] == 0
    )
    batch.append(torch.tensor([56], device=DEVICE))
    assert batch.token_ids[batch.header.rows[0], 6:8].tolist() == [55, 56]
    assert (first[0], batch.output[0]) == (55, 56)  # read behind the device's own, which have waited for it


def test_decodes_are_padded_with_sequences_of_one_token_and_no_row() -> None:
    batch = make_batch()
    prompts = (scheduled(name, 0, 2, True, [block], prompt=2) for name, block in (("a", 1), ("b", 2), ("c", 3)))
    batch.send(launch(batch, *prompts), 3, 6)
    batch.send(step := launch(batch, *(scheduled(name, 2, 1, True) for name in "abc")), 4, 4)
    batch.build(4)
    assert step.is_decode and GraphSizes(5, 40).full(step) == (4, 4)
    assert batch.header.query_start[:5].tolist() == [0, 1, 2, 3, 4]
    assert batch.header.rows[3] == batch.header.sample_rows[3] == -1 and batch.slot_mapping[3] == -1


def test_a_request_that_starts_now_is_no_decode_even_with_one_token() -> None:
    batch = make_batch()
    launch(batch, scheduled("a", 0, 2, True, [1], prompt=2))
    # The prefix of "b" is cached but for its last token, perhaps in a block that "a" fills in this step.
    step = launch(batch, scheduled("a", 2, 1, True), scheduled("b", 4, 1, True, [1, 2], prompt=5))
    assert step.num_decodes == 1 and not step.is_decode
    assert GraphSizes(5, 40).full(step) is None
    alone = launch(make_batch(), scheduled("c", 0, 1, True, [1], prompt=1))
    assert alone.num_decodes == 0 and GraphSizes(5, 40).full(alone) == (6, 1)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=9), st.integers(1, 900), st.integers(0, 20))
def test_a_graph_of_prompts_fits_the_buffers_and_has_a_sequence_for_its_padding(
    query_lens: list[int], max_num_tokens: int, more: int
) -> None:
    max_num_seqs = len(query_lens) + more
    step = DeviceStep(list(range(len(query_lens))), query_lens, [0] * len(query_lens), 0, [])
    shape = GraphSizes(max_num_seqs, max_num_tokens).full(step)
    if shape is not None:
        num_seqs, num_tokens = shape
        assert len(query_lens) < num_seqs <= max_num_seqs + 1 and sum(query_lens) <= num_tokens <= max_num_tokens


def test_padding_sequences_without_tokens_have_none() -> None:
    batch = make_batch()
    names = "abcd"
    step = launch(batch, *(scheduled(name, 0, 1, True, [block], prompt=1) for block, name in enumerate(names, 1)))
    assert GraphSizes(8, 40).full(step) == (8, 4)
    batch = make_batch()
    step = launch(batch, scheduled("a", 0, 3, True, [1], prompt=3))
    batch.send(step, 4, 4)
    batch.build(4)
    assert batch.header.query_start[:5].tolist() == [0, 3, 4, 4, 4] and batch.seq_lens[:4].tolist() == [3, 0, 0, 0]
    batch.clear(4, 2)
    assert batch.header.query_start[:5].tolist() == [0, 1, 2, 2, 2]


def test_a_full_batch_has_room_for_padding() -> None:
    batch = make_batch(max_num_seqs=1)
    step = launch(batch, scheduled("a", 0, 3, True, [1], prompt=3))
    shape = GraphSizes(1, 40).full(step)
    assert shape == (2, 4)
    batch.send(step, *shape)
    batch.build(2)
    assert batch.header.rows.tolist() == [0, -1] and batch.header.query_start.tolist() == [0, 3, 4]
    assert batch.slot_mapping[:4].tolist() == [4, 5, 6, -1] and batch.seq_lens.tolist() == [3, 0]
    batch.append(torch.tensor([55, 56], device=DEVICE))
    assert batch.token_ids[0, :4].tolist() == [100, 101, 102, 55] and batch.num_known.tolist() == [4]


def test_new_blocks_go_to_their_rows_and_a_closed_row_is_used_again() -> None:
    batch = make_batch()
    batch.send(
        launch(batch, scheduled("a", 0, 5, False, [4, 8], prompt=9), scheduled("b", 0, 1, True, [2], prompt=1)), 2, 6
    )
    batch.send(launch(batch, scheduled("a", 8, 1, True, [6])), 1, 1)
    assert batch.block_tables[:2, :3].tolist() == [[4, 8, 6], [2, 0, 0]]
    assert batch.close("a") == 0 and batch.close("a") is None
    before = batch.token_ids.clone()
    others = scheduled("c", 0, 2, True, [3], prompt=2), scheduled("d", 0, 7, True, prompt=7)
    batch.send(launch(batch, scheduled("b", 4, 1, True, [5]), *others), 3, 10)
    assert batch.token_ids[0, :2].tolist() == [100, 101] and batch.token_ids[2, :7].tolist() == list(range(100, 107))
    assert batch.num_known.tolist() == [2, 1, 7, 0, 0]
    assert batch.block_tables[:3, :2].tolist() == [[3, 8], [2, 5], [0, 0]]
    before[0, :2], before[2, :7] = torch.tensor([100, 101]), torch.arange(100, 107)
    assert torch.equal(batch.token_ids, before)


def test_what_was_sampled_elsewhere_goes_into_the_rows_of_those_who_still_have_them() -> None:
    batch = make_batch(max_num_seqs=2)
    prompts = launch(batch, scheduled("a", 0, 3, True, [1], prompt=3), scheduled("b", 0, 2, True, [2], prompt=2))
    batch.mark_pending_remote(0, prompts)
    batch.send(prompts, 2, 5)
    row_a, row_b = prompts.rows
    batch.close("b")  # it has ended, and another has its row
    batch.mark_pending_remote(
        1, decode := launch(batch, scheduled("a", 3, 1, False), scheduled("c", 0, 4, True, [3], prompt=4))
    )
    assert decode.rows == [row_a, row_b]
    batch.receive_sampled_tokens(0, [[55], [66]])
    batch.send(decode, 2, 5)
    assert batch.token_ids[:, :6].tolist()[row_a] == [100, 101, 102, 55, 0, 0]
    assert batch.token_ids[:, :6].tolist()[row_b] == [100, 101, 102, 103, 0, 0]
    assert (batch.num_known[row_a], batch.num_known[row_b]) == (4, 4)
    batch.mark_pending_remote(2, third := launch(batch, scheduled("a", 3, 1, True)))
    batch.receive_sampled_tokens(2, [[77]])  # of the step before nothing came: it failed, and was tried again
    batch.send(third, 1, 1)
    assert batch.token_ids[row_a, 3:6].tolist() == [55, 77, 0]
    with pytest.raises(KeyError):
        batch.receive_sampled_tokens(1, [[], [88]])
