"""What fixed workloads launch: each kernel's name and how often, to be compared with a record.

A change of structure that says "behaviour does not change" must launch the same kernels as often as before.
`launches.json` holds the record, per device: on a card from PyTorch's profiler, and without one the Triton kernels that
the interpreted GPU runs. To replace the record of this machine, once a change of kernels is meant:

    PYTHONPATH=.:kernels python -m tests.worker.gpu.launches
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from teachllm import LLM, SamplingParams
from teachllm.simulator.shapes import SHAPES
from tests.spec_decode.drafters import speculation
from tests.worker.engines import drain, random_ids, tiny
from tests.worker.gpu.interpreted_gpu import interpret

RECORD = Path(__file__).with_name("launches.json")
INTERPRETED = "interpreted"
Launches = dict[str, dict[str, int]]  # by case, and there by kernel

_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "decoder_sparse_step": 1}
_SHAPES: dict[str, dict[str, Any]] = {
    "dense": SHAPES["qwen3-0.6b"] | {"num_hidden_layers": 3},
    "experts": SHAPES["qwen3-0.6b"]
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "mlp_only_layers": [],
    }
    | {"norm_topk_prob": True, **_EXPERTS},
    "drafter": SHAPES["qwen3-0.6b"] | {"num_hidden_layers": 1},
}
# Settings of each case beside those of `_on_card`; the shape is the dense one if none is named.
CARD_CASES: dict[str, dict[str, Any]] = {
    "graphs, running ahead": {},
    "one by one": {"enforce_eager": True, "async_scheduling": False},
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8"},
    "int4": {"quantization": "int4"},
    "fp8 KV cache": {"kv_cache_dtype": "fp8"},
    "batch invariant": {"batch_invariant": True},
    "experts": {"shape": "experts"},
    "n-gram drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}},
    "draft model": {
        "speculative_config": {
            "method": "draft_model",
            "model": "drafter",
            "num_speculative_tokens": 3,
            "adaptive": False,
        }
    },
}
INTERPRETED_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "draft model": {"drafts": "draft_model"},
    "eagle, int8 KV cache": {"drafts": "eagle", "kv_cache_dtype": "int8"},
}


def params(seed: int, kind: str, max_tokens: int) -> SamplingParams:
    """Return what the request of this number asks for."""
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "filtered": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        "logprobs": {"temperature": 0.7, "frequency_penalty": 0.3, "logprobs": 2, "logit_bias": {3: 1.5}},
    }
    return SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **kinds[kind])


def run(llm: LLM, prompts: list[list[int]], kind: str, max_tokens: int) -> None:
    """Run prompts of which one arrives every second step, so that decodes meet prompts."""
    for number, prompt in enumerate(prompts):
        llm.engine.add_request(f"{kind} {number}", {"prompt_token_ids": prompt}, params(number, kind, max_tokens))
        llm.engine.step()
        llm.engine.step()
    drain(llm.engine)


def on_card(case: str) -> dict[str, int]:
    """Return what a case launches on this card, once its graphs are recorded."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    settings = dict(CARD_CASES[case])
    with tempfile.TemporaryDirectory() as folder:
        for name, raw in _SHAPES.items():
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        settings["model"] = f"{folder}/{settings.pop('shape', 'dense')}"
        speculative = settings.get("speculative_config", {})
        if "model" in speculative:
            settings["speculative_config"] = speculative | {"model": f"{folder}/{speculative['model']}"}
        more: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda"}
        more |= {"max_model_len": 4096, "num_gpu_blocks_override": 1000, "enable_prefix_caching": False}
        llm = LLM(**more | settings)
    prompts = [random_ids(length, seed=length) for length in (20, 700, 5, 2300)]

    def work() -> None:
        run(llm, prompts[:1], "greedy", 6)
        for kind in ("greedy", "filtered", "logprobs"):
            run(llm, prompts, kind, 5)

    for _ in range(2):  # a graph is recorded on the second occurrence of its key
        work()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    llm.close()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    return dict(sorted(Counter(short(event.name) for event in events).items()))


def short(name: str) -> str:
    """Return a kernel's name without its arguments."""
    if name.startswith("memcpy32_post"):  # by which a graph may copy, as the driver likes
        name = "Memcpy DtoD "
    return name.removeprefix("void ").partition("(")[0][:150]


def interpreted(case: str) -> dict[str, int]:
    """Return what a case launches on the interpreted GPU."""
    from triton.runtime.interpreter import GridExecutor

    settings, found = dict(INTERPRETED_CASES[case]), Counter[str]()
    drafts = settings.pop("drafts", None)
    if drafts is not None:
        settings["speculative_config"] = speculation(drafts, "qwen3", num_speculative_tokens=2, adaptive=False)
    call = GridExecutor.__call__

    def counted(executor: Any, *arguments: Any, **options: Any) -> Any:
        found[executor.fn.__name__] += 1
        return call(executor, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        patch.setattr(GridExecutor, "__call__", counted)
        llm = LLM(**tiny("qwen3", max_num_seqs=2, max_num_batched_tokens=16, num_gpu_blocks_override=20, **settings))
        found.clear()
        prompts = [random_ids(length, seed=length) for length in (3, 20)]
        for kind in ("greedy", "filtered", "logprobs"):
            run(llm, prompts, kind, 3)
        llm.close()
    return dict(sorted(found.items()))


def recorded(device: str) -> Mapping[str, Any]:
    """Return the record of a device, {"torch": version, "cases": Launches}; empty if there is none."""
    found: Mapping[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")).get(device, {})
    return found


def this_device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else INTERPRETED


def main() -> None:
    device = this_device()
    is_card = device != INTERPRETED
    measure, names = (on_card, CARD_CASES) if is_card else (interpreted, INTERPRETED_CASES)
    cases: Launches = {name: measure(name) for name in names}
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    record[device] = {"torch": torch.__version__, "cases": cases}
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORD
    target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
