"""What a GPU's host code and kernels do, drafts and trees of them above all, without a GPU: interpreted.

Triton's interpreter takes a second for a step. The usual run has a tiny engine in which much comes together, and one
that records its graphs ahead.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, example, given, settings

from teachllm import LLM, EngineConfig, SamplingParams
from teachllm.core.request import Request
from teachllm.engine.llm_engine import Engine
from teachllm.layers import linear
from teachllm.layers.weights.base import Weight
from teachllm.layers.weights.execution_weights import as_groups
from teachllm.layers.weights.gpu_grouped_weight import GPUGroupedWeight
from teachllm.layers.weights.gpu_scaled_weight import GPUScaledWeight
from teachllm.layers.weights.quantized_weights import GroupedWeight
from teachllm.models.model_config import load_model_config
from teachllm.outputs import RequestOutput
from teachllm.spec_decode.draft_length import FixedLength
from teachllm.spec_decode.draft_model import DraftModel
from teachllm.worker import kv_scales
from teachllm.worker.executor import Executor
from teachllm.worker.gpu import graph_runner
from teachllm.worker.gpu.cuda_graphs import FullKey
from teachllm.worker.gpu.launched_step import LaunchedStep, PendingStep
from teachllm.worker.gpu.spec_decode import gpu_drafting
from teachllm.worker.gpu.spec_decode.gpu_draft_batch import GPUDraftBatch
from teachllm_kernels.linear.scaled import scaled_linear
from teachllm_kernels.speculation.draft_rows import push
from tests.checkpoints import VOCAB_SIZE
from tests.engine.quantized_reference import QuantizedReference, logprobs_of, quantized_reference
from tests.engine.reference import reference
from tests.engine.test_lossless_settings import ANYTHING, check
from tests.engine.test_lossless_settings import PROMPTS as POOL
from tests.kernels.rounding import round_as_a_gpu
from tests.spec_decode.drafters import speculation
from tests.thorough import THOROUGH
from tests.worker.engines import drain, tiny
from tests.worker.gpu import interpreted_gpu
from tests.worker.gpu.interpreted_gpu import InterpretedRunner, interpret
from tests.worker.gpu.test_gpu_model_runner import Recording

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="a GPU runs this itself: tests/worker/gpu/spec_decode/test_gpu_drafting.py"
    ),
]
thorough = pytest.mark.skipif(not THOROUGH, reason="interpreted, it takes long")
TREE = {"speculative_token_tree": "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)]"}
PROMPTS = [[i * 7 % VOCAB_SIZE for i in range(start, start + count)] for start, count in ((0, 20), (3, 5), (40, 33))]


# Short of blocks, ahead, with drafts and a prefix that two have in common.
RICH: dict[str, Any] = {
    "configuration": {
        **{"block_size": 8, "max_num_batched_tokens": 23, "max_num_seqs": 3, "enable_kv_cache": True},
        **{"enable_prefix_caching": True, "enable_chunked_prefill": True, "long_prefill_token_threshold": 0},
        **{"scheduling_policy": "fcfs", "async_scheduling": True},
    },
    "workload": [(POOL[13], 6, 1, 0), (POOL[14], 5, 2, 2), (POOL[3], 6, 1, 2)],
    **{"family": "qwen3", "depth": 2, "spare_blocks": 3, "drafts": "eagle", "num_drafts": 2},
    **{"tree": None, "is_adaptive": False},
}


@thorough
@settings(max_examples=5, phases=[Phase.explicit, Phase.generate])  # smaller failures take too long
@example(**RICH)
@given(**ANYTHING)
def test_settings_do_not_change_greedy_tokens(**drawn: Any) -> None:
    assume(drawn["drafts"] not in ("right", "wrong", "mixed"))  # which only a CPU's executor proposes
    assume(drawn["configuration"]["enable_kv_cache"])
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        check(**drawn)


def test_a_tree_of_drafts_is_sampled_and_verified_as_on_a_cpu_with_a_quantized_cache() -> None:
    """Chunks of prompts beside decodes, filters, penalties, log-probabilities, and a quantized KV cache."""
    settings = {"kv_cache_dtype": "int8", "max_num_batched_tokens": 16, "max_num_seqs": 2, "async_scheduling": True}
    prompts = [PROMPTS[1], PROMPTS[0][:9]]
    params = SamplingParams(temperature=0.9, top_p=0.95, frequency_penalty=0.3, seed=3, max_tokens=3, logprobs=1)
    found = []
    for is_interpreted in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if is_interpreted:
                interpret(patch)
            patch.setattr(kv_scales, "calibration_ids", lambda *_: PROMPTS[1])
            llm = engine("eagle", TREE, **settings)
            found.append(generated(llm, prompts, params))
    (expected, num_held), (outputs, num_held_there) = found
    assert num_held_there == num_held > 0
    for here, there in zip(outputs, expected, strict=True):
        assert here.outputs[0].token_ids == there.outputs[0].token_ids
        assert logprobs_of(here.outputs[0]) == pytest.approx(
            logprobs_of(there.outputs[0]), abs=0.05
        )  # quantized values may flip


@pytest.mark.parametrize("method", ["draft_model", "ngram", "eagle"] if THOROUGH else ["draft_model"])
def test_drafts_proposed_and_verified_in_a_graph_are_those_of_a_cpu(method: str) -> None:
    """The second step of a shape is recorded, the third is the recording: proposals, verdicts and K of what held."""
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    found = []
    for is_interpreted in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if is_interpreted:
                interpret(patch)
            llm = engine(method, {}, num_drafts=1, max_num_seqs=1, max_num_batched_tokens=16)
            (output,), num_held = generated(llm, PROMPTS[1:2], params)
        found.append((output.outputs[0].token_ids, num_held))
    assert found[0] == found[1]
    assert llm.engine.core.executor._runner._graphs._full  # type: ignore[attr-defined]


@thorough
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_settings_do_not_change_greedy_tokens_of_a_quantized_cache(kv_cache_dtype: str) -> None:
    """Up to a quantized value that the order of float32's sums has rounded the other way."""

    @settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
    @example(**RICH | {"drafts": "none"})
    @given(**ANYTHING)
    def run(**drawn: Any) -> None:
        assume(drawn["drafts"] not in ("right", "wrong", "mixed"))
        assume(drawn["configuration"]["enable_kv_cache"])
        judge: Any = quantized_reference(drawn["family"], kv_cache_dtype, 0.05)
        for prompt, *_ in drawn["workload"]:
            judge.alone(tuple(prompt))  # before kernels are interpreted
        with pytest.MonkeyPatch.context() as patch:
            interpret(patch)
            check(**drawn, judge=judge, kv_cache_dtype=kv_cache_dtype)

    run()


