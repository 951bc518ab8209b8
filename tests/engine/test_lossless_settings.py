"""No setting that is supposed to be lossless changes a greedy token: random settings, random workloads.

Settings are drawn freely and those that contradict each other are left to EngineConfig to refuse, so a new
combination it allows is tested without anybody listing it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, currently_in_test_context, event, given, settings
from hypothesis import strategies as st

from teachllm.config import EngineConfig
from teachllm.core.in_flight import RequestUpdate
from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from teachllm.engine.llm_engine import Engine
from teachllm.outputs import RequestOutput
from teachllm.sampling_params import SamplingParams
from tests.checkpoints import VOCAB_SIZE
from tests.engine.reference import Reference, reference
from tests.engine.withheld import withheld
from tests.pairwise import pairwise
from tests.spec_decode.drafters import speculation
from tests.thorough import THOROUGH, times

MAX_MODEL_LEN = 96

configurations = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 3, 8, 16, MAX_MODEL_LEN]),
        "max_num_batched_tokens": st.sampled_from([8, 23, 64, MAX_MODEL_LEN, 400]),
        "max_num_seqs": st.sampled_from([1, 3, 8]),
        "enable_kv_cache": st.sampled_from([True, True, True, False]),
        "enable_prefix_caching": st.booleans(),
        "enable_chunked_prefill": st.sampled_from([True, True, False]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 7]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority", "static"]),
        "async_scheduling": st.booleans(),
    }
)


MAX_OUTPUT = 24
TREES = {
    "[(0,), (1,)]": 1,
    "[(0,), (1,), (0, 0), (1, 0), (1, 1)]": 2,
    "[(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (2, 0, 0), (2, 0, 0, 0)]": 4,
}
METHODS = ("ngram", "draft_model", "eagle", "medusa", "custom")


class Halves:
    """A drafter of a learner: now nothing, now too many, now all that was said."""

    def propose(self, token_ids: Sequence[int], num_tokens: int) -> Sequence[int]:
        return token_ids[: len(token_ids) % 7]


def _prompts() -> list[list[int]]:
    """A pool of prompts, many of which begin alike; a pool, so that the reference computes each only once."""
    rng = random.Random(0)
    common = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    shared = [0, 0, 8, 16, 33, 40]
    own = [1, 2, 15, 30]
    return [common[:i] + [rng.randrange(VOCAB_SIZE) for _ in range(j)] for i in shared for j in own]


PROMPTS = _prompts()

# (prompt, output tokens, completions, step of arrival)
Arrival = tuple[list[int], int, int, int]
workloads = st.lists(
    st.tuples(
        st.sampled_from(PROMPTS),
        st.integers(1, MAX_OUTPUT),
        st.sampled_from([1, 1, 1, 2]),
        st.sampled_from([0, 0, 2, 9]),
    ),
    min_size=2,
    max_size=7,
)


def count_accepted(engine: Engine) -> list[int]:
    """Drafts that held from now on."""
    count, update = [0], engine.core.scheduler.update

    def counting(plan: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestUpdate]:
        updates = update(plan, result)
        count[0] += sum(each.num_accepted for each in updates)
        return updates

    engine.core.scheduler.update = counting  # type: ignore[method-assign]
    return count


ANYTHING: dict[str, st.SearchStrategy[Any]] = {
    "configuration": configurations,
    "workload": workloads,
    "family": st.sampled_from(["qwen3", "mistral", "llama2", "gemma2"]),
    "depth": st.integers(1, 3),
    "spare_blocks": st.sampled_from([0, 1, 3, 1000]),
    "drafts": st.sampled_from(["none", "right", "wrong", "mixed", *METHODS, *METHODS]),
    "num_drafts": st.integers(1, 4),
    "tree": st.sampled_from([None, *TREES]),
    "is_adaptive": st.booleans(),
}


@settings(max_examples=times(5, 300))
@given(**ANYTHING)
def test_settings_do_not_change_greedy_tokens(**drawn: Any) -> None:
    check(**drawn)


CASES = pairwise(
    block_size=[1, MAX_MODEL_LEN, 16][: times(2, 3)],
    max_num_batched_tokens=[8, MAX_MODEL_LEN, 23][: times(2, 3)],
    scheduling_policy=["fcfs", "priority", "static"],
    drafts=["none", "mixed", "draft_model"],
    max_num_seqs=[3, 8],
    async_scheduling=[False, True],
    spare_blocks=[0, 1000],
)
COMMON = {"enable_kv_cache": True, "enable_chunked_prefill": True, "long_prefill_token_threshold": 0}
WORKLOAD: list[Arrival] = [
    (PROMPTS[15], 8, 1, 0),
    (PROMPTS[23], 5, 2, 0),
    (PROMPTS[6], 8, 1, 2),
    (PROMPTS[19], 5, 1, 2),
]


@pytest.mark.parametrize("case", random.Random(0).sample(CASES, 200) if THOROUGH else CASES, ids=repr)
def test_no_pair_of_settings_changes_greedy_tokens(case: dict[str, Any]) -> None:
    case = dict(case)
    drafts, spare_blocks = case.pop("drafts"), case.pop("spare_blocks")
    configuration = COMMON | case | {"enable_prefix_caching": case["block_size"] < MAX_MODEL_LEN}
    check(configuration, WORKLOAD, "qwen3", 2, spare_blocks, drafts, 3, None, False)


def check(
    configuration: dict[str, Any],
    workload: list[Arrival],
    family: str,
    depth: int,
    spare_blocks: int,
    drafts: str,
    num_drafts: int,
    tree: str | None,
    is_adaptive: bool,
    judge: Reference | None = None,
    **more: Any,
) -> None:
    """One example of the property; the judge is the family's, if no other is given. `more`: settings."""
    judge = judge or reference(family)
    drafter = None
    if drafts in METHODS:
        given = speculation(drafts, family, num_speculative_tokens=num_drafts, adaptive=is_adaptive)
        if tree is not None and "model" in given:
            given |= {"speculative_token_tree": tree, "num_speculative_tokens": TREES[tree]}
        configuration = configuration | {"speculative_config": given}
        drafter = Halves() if drafts == "custom" else None
    block_size = configuration["block_size"]
    most = max(-(-(len(prompt) + num_tokens) // block_size) for prompt, num_tokens, _, _ in workload)
    try:
        config = EngineConfig(
            model=judge.path,
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            num_gpu_blocks_override=min(most + spare_blocks, 400),
            check_invariants=True,
            **{"device": "cpu", "dtype": "float32"} | configuration | more,
        )
        config.resolve(MAX_MODEL_LEN)
    except ValueError:
        assume(False)
    assume(drafts != "eagle" or family != "gemma2")  # it reads hidden states of our own code alone
    if not config.enable_kv_cache:
        drafts = "none"  # nothing to roll back: every step starts from nothing

    engine: Engine

    rng = random.Random(0)

    def guess(request_id: str, num_outputs: int) -> list[int]:
        """Drafts as the judge would continue, some of them spoilt."""
        request = engine.core.scheduler.requests.get(request_id)
        if request is None or num_outputs == 0:
            return []
        right = judge.greedy(tuple(request.prompt_token_ids), MAX_OUTPUT)[num_outputs:]
        proposed = right[: rng.randint(0, 3)]
        for i in range(len(proposed)):
            if drafts == "wrong" or (drafts == "mixed" and rng.random() < 0.4):
                proposed[i] = (proposed[i] + 1) % VOCAB_SIZE
        return proposed

    guesses = drafts in ("right", "wrong", "mixed")
    engine = Engine(config, make_executor=withheld(depth, guess if guesses else None), drafter=drafter)
    num_accepted = count_accepted(engine)
    arrivals = sorted(enumerate(workload), key=lambda entry: entry[1][3])
    outputs: dict[str, RequestOutput] = {}
    step = 0
    while arrivals or engine.has_unfinished_requests:
        while arrivals and (arrivals[0][1][3] <= step or not engine.has_unfinished_requests):
            index, (prompt, num_tokens, n, _) = arrivals.pop(0)
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, n=n, logprobs=0)
            engine.add_request(str(index), prompt, params, priority=index % 3)
        for output in engine.step():
            outputs[output.request_id] = output
        step += 1
        assert step < 3000, "no progress"
    if currently_in_test_context():  # Hypothesis's
        event(f"preempted: {engine.core.scheduler.num_preemptions > 0}")
        event(f"drafts: {drafts}, some accepted: {num_accepted[0] > 0}")
    assert len(outputs) == len(workload) and all(output.finished for output in outputs.values())
    for index, (_, num_tokens, n, _) in enumerate(workload):
        assert [len(c.token_ids) for c in outputs[str(index)].outputs] == [num_tokens] * n
    judge.judge_outputs(list(outputs.values()))
    assert engine.core.scheduler.kv.num_used_blocks == 0
