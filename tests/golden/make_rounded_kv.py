"""Compute rounded_kv.json: what transformers generates in float64 if each K and V is quantized and dequantized.

The scales are those that an engine finds for the checkpoint. Run it as `python -m tests.golden.make_rounded_kv` from
the root of the project.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from teachllm_kernels.attention.kv_quantization import dequantize_kv_reference, quantize_kv_reference
from tests.engine.quantized_reference import DTYPES, float64_allowed, scales_of
from tests.engine.reference import GOLDEN, reference
from tests.worker.engines import make_llm, random_ids

FILE = GOLDEN / "rounded_kv.json"
FAMILIES = ["qwen3", "mistral", "llama3", "gemma2"]
PROMPT = random_ids(40)
NUM_TOKENS = 24


def compute(family: str, kv_cache_dtype: str) -> dict[str, Any]:
    """Return the greedy tokens and their log-probabilities, K and V being rounded after the rotation."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    with float64_allowed():
        scales = scales_of(make_llm(family, dtype="float64", kv_cache_dtype=kv_cache_dtype))
    dtype = DTYPES[kv_cache_dtype]

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **options: Any) -> Any:
        group, window = q.shape[1] // k.shape[1], options.get("sliding_window")
        k, v = (
            dequantize_kv_reference(quantize_kv_reference(x.transpose(1, 2), scale, dtype), scale, torch.float64)
            .transpose(1, 2)
            .repeat_interleave(group, dim=1)
            for x, scale in zip((k, v), scales[module.layer_idx], strict=True)
        )
        scores, cap = q @ k.transpose(-1, -2) * scaling, options.get("softcap")
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        unseen = (distance < 0) | (distance >= (window or math.inf))
        weights = scores.masked_fill(unseen, -math.inf).softmax(dim=-1)
        return (weights @ v).transpose(1, 2), None

    AttentionInterface.register("rounded", attend)
    model: Any = AutoModelForCausalLM.from_pretrained(
        reference(family).path, dtype=torch.float64, attn_implementation="rounded"
    ).eval()
    ids, logprobs = list(PROMPT), []
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            scores = model(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(dim=-1)
            ids.append(int(scores.argmax()))
            logprobs.append(round(float(scores.max()), 9))
    return {"token_ids": ids[len(PROMPT) :], "logprobs": logprobs}


if __name__ == "__main__":
    found = {f"{family}, {dtype}": compute(family, dtype) for family in FAMILIES for dtype in DTYPES}
    lines = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in found.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
