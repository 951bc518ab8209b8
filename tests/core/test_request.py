"""A request knows when its output ends, and how far computed is behind known."""

from __future__ import annotations

import pytest

from teachllm.core.request import FinishReason, Request, Wait, WaitReason
from teachllm.sampling_params import SamplingParams


def make_request(max_len: int = 10, **params: object) -> Request:
    return Request(
        "r",
        [5, 6, 7],
        SamplingParams(**params),  # type: ignore[arg-type]
        eos_token_ids=frozenset([0]),
        max_len=max_len,
    )


def test_outputs_come_after_the_prompt_which_stays_as_it_was() -> None:
    request = make_request()
    assert not request.append(8)
    assert list(request.token_ids) == [5, 6, 7, 8]
    assert request.prompt_token_ids == [5, 6, 7]
    assert request.output_token_ids == [8]
    assert (request.num_prompt_tokens, request.num_output_tokens) == (3, 1)


def test_the_end_of_sequence_ends_it() -> None:
    request = make_request()
    assert request.append(0)
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, None)


def test_a_stop_token_ends_it_and_is_named() -> None:
    request = make_request(stop_token_ids=[4])
    assert request.append(4)
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, 4)


def test_an_ignored_end_of_sequence_does_not_end_it_but_its_own_stop_tokens_do() -> None:
    request = make_request(ignore_eos=True, stop_token_ids=[4])
    assert request.stop_token_ids == {4}
    assert not request.append(0)
    assert request.append(4)


def test_nothing_but_the_length_ends_it_before_min_tokens() -> None:
    request = make_request(max_len=6, min_tokens=3, stop_token_ids=[4])
    assert not request.append(0)
    assert not request.append(4)
    assert request.append(8)
    assert request.finish_reason is FinishReason.LENGTH


def test_the_token_that_reaches_min_tokens_may_end_it() -> None:
    request = make_request(min_tokens=2)
    assert not request.append(0)
    assert request.append(0)


def test_a_stop_at_the_last_possible_token_is_a_stop() -> None:
    request = make_request(max_len=4)
    assert request.append(0)
    assert request.finish_reason is FinishReason.STOP


def test_the_gap_is_known_and_expected_tokens_less_computed_ones() -> None:
    request = make_request()
    assert request.num_uncomputed_tokens == 3
    request.num_computed_tokens = 3
    request.num_in_flight_tokens = 3  # one sampled, two drafts
    assert request.num_expected_tokens == 6
    assert request.num_uncomputed_tokens == 3


def test_a_row_is_a_copy_of_what_the_worker_needs() -> None:
    request = make_request(stop_token_ids=[4], min_tokens=1)
    request.append(8)
    row = request.new_row()
    request.append(9)
    assert list(row.token_ids) == [5, 6, 7, 8]
    assert row.num_prompt_tokens == 3
    assert row.stop_token_ids == {0, 4}
    assert row.sampling_params is request.sampling_params


@pytest.mark.parametrize(
    ("wait", "sentence"),
    [
        (Wait(WaitReason.BEHIND_HEAD), "behind the head of the queue"),
        (Wait(WaitReason.TOKEN_BUDGET, 40, 3), "needs 40 tokens of the step's budget, 3 left"),
        (Wait(WaitReason.TOKEN_BUDGET, 1, 0), "needs 1 token of the step's budget, 0 left"),
        (Wait(WaitReason.NO_FREE_BLOCKS, 1, 0), "needs 1 block, 0 free"),
        (Wait(WaitReason.IN_FLIGHT), "its last token is still being computed"),
        (Wait(WaitReason.NEXT_PLAN), "its turn is in one of the pipeline's next plans"),
        (Wait(WaitReason.SEQUENCE_LIMIT, 9, 8), "8 of 8 requests run already"),
        (Wait(WaitReason.NO_FREE_BLOCKS, 5, 2), "needs 5 blocks, 2 free"),
        (Wait(WaitReason.STATIC_BATCH, 4), "the batch of 4 must drain first"),
        (Wait(WaitReason.PREEMPTED), "preempted: its blocks were taken back"),
    ],
)
def test_every_wait_reason_is_a_sentence_with_its_numbers(wait: Wait, sentence: str) -> None:
    assert str(wait) == sentence


def test_no_wait_reason_is_without_its_sentence_here() -> None:
    assert len(WaitReason) == 8
