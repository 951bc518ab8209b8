"""What an engine launches has been foreseen: a rehearsal on the meta device meets every variant of every kernel.

The engine is an interpreted GPU's. A variant is told here as Triton tells it: by the types and the alignment of
arguments, and by the values of constants. Steps of many requests and thousands of tokens are drawn at random instead,
and launch nothing.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime.interpreter import InterpretedFunction

from teachllm import LLM, SamplingParams
from teachllm.spec_decode.load import load_drafter_config
from teachllm.worker.gpu.memory.meta_runner import MetaRunner
from teachllm.worker.gpu.startup.rehearsal import StepRehearsal
from teachllm_kernels.dry_run import dry_run
from teachllm_kernels.gpu_type import GPU_TYPES
from tests.checkpoints import VOCAB_SIZE
from tests.compiled import run_compiled
from tests.spec_decode.drafters import speculation
from tests.thorough import THOROUGH
from tests.worker.engines import tiny
from tests.worker.gpu.interpreted_gpu import interpret
from tests.worker.gpu.startup.random_steps import SETTINGS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted here")
PROMPTS = [[i * 7 % VOCAB_SIZE for i in range(start, start + count)] for start, count in ((0, 20), (3, 5), (40, 33))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.8, max_tokens=4, ignore_eos=True, seed=1),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=3, ignore_eos=True, seed=2),
]
ON_A_CPU = {"_kv_write"}  # in place of what a CPU does without a kernel


def variant_of(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells a launch's variant of a kernel from others."""
    parameters = inspect.signature(function.fn).parameters
    values = dict(zip(parameters, args, strict=False)) | options
    any_value = set(function.kwargs.get("do_not_specialize") or ())
    found: list[Any] = [function.__name__]
    for name, parameter in parameters.items():
        value = values.get(name)
        if "constexpr" in str(parameter.annotation):
            found.append((name, None if name == "PDL" else str(value)))  # an interpreted launch is no Hopper's
        elif isinstance(value, torch.Tensor):
            found.append((name, value.dtype, name in any_value or value.data_ptr() % 16 == 0))
        elif type(value) is int and name not in any_value:
            found.append((name, value == 1, value % 16 == 0))
        else:
            found.append((name, type(value)))
    return tuple(found)


@pytest.mark.parametrize("method", [None, "ngram", "draft_model", "eagle", "medusa"] if THOROUGH else ["ngram"])
def test_every_launch_of_an_engine_was_rehearsed(method: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    settings: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 2 if method else 4}
    if method is not None:
        settings["speculative_config"] = speculation(method, "qwen3", num_speculative_tokens=2, adaptive=False)
    llm = LLM(**tiny(**settings))
    met: set[tuple[Any, ...]] = set()
    launch = InterpretedFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        met.add(variant_of(self, args, options))
        return launch(self, *args, grid=grid, warmup=warmup, **options)

    with monkeypatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", run)
        llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
    runner: Any = llm.engine.core.executor._runner  # type: ignore[attr-defined]
    config, foreseen = llm.engine.config, set()
    model = replace(runner._model_config, device_type="cuda")
    drafter = load_drafter_config(config, model, "cuda")

    def note(function: Any, *args: Any, **options: Any) -> None:
        foreseen.add(variant_of(function, args, options))

    with dry_run(GPU_TYPES["sm_86"], note), torch.inference_mode():
        StepRehearsal(MetaRunner(config, model, drafter)).run_all()
    missed = {variant for variant in met - foreseen if variant[0] not in ON_A_CPU}
    assert not missed
    assert len({name for name, *_ in met}) >= 9


def test_random_steps_launch_nothing_that_was_not_rehearsed() -> None:
    names = list(SETTINGS) if THOROUGH else ["hopper", "few"]
    assert run_compiled(Path(__file__).parent / "random_steps.py", *names) == {name: [] for name in names}
