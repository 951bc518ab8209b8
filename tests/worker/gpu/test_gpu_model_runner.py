"""The GPU's runner: graphs and running ahead change no bit, float32 gives the CPU's tokens, bfloat16 only near-ties."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import teachllm
from teachllm import LLM, EngineConfig, SamplingParams
from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from teachllm.engine.llm_engine import Engine
from teachllm.layers.attention_backends import triton
from teachllm.models.model_config import load_model_config
from teachllm.worker.executor import Executor
from teachllm.worker.gpu.gpu_model_runner import GPUModelRunner
from teachllm.worker.runner import PendingOutput

pytestmark = pytest.mark.gpu

TEACHLM = str(Path(teachllm.__file__).parent / "assets" / "teachlm")
SETTINGS: dict[str, Any] = {
    "model": TEACHLM,
    "skip_tokenizer_init": True,
    "max_model_len": 400,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 60,  # few enough that some are preempted
}
Workload = list[tuple[list[int], SamplingParams]]


def workload(plain: bool = False) -> Workload:
    """Prompts of one token to several chunks; greedy, random, filtered, penalised and scored requests side by side."""
    rng = random.Random(3)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.0, "seed": 2, "top_p": 0.9, "top_k": 40},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.7, "seed": 5, "presence_penalty": 0.5},
    ]
    made: Workload = []
    for i in range(30):
        kind = kinds[0] if plain else kinds[i % len(kinds)]
        params = SamplingParams(max_tokens=rng.choice([1, 7, 40, 90]), ignore_eos=True, **kind)
        made.append(([rng.randrange(4096) for _ in range(rng.choice([1, 2, 15, 16, 33, 100, 300]))], params))
    return made


class _Kept:
    """A pending output that can be asked for its result again, when its place on the host is long used again."""

    def __init__(self, pending: PendingOutput) -> None:
        self._pending = pending
        self._result: ModelRunnerOutput | None = None

    def result(self) -> ModelRunnerOutput:
        if self._result is None:
            self._result = copy.deepcopy(self._pending.result())
        return self._result


class Recording:
    """An executor that keeps every plan, as it was made, and its result."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.num_blocks, self.max_in_flight = inner.num_blocks, inner.max_in_flight
        self.plans: list[SchedulerOutput] = []
        self.pending: list[PendingOutput] = []

    def execute(self, plan: SchedulerOutput) -> Any:
        self.plans.append(copy.deepcopy(plan))
        return self.inner.execute(plan)

    def sample(self, handle: Any) -> PendingOutput:
        self.pending.append(_Kept(self.inner.sample(handle)))
        return self.pending[-1]

    def close(self) -> None:
        self.inner.close()


def recorded(requests: Workload, **changes: Any) -> tuple[list[SchedulerOutput], list[ModelRunnerOutput]]:
    """The plans that an engine makes for some requests, and their results."""
    recording: list[Recording] = []

    def make(config: EngineConfig, inner: Executor) -> Executor:
        recording.append(Recording(inner))
        return recording[0]

    engine = Engine(
        EngineConfig(**SETTINGS | {"device": "cuda", "check_invariants": True} | changes), make_executor=make
    )
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(str(i), prompt, params)
    while engine.has_unfinished_requests:
        engine.step()
    assert engine.core.scheduler.num_preemptions > 0
    results = [pending.result() for pending in recording[0].pending]
    engine.close()
    return recording[0].plans, results


def replayed(plans: list[SchedulerOutput], num_ahead: int, **changes: Any) -> list[ModelRunnerOutput]:
    """What a fresh runner makes of recorded plans, each result asked for `num_ahead` plans later.

    Unless it is eager, most of them come from recordings of both kinds.
    """
    config = EngineConfig(**SETTINGS | {"device": "cuda"} | changes)
    model_config = load_model_config(config, "cuda")
    runner = GPUModelRunner(config.resolve(model_config.max_model_len), model_config, torch.device("cuda"))
    results: list[ModelRunnerOutput] = []
    pending: list[PendingOutput] = []
    for plan in plans:
        pending.append(runner.sample(runner.execute(copy.deepcopy(plan))))
        if len(pending) > num_ahead:
            results.append(pending.pop(0).result())
    results += [late.result() for late in pending]
    graphs = runner._graphs
    assert bool(graphs._full and graphs._pieces) != config.enforce_eager and not graphs._failed
    return results


