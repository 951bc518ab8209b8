"""A program that draws steps at random, and prints, as JSON, which kernels they launch that no rehearsal has met.

    python tests/worker/gpu/startup/random_steps.py [NAME ...]

Names are of `SETTINGS`; by default all. Run without TRITON_INTERPRET: variants are told apart as Triton does it.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from typing import Any

import torch

from teachllm.config import EngineConfig
from teachllm.models.model_config import load_model_config
from teachllm.worker.gpu.cuda_graphs import GraphSizes
from teachllm.worker.gpu.device_step import DeviceStep
from teachllm.worker.gpu.memory.meta_runner import MetaRunner
from teachllm.worker.gpu.startup.rehearsal import StepRehearsal
from teachllm_kernels.dry_run import dry_run
from teachllm_kernels.gpu_type import GPU_TYPES
from teachllm_kernels.variants import KernelVariants

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "hopper": ("sm_90", {}),
    "ampere": ("sm_80", {}),
    "int4": ("sm_90", {"quantization": "int4"}),
    "fp8": ("sm_90", {"quantization": "fp8"}),
    "few": ("sm_90", {"max_num_seqs": 6, "max_num_batched_tokens": 700}),
    "ngram": ("sm_90", {"speculative_config": {"method": "ngram"}}),
}
NUM_STEPS = 150


def draw(rng: random.Random, sizes: GraphSizes) -> DeviceStep:
    """Draw decodes, which may verify drafts, and prompts, of which some may be chunks that do not sample yet."""
    max_num_seqs, max_num_tokens, most_drafts = sizes.max_num_seqs, sizes.max_num_tokens, sizes.max_drafts
    num_decodes = rng.choice([0, 1, 2, rng.randint(0, max_num_seqs - 1)])
    num_prompts = min(rng.choice([1, 2, rng.randint(1, 40)]), max_num_seqs - num_decodes)
    prompt_lens = [
        rng.choice([rng.randint(1, 40), rng.randint(1, 600), rng.randint(1, 4000)]) for _ in range(num_prompts)
    ]
    drafts = [rng.randint(0, rng.choice([0, most_drafts])) for _ in range(num_decodes)]
    lens = [1 + count for count in drafts] + prompt_lens
    while sum(lens) > max_num_tokens and len(lens) > 1:
        lens.pop()
    lens[-1] = min(lens[-1], max_num_tokens)
    rows, num_decodes = list(range(len(lens))), min(num_decodes, len(lens))
    sampling = rows if rng.random() < 0.6 else rows[:-1]
    starts = [rng.randint(1, 900)] * num_decodes + [
        rng.choice([0, 16, rng.randint(0, 900)]) for _ in rows[num_decodes:]
    ]
    if not most_drafts:
        return DeviceStep(rows, lens, starts, num_decodes, sampling)
    drafts = [*drafts[: len(lens)], *[0] * len(lens)]
    asked = [rng.randint(0, rng.choice([1, most_drafts])) for _ in sampling]
    return DeviceStep(
        rows=rows,
        query_lens=lens,
        starts=starts,
        num_decodes=num_decodes,
        sampling=sampling,
        num_drafts=[drafts[row] for row in sampling] if any(drafts) else [],
        num_next=asked if any(asked) else [],
        decode_len=1 + sizes.drafts(max(drafts)),
        most_next=sizes.drafts(max(asked, default=0)),
    )


def missed(target: str, settings: dict[str, Any]) -> list[str]:
    """Return the names of kernels whose variants were met by no rehearsal."""
    config = EngineConfig(**settings)
    model = load_model_config(config, "cuda")
    config, gpu, rng = replace(config, device="cuda").resolve(model.max_model_len), GPU_TYPES[target], random.Random(1)
    variants = KernelVariants(gpu)
    with dry_run(gpu, variants.add), torch.inference_mode():
        runner = MetaRunner(config, model)
        rehearsal, sizes = StepRehearsal(runner), runner.batch.sizes
        rehearsal.run_all()
        num_known = len(variants.by_key)
        for _ in range(NUM_STEPS):
            rehearsal.run(draw(rng, sizes), ((False, False), (True, True)))
    return [variant.name for variant in list(variants.by_key.values())[num_known:]]


if __name__ == "__main__":
    print(json.dumps({name: missed(*SETTINGS[name]) for name in sys.argv[1:] or SETTINGS}))
