"""Ways of an engine through which a drafter must come with the right K and V, and what shows that it went them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from teachllm import EngineConfig, RequestOutput, SamplingParams
from teachllm.engine.llm_engine import Engine
from tests.engine.withheld import withheld
from tests.spec_decode.listening import Listening, listen
from tests.thorough import times
from tests.worker.engines import drain, tokens

NUM_OUTPUT = times(16, 24)
QUESTIONS = [
    "Our team is debating whether to bother with chunked prefill. What are the benefits?",
    "Hello! Who are you, and what can you do for me?",
]
# Of which the model understands nothing, and makes something that no drafter foresees.
NONSENSE = [
    "Betelgeuse, Ganymede and an analemma beside a quasar, and",
    "My father's ryokan on Zanzibar has a funicular that",
]
SCENARIOS: dict[str, dict[str, Any]] = {
    "one chunk": {"max_num_batched_tokens": 512},
    "several chunks": {"max_num_batched_tokens": 9},
    "prefix hits": {"max_num_batched_tokens": 512},
    "preemption": {"num_gpu_blocks_override": 34},
    "running ahead": {"async_scheduling": True, "max_num_batched_tokens": 40},
}
TREE = {"speculative_token_tree": "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1)]"}


def make(speculation: dict[str, Any], depth: int = 1, **settings: Any) -> Engine:
    """An engine that drafts, with blocks of 4."""
    defaults: dict[str, Any] = {"dtype": "float32", "device": "cpu", "block_size": 4, "max_model_len": 256}
    defaults |= {"max_num_seqs": 4, "num_gpu_blocks_override": 300, "check_invariants": True}
    given: Any = {"num_speculative_tokens": 3, "adaptive": False} | speculation
    config = EngineConfig(**(defaults | settings), speculative_config=given)
    return Engine(config, make_executor=withheld(depth))


def prompts_of(engine: Engine) -> list[list[int]]:
    """Two questions and two beginnings, of 18 tokens or more each."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    questions = [tokenizer.apply_chat_template([{"role": "user", "content": each}]) for each in QUESTIONS]
    return [*questions, *map(tokenizer.encode, NONSENSE)]


def answer(engine: Engine, prompts: Sequence[list[int]], num_output: int = NUM_OUTPUT) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
    outputs = [engine.add_request(f"{i}", {"prompt_token_ids": each}, params) for i, each in enumerate(prompts)]
    drain(engine)
    return outputs


def play(scenario: str, speculation: dict[str, Any], prompts: Sequence[list[int]] = (), **settings: Any) -> Listening:
    """What was heard of a drafter in a scenario, which is seen to have come about.

    Args:
        prompts: for a model without a tokenizer; of 18 tokens or more.
    """
    engine = make(speculation, depth=2 if scenario == "running ahead" else 1, **(SCENARIOS[scenario] | settings))
    listening = listen(engine)
    prompts = prompts or prompts_of(engine)
    outputs = answer(engine, prompts)
    if scenario == "several chunks":
        assert all(len(each) >= 2 * 9 for each in prompts)
    if scenario == "preemption":
        assert engine.core.scheduler.num_preemptions > 0
    if scenario == "prefix hits":
        ((first,), (second,)) = tokens(outputs[0]), tokens(outputs[1])
        again = [
            prompts[0],  # all of it, but for what is always computed
            prompts[0][:16] + prompts[2][-6:],  # it goes another way after a full block
            prompts[1][:15] + prompts[3][-6:],  # in the middle of one
            prompts[0] + first + prompts[3][:9],  # what was sampled, and drafted, is found as well
            prompts[1] + second[:13],
        ]
        assert all(each.num_cached_tokens >= 8 for each in answer(engine, again))
    assert all(len(each.outputs[0].token_ids) == NUM_OUTPUT for each in outputs)
    assert engine.core.scheduler.kv.num_used_blocks == 0
    engine.close()
    return listening