def interpret_quantized(patch: pytest.MonkeyPatch) -> None:
    """As `interpret`, and weights are a GPU's quantized weights, multiplied by its kernels."""

    def weight_of(quantized: Any, dtype: torch.dtype, is_gated: bool = False, has_bias: bool = False) -> Weight:
        quantized = as_groups(quantized)
        if isinstance(quantized, GroupedWeight):
            return GPUGroupedWeight(quantized, dtype, is_gated, has_bias)
        return GPUScaledWeight(quantized, dtype)

    def grid(num_rows: int, num_in: int, num_out: int, block_n: int) -> tuple[int, int]:
        return -(-num_out // block_n), 2 if num_rows <= 16 else 1  # one by one, as many as fill a GPU take too long

    interpret(patch)
    round_as_a_gpu(patch)
    patch.setattr(linear, "weight_of", weight_of)
    patch.setattr(scaled_linear, "_grid", grid)


@thorough
@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_graphs_and_running_ahead_equal_eager_bit_for_bit_with_quantized_weights(quantization: str) -> None:
    """And the CPU up to a quantized value that rounds the other way."""
    judge = QuantizedReference(reference("llama2").path, {"quantization": quantization}, 0.02)
    for prompt in PROMPTS[:2]:
        judge.alone(tuple(prompt))  # before kernels are interpreted
    settings = tiny("llama2", quantization=quantization, max_num_seqs=2, max_num_batched_tokens=16)
    recording: list[Recording] = []

    def make(config: EngineConfig, inner: Executor) -> Executor:
        inner.max_in_flight = 2
        recording.append(Recording(inner))
        return recording[0]

    with pytest.MonkeyPatch.context() as patch:
        interpret_quantized(patch)
        engine = Engine(EngineConfig(**settings, async_scheduling=True), make_executor=make)
        for i, prompt in enumerate(PROMPTS[:2]):
            params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=0)
            engine.add_request(str(i), prompt, params)
        outputs = list(drain(engine).values())
        config = EngineConfig(**settings, enforce_eager=True)
        model_config = load_model_config(config, "cpu")
        eager = InterpretedRunner(config.resolve(model_config.max_model_len), model_config, torch.device("cpu"))
        results = [eager.sample(eager.execute(plan)).result() for plan in recording[0].plans]
    assert len(outputs) == 2
    judge.judge_outputs(outputs)
    assert [pending.result() for pending in recording[0].pending] == results
    runner: Any = recording[0].inner._runner  # type: ignore[attr-defined]
    assert runner._graphs._full and not eager._graphs._full
    quantized = [each for each in runner.model.modules() if isinstance(each, GPUGroupedWeight | GPUScaledWeight)]
    assert len(quantized) == 3 * 4 and all(
        (each.input_quantization is None) == (quantization == "int4") for each in quantized
    )


