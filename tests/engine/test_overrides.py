"""Parts of a running engine that are somebody's own: each is asked in place of the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from teachllm.config import EngineConfig
from teachllm.core.block_pool import Block, BlockPool
from teachllm.core.in_flight import RequestUpdate
from teachllm.core.policy import FirstComeFirstServed
from teachllm.core.prefix_cache import hash_block
from teachllm.core.request import Request
from teachllm.engine.engine_core import EngineCore
from teachllm.engine.llm_engine import Engine
from teachllm.engine.overrides import NO_OVERRIDES, EngineOverrides
from teachllm.layers.attention_backends.reference import ReferenceBackend
from teachllm.sampling.sampler import Sampler, SamplerOutput
from teachllm.sampling_params import SamplingParams
from tests.worker.engines import tiny
from tests.worker.processes.child_threads import cores_in_threads

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13] * 5, [9, 8, 7], [5, 6, 7, 8, 9, 10, 11, 12, 13] * 5]


def run(overrides: EngineOverrides = NO_OVERRIDES, **settings: Any) -> tuple[list[list[int]], list[str]]:
    """Tokens of each prompt, and who began in which order."""
    config = EngineConfig(**tiny(check_invariants=True, max_num_batched_tokens=32, **settings))
    engine, order = Engine(config, overrides=overrides), list[str]()
    try:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        outputs = [
            engine.add_request(str(index), {"prompt_token_ids": ids}, params) for index, ids in enumerate(PROMPTS)
        ]
        while engine.has_unfinished_requests:
            order += [output.request_id for output in engine.step() if output.request_id not in order]
    finally:
        engine.close()
    return [output.outputs[0].token_ids for output in outputs], order


def test_all_of_the_schedulers_pieces_are_asked_and_change_no_token() -> None:
    hashed, taken, cut = [], [], []

    def my_hash(parent: bytes, token_ids: Any, extra_keys: tuple[str, ...] = ()) -> bytes:
        hashed.append(len(token_ids))
        return hash_block(parent, token_ids, extra_keys)

    class MyPool(BlockPool):
        def take(self, count: int) -> list[Block]:
            taken.append(count)
            return super().take(count)

    class LastComeFirst(FirstComeFirstServed):
        def key(self, request: Request) -> tuple[int, ...]:
            return (-request.arrival_index,)

        def chunk(self, request: Request, num_tokens: int) -> int:
            cut.append(min(num_tokens, 8))
            return cut[-1]

    tokens, order = run(EngineOverrides(policy=LastComeFirst(), make_pool=MyPool, hash_block=my_hash))
    assert tokens == run()[0]
    assert order == ["1", "2", "0"]  # the last to come has a long prompt, in chunks of 8
    assert set(hashed) == {16} and sum(taken) > 0 and max(cut) == 8


def test_the_loop_may_be_ones_own() -> None:
    under_way = []

    def two_ahead(core: EngineCore) -> list[RequestUpdate]:
        launched = core.launch()
        under_way.append(core.num_pending)
        return core.collect() if core.num_pending > 2 or (core.num_pending and not launched) else []

    tokens, _ = run(EngineOverrides(turn=two_ahead), async_scheduling=True)
    assert tokens == run()[0]
    assert max(under_way) == 3


def test_attention_and_sampler_may_be_ones_own_on_a_cpu() -> None:
    asked = []

    class MyAttention(ReferenceBackend):
        def attend(self, *given: Any) -> torch.Tensor:
            asked.append("attention")
            return super().attend(*given)

    class Second(Sampler):
        def sample(self, logits: torch.Tensor, rows: list[int], *more: Any) -> SamplerOutput:
            return SamplerOutput(logits.topk(2, dim=-1).indices[:, 1])

    own = run()[0]
    assert run(EngineOverrides(attention=MyAttention()))[0] == own and asked
    assert run(EngineOverrides(make_sampler=Second))[0] != own
    with pytest.raises(ValueError, match="a piece of your own for make_sampler works on a CPU in one process: set dev"):
        run(EngineOverrides(make_sampler=Second), tensor_parallel_size=2)


def test_of_a_core_elsewhere_only_the_choice_of_a_replica_may_be_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cores_in_threads(monkeypatch)
    config = EngineConfig(**tiny(data_parallel_size=2))
    with pytest.raises(ValueError, match=r"hash_block: objects of this process, .* set own_process=False and data_par"):
        Engine(config, overrides=EngineOverrides(hash_block=hash_block))
    asked = []

    def always_the_last(num_waiting: Sequence[int], num_running: Sequence[int]) -> int:
        asked.append(len(num_waiting))
        return len(num_waiting) - 1

    engine = Engine(config, overrides=EngineOverrides(choose_replica=always_the_last))
    try:
        engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=2, ignore_eos=True))
        while engine.has_unfinished_requests:
            engine.step()
    finally:
        engine.close()
    assert asked == [2]
