"""What an engine that speculates records at its start, and what it makes of the times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from teachllm.spec_decode.tree import DraftTree
from teachllm.worker.gpu.cuda_graphs import FullKey, GraphSizes
from teachllm.worker.gpu.device_batch import DeviceBatch
from teachllm.worker.gpu.device_step import DeviceStep
from teachllm.worker.gpu.graph_runner import GraphRunner
from teachllm.worker.gpu.known_steps import decode_steps, known_tokens
from teachllm.worker.gpu.spec_decode.capture_ahead import as_prior

CPU = torch.device("cpu")
CHAIN = DraftTree.chain(3)


def batch(num_seqs: int, num_tokens: int, tree: DraftTree = CHAIN, max_len: int = 2048) -> DeviceBatch:
    return DeviceBatch(num_seqs, max_len, 16, num_tokens, CPU, tree)


def test_decodes_of_every_size_with_drafts_where_they_may_pay() -> None:
    sizes = set(decode_steps(batch(96, 1024), is_adaptive=True))
    assert sizes == {(n, k) for n in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96) for k in (0, 1, 2, 3) if n <= 64 or not k}
    assert {k for _, k in decode_steps(batch(96, 1024), is_adaptive=False)} == {0, 3}
    assert (48, 2) in decode_steps(batch(64, 150), is_adaptive=True)
    assert (64, 2) not in decode_steps(batch(64, 150), is_adaptive=True)  # 192 tokens are more than a step has


def test_where_requests_are_short_nothing_is_timed() -> None:
    assert [known_tokens(batch(4, 64, max_len=n)) for n in (4096, 512, 9, 8, 5)] == [1024, 504, 1, 0, 0]


def test_what_was_timed_is_told_in_plain_steps_and_beyond_it_no_more_than_drafts_are_tokens() -> None:
    tree = DraftTree.of([(0,), (1,), (0, 0), (0, 1), (1, 0)])
    seconds = {(1, 0): 4.0, (1, 2): 5.0, (64, 0): 6.0, (64, 2): 12.0, (64, 5): 24.0, (128, 0): 10.0, (256, 0): 20.0}
    prior = as_prior(seconds, 2e-6, batch(256, 4096, tree), [0, 2, 5])
    assert prior.per_token_behind == 2e-6
    assert [prior.ratio(1, k) for k in (0, 1)] == [1.0, 1.25]
    assert [prior.ratio(60, k) for k in (0, 1, 2)] == [1.0, 2.0, 4.0]
    assert [prior.ratio(128, k) for k in (0, 1, 2)] == [1.0, 3.0, 6.0]  # 1 + 2 x 1, and no more than 1 + 5 drafts
    assert prior.ratio(1, 2) == 6.0  # no graph holds it


@pytest.mark.parametrize(("verified", "asked", "padded"), [(0, 3, 3), (3, 0, 3), (1, 2, 2), (2, 2, 2)])
def test_a_graph_has_room_for_what_is_verified_and_what_is_asked_for(verified: int, asked: int, padded: int) -> None:
    drafts, more = [verified] * 2 if verified else [], [asked] * 2 if asked else []
    step = DeviceStep([0, 1], [1 + verified] * 2, [9, 9], 2, [0, 1], drafts, more, 1 + verified, asked)
    assert step.speculates
    runner: Any = GraphRunner.__new__(GraphRunner)
    runner._drafting, runner._backend = SimpleNamespace(reads_step=False), SimpleNamespace(in_graphs=True)
    runner._sizes = GraphSizes(8, 64, max_drafts=3)
    inside, key = runner.full_key(step, (False, False))
    assert (inside.decode_len, inside.most_next) == (1 + padded, padded)
    assert key == FullKey(3, 2 * (1 + padded), 1 + padded, (False, False), padded)