def engine(method: str, more: dict[str, Any], max_num_seqs: int = 4, num_drafts: int = 3, **settings: Any) -> LLM:
    return LLM(
        reference("qwen3").path,
        **{"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "max_model_len": 96},
        **{"max_num_seqs": max_num_seqs, "num_gpu_blocks_override": 40} | settings,
        speculative_config=speculation(method, "qwen3", num_speculative_tokens=num_drafts, adaptive=False, **more),
    )


def sampled(method: str, more: dict[str, Any], params: SamplingParams) -> tuple[list[Any], int]:
    """Tokens and log-probabilities, and how many drafts held."""
    outputs, num_held = generated(engine(method, more), PROMPTS, params)
    return [output.outputs[0] for output in outputs], num_held


def generated(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> tuple[list[RequestOutput], int]:
    """Outputs, and how many drafts held."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    speculated = llm.speculation()
    assert speculated is not None
    return outputs, speculated.stats.num_accepted_tokens


@thorough
@pytest.mark.parametrize(
    ("method", "more"),
    [
        pytest.param(method, more, id=f"{method}-{name}")
        for method in ("draft_model", "medusa", "eagle")
        for name, more in (("chain", {}), ("tree", TREE))
    ],
)
def test_random_tokens_are_those_of_a_cpu(method: str, more: dict[str, Any]) -> None:
    """With the same noise the same drafts are drawn, and verified with the same verdict."""
    params = SamplingParams(temperature=0.9, top_p=0.95, frequency_penalty=0.3, seed=3, max_tokens=12, logprobs=1)
    expected, num_held = sampled(method, more, params)
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        found, num_held_there = sampled(method, more, params)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert num_held_there == num_held > 0
    for ours, theirs in zip(found, expected, strict=True):
        for here, there in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert {i: entry.logprob for i, entry in here.items()} == pytest.approx(
                {i: entry.logprob for i, entry in there.items()}, abs=1e-3
            )


@thorough
def test_a_prefix_that_was_computed_without_drafts_is_caught_up_with() -> None:
    """Its blocks hold K and V of the target alone: what a draft model makes of them would hold no more often."""
    num_held = []
    for is_found in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            interpret(patch)
            llm = engine("draft_model", {})
            for max_tokens in (1, 16) if is_found else (16,):  # the first one ends before there is anything to draft
                params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
                (output,) = llm.generate([{"prompt_token_ids": PROMPTS[2]}], params, use_tqdm=False)
            assert bool(output.num_cached_tokens) == is_found
            speculated = llm.speculation()
            assert speculated is not None
            num_held.append(speculated.stats.num_accepted_tokens)
    assert num_held[0] == num_held[1] > 4


class Ups(FixedLength):
    """Everybody, some and nobody, in turn."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, requests: Sequence[Request], num_tokens: int) -> list[tuple[int, str]]:
        how = self._random.choice(["all", "all", "some", "none"])
        counts = {"all": lambda: 3, "some": lambda: self._random.choice([0, 0, 1, 2, 3]), "none": lambda: 0}[how]
        return [(counts(), how) for _ in requests]


def wrong_at(place: int) -> bool:
    """Whether a draft for this place of a sequence is to be a wrong one."""
    return place * 2654435761 >> 7 & 3 == 0


def push_some_wrong(
    rows: torch.Tensor,
    num_next: torch.Tensor,
    drafted: torch.Tensor,
    token_ids: torch.Tensor,
    num_known: torch.Tensor,
    num_real: torch.Tensor,
    index: int,
) -> None:
    """As `push`."""
    flat = drafted.clone().view(rows.shape[0], -1)
    for i, row in enumerate(rows.tolist()):
        for j in range(flat.shape[1]):
            if row >= 0 and wrong_at(int(num_known[row]) + index + j):
                flat[i, j] = (flat[i, j] + 1) % VOCAB_SIZE
    push(rows, num_next, flat.view_as(drafted), token_ids, num_known, num_real, index)


def assert_same_keys(runner: InterpretedRunner) -> tuple[int, int]:
    """The model drafts for itself: the drafter's K are the model's, of all tokens and blocks that it is said to have.

    Those of the last layer, which depend on all that comes before. Returns how many tokens and blocks that are.
    """
    drafting, batch = runner._drafting, runner._batch
    assert drafting is not None and isinstance(drafting.drafter, DraftModel)
    progress, size = drafting._progress, batch.block_size
    theirs, ours = (caches[-1][0].flatten(0, 1) for caches in (runner._kv_caches, drafting.drafter.kv_caches))
    ends = progress._computed | {row: int(batch.num_known[row]) - 1 for row in progress._in_step}
    slots = [
        int(batch.block_tables[row, place // size]) * size + place % size
        for row, end in ends.items()
        for place in range(end)
    ]
    slots += [block * size + i for block in progress._drafted_blocks for i in range(size)]
    assert torch.allclose(ours[slots], theirs[slots], atol=1e-3)
    return sum(ends.values()), len(progress._drafted_blocks)


@thorough
@pytest.mark.parametrize(
    ("seed", "settings"),
    [(0, {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 8}), (1, {"max_num_batched_tokens": 64})],
    ids=["short of blocks", "all at once"],
)
def test_a_drafter_that_is_asked_now_and_then_misses_nothing(seed: int, settings: dict[str, Any]) -> None:
    checked = [0, 0]
    sample = InterpretedRunner._sample

    def checking(runner: InterpretedRunner, launched: LaunchedStep) -> PendingStep:
        pending = sample(runner, launched)
        for i, count in enumerate(assert_same_keys(runner)):
            checked[i] += count
        return pending

    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        patch.setattr(gpu_drafting, "push", push_some_wrong)
        patch.setattr(InterpretedRunner, "_sample", checking)
        more = {"model": reference("qwen3").path}
        llm = engine("draft_model", more, async_scheduling=True, check_invariants=True, **settings)
        llm.engine.core.scheduler.draft_length = Ups(seed)
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        prompts = [*PROMPTS, PROMPTS[2][:20] + PROMPTS[0]]
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    speculated = llm.speculation()
    assert speculated is not None
    assert 10 < speculated.stats.num_accepted_tokens < speculated.stats.num_draft_tokens
    assert checked[0] > 1000 and checked[1] > 20


@thorough
def test_what_eagle_follows_is_the_path_that_held_and_no_tree() -> None:
    """Tokens of a path are put together to follow them: what a step before had put together is none of a prompt's."""
    prompt, late = PROMPTS[0], [(i * 11 + 5) % VOCAB_SIZE for i in range(60)]
    path = {1, 5, 7}
    (plain,) = engine("ngram", {}).generate(
        [{"prompt_token_ids": prompt}], SamplingParams(max_tokens=20, temperature=0)
    )
    truth = prompt + plain.outputs[0].token_ids
    followed: list[bool] = []
    verified = GPUDraftBatch.verified

    def push_the_path(
        rows: torch.Tensor, num_next: torch.Tensor, drafted: torch.Tensor, token_ids: torch.Tensor, *rest: Any
    ) -> None:
        num_known, num_real, first = rest
        depth = 0 if first < 3 else 1 if first < 6 else 2
        if int(rows[0]) >= 0:
            right = truth[min(int(num_known[0]) + depth, len(truth) - 1)]
            for j in range(drafted.shape[1]):
                drafted[0, j] = right if first + j in path else (right + 1 + j) % VOCAB_SIZE
        push(rows, num_next, drafted, token_ids, num_known, num_real, first)

    def listening(batch: GPUDraftBatch) -> Any:
        found = verified(batch)
        followed.append(batch._step.first_place is not None and found[1][2].tree is None)
        return found

    keys: list[torch.Tensor] = []
    for comes_first in ([], [prompt]):
        with pytest.MonkeyPatch.context() as patch:
            interpret(patch)
            patch.setattr(gpu_drafting, "push", push_the_path)
            patch.setattr(GPUDraftBatch, "verified", listening)
            llm = engine("eagle", TREE, max_num_batched_tokens=32)
            for each in comes_first:  # ends in the middle of a path
                params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[truth[len(prompt) + 4]])
                llm.generate([{"prompt_token_ids": each}], params, use_tqdm=False)
            llm.generate([{"prompt_token_ids": late}], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
            runner: Any = llm.engine.core.executor._runner  # type: ignore[attr-defined]
            table, size = runner._batch.block_tables[0].tolist(), runner._batch.block_size
            cache = runner._drafting.drafter.kv_caches[0][0]
            keys.append(torch.stack([cache[table[i // size], i % size] for i in range(len(late) - 1)]))
    assert torch.equal(*keys)
    assert any(followed)


def test_every_size_of_decodes_is_recorded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    monkeypatch.setattr(InterpretedRunner, "records_ahead", True)
    if not THOROUGH:  # what a graph holds is not run, nor timed
        monkeypatch.setattr(
            interpreted_gpu._Graphs, "capture", lambda self, key, run: not self._full.update({key: run})
        )
        monkeypatch.setattr(graph_runner, "seconds_of", lambda run, batch: 1.0)
        monkeypatch.setattr(graph_runner, "per_token_behind", lambda drafting: 1e-6)
    llm = engine("medusa", {}, max_num_seqs=2, num_drafts=2)
    graphs = llm.engine.core.executor._runner._graphs  # type: ignore[attr-defined]
    recorded, batch = set(graphs._full), llm.engine.core.executor._runner._batch  # type: ignore[attr-defined]
    assert not batch._memory.any()  # what the rows pretended to know is forgotten
    # (sequences, tokens, tokens of a decode, drafts to come): one of padding more where drafts are verified.
    shapes = {
        (1, 1, 1, 0),
        (2, 2, 1, 0),
        (2, 2, 2, 1),
        (3, 4, 2, 1),
        (2, 3, 3, 2),
        (3, 6, 3, 2),
    }
    variants = ((False, False), (True, True))  # random rows without filters take the graphs of those with
    assert recorded == {FullKey(*shape, variant, more) for *shape, more in shapes for variant in variants}
    for prompt, temperature in zip(PROMPTS[:2], (0.0, 1.0), strict=True) if THOROUGH else ():
        params = SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True)
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    later = {key for key in set(graphs._full) - recorded if key.decode_len}  # but for prompts
    assert not later
