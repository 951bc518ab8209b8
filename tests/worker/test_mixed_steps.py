"""Which hidden states a mixed step hands on, whatever is recorded; with a model that returns token numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from teachllm.worker.gpu.cuda_graphs import GraphSizes
from teachllm.worker.gpu.device_step import DeviceStep
from teachllm.worker.gpu.graph_runner import GraphRunner

MAX_NUM_SEQS = 4


def make_runner(recorded: set[int]) -> Any:
    """A runner as far as `mixed` goes; its model's hidden states are the tokens' own numbers."""

    def model(input_ids: torch.Tensor, positions: torch.Tensor, kv_caches: Any, metadata: Any, _: Any) -> torch.Tensor:
        hidden = torch.arange(len(input_ids))[:, None]
        return hidden if metadata.logits_indices is None else hidden[metadata.logits_indices]

    runner: Any = GraphRunner.__new__(GraphRunner)
    nothing = SimpleNamespace(send=lambda *_: None, build=lambda *_: None)
    runner._batch = SimpleNamespace(
        **vars(nothing), input_ids=torch.zeros(64), positions=torch.zeros(64), slot_mapping=torch.zeros(64)
    )
    runner._graphs = SimpleNamespace(
        has=lambda key: key[1] in recorded,
        is_due=lambda key: False,
        replay_pieces=lambda key, metadata: torch.arange(key[1])[:, None],
    )
    runner._backend = SimpleNamespace(in_graphs=True, splits_decodes=False)
    runner._sizes, runner._eager, runner.kv_caches = GraphSizes(MAX_NUM_SEQS, 64), False, []
    runner._drafting = None
    runner.tokens_of = lambda *_: None
    runner._attention = SimpleNamespace(
        metadata=lambda *_, **__: SimpleNamespace(logits_indices=None, last_layer_metadata=None)
    )
    runner.model = model
    return runner


@pytest.mark.parametrize("query_lens", [[1, 1, 13], [1, 1, 1, 13], [1, 1, 1, 12], [1, 15]])
@pytest.mark.parametrize("recorded", [set(), {15, 16}])
def test_the_wanted_tokens_come_back_at_the_limit_of_sequences_too(query_lens: list[int], recorded: set[int]) -> None:
    count = len(query_lens)
    ends = torch.tensor(query_lens).cumsum(0)
    step = DeviceStep(list(range(count)), query_lens, [0] * count, query_lens.count(1), list(range(count)))
    hidden = make_runner(recorded).mixed(step, ends - 1)
    assert hidden.flatten().tolist() == (ends - 1).tolist()