@pytest.fixture(params=[True, False], ids=["quick launches", "hopper_prefill"])
def prompts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of prompts beside decodes: the one for as few as there are here, or the one for many."""
    if not request.param:
        monkeypatch.setattr(triton, "SHORT", 0)


@pytest.mark.usefixtures("prompts")
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("plain", [True, False])
def test_graphs_and_running_ahead_equal_eager_bit_for_bit(async_scheduling: bool, plain: bool) -> None:
    plans, made = recorded(workload(plain), async_scheduling=async_scheduling, dtype="bfloat16")
    eager = replayed(plans, 0, enforce_eager=True, dtype="bfloat16")
    assert made == eager
    assert replayed(plans, 0, dtype="bfloat16") == eager
    assert replayed(plans, 1, dtype="bfloat16") == eager


def test_a_worker_in_a_process_of_its_own_gives_the_same_bits() -> None:
    plans, made = recorded(workload(), dtype="bfloat16", distributed_executor_backend="mp")
    assert made == replayed(plans, 0, enforce_eager=True, dtype="bfloat16")


def test_more_ranks_than_gpus_are_refused() -> None:
    count = 1 + torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"need {2 * count} GPUs .* lower tensor_parallel_size"):
        Engine(
            EngineConfig(**SETTINGS | {"device": "cuda", "tensor_parallel_size": 2, "pipeline_parallel_size": count})
        )


def test_large_graphs_equal_eager_bit_for_bit() -> None:
    """Of more rows than Hopper's own products take, and of batches that leave no row to spare."""
    large = {"dtype": "bfloat16", "max_num_seqs": 28, "max_num_batched_tokens": 400, "num_gpu_blocks_override": 105}
    plans, made = recorded(workload() * 2, **large)
    assert (
        sum(sum(scheduled.num_tokens for scheduled in plan.scheduled) == 400 for plan in plans) > 2
    )  # so it is recorded
    assert any(len(plan.scheduled) == 28 for plan in plans)
    eager = replayed(plans, 0, enforce_eager=True, **large)
    assert made == eager and replayed(plans, 1, **large) == eager


def tokens(device: str, dtype: str, requests: Workload, **changes: Any) -> list[list[int]]:
    llm = LLM(**SETTINGS | {"device": device, "dtype": dtype} | changes)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in requests], [params for _, params in requests], use_tqdm=False
    )
    llm.engine.close()
    return [output.outputs[0].token_ids for output in outputs]


def test_float32_tokens_are_the_cpus_whatever_a_request_asks_for() -> None:
    requests = workload()
    assert tokens("cuda", "float32", requests) == tokens("cpu", "float32", requests)


@pytest.mark.usefixtures("prompts")
def test_bfloat16_differs_from_float32_only_where_two_logits_are_within_rounding() -> None:
    from transformers import AutoModelForCausalLM

    requests = workload(plain=True)
    wide = AutoModelForCausalLM.from_pretrained(TEACHLM, dtype=torch.float32).cuda().eval()
    narrow = AutoModelForCausalLM.from_pretrained(TEACHLM, dtype=torch.bfloat16).cuda().eval()
    num_different = 0
    for (prompt, _), made in zip(requests, tokens("cuda", "bfloat16", requests), strict=True):
        ids = torch.tensor([prompt + made], device="cuda")
        with torch.inference_mode():
            logits = wide(ids).logits[0, len(prompt) - 1 : -1]
            rounding = (narrow(ids).logits[0, len(prompt) - 1 : -1].float() - logits).abs().max()
        wrong = (logits.argmax(dim=-1) != ids[0, len(prompt) :]).nonzero().flatten().tolist()
        if wrong:
            num_different += 1
            best = logits[wrong[0]].topk(2).values
            gap = float(logits[wrong[0]].max() - logits[wrong[0], made[wrong[0]]])
            print(f"first difference at output {wrong[0]}: {gap:.4f} below the best, rounding {float(rounding):.4f}")
            assert gap <= 2 * rounding, best
    print(f"{num_different} of {len(requests)} requests differ")


def test_prompt_logprobs_are_the_cpus() -> None:
    requests = [(prompt, SamplingParams(max_tokens=1, prompt_logprobs=1)) for prompt, _ in workload()[:6]]
    scores = []
    for device in ("cpu", "cuda"):
        llm = LLM(**SETTINGS | {"device": device, "dtype": "float32"})
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        outputs = llm.generate(prompts, [params for _, params in requests], use_tqdm=False)
        scores.append(
            [entry.logprob for o in outputs for top in (o.prompt_logprobs or [])[1:] for entry in top.values()]
        )
    assert len(scores[0]) > 100
    assert scores[1] == pytest.approx(scores[0], abs=2e-3)


def test_a_device_that_is_asked_for_nothing_is_the_gpu() -> None:
    llm = LLM(**SETTINGS)
    assert llm.config.device == "cuda" and llm.config.async_scheduling
