"""Rehearse all steps that an engine may meet on the meta device, to learn which kernels they launch.

The code that runs is a GPU's own (`GraphRunner`, `GPUSampling`), in a dry run: each launch is noted as the variant of a
kernel that has to be compiled for it. A model of few layers is enough, see `meta_model.py`, so this takes about a
second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from teachllm.config import EngineConfig
from teachllm.models.model_config import ModelConfig
from teachllm.spec_decode.load import DrafterConfig
from teachllm.worker.gpu.device_batch import DeviceBatch
from teachllm.worker.gpu.device_step import DeviceStep
from teachllm.worker.gpu.known_steps import VARIANTS, decode_steps, mixed_sizes, prompt_steps
from teachllm.worker.gpu.memory.meta_runner import MetaRunner
from teachllm.worker.gpu.spec_decode.draft_progress import Behind
from teachllm_kernels.dry_run import dry_run
from teachllm_kernels.gpu_type import GPUType
from teachllm_kernels.variants import KernelVariants

_MOST_PROMPTS = 4  # of a mixed step: what lies behind so many is aligned in every way
_ALL_VARIANTS = ((False, False), (True, False), (True, True))  # of the sampler, without drafts


def known_variants(
    config: EngineConfig, model: ModelConfig, gpu: GPUType, drafter: DrafterConfig | None = None
) -> KernelVariants:
    """Return the variants of kernels that an engine may launch on a GPU of a type.

    Args:
        config: resolved for this model.
        model: one rank's part of it, if there are several.
    """
    variants = KernelVariants(gpu)
    with dry_run(gpu, variants.add), torch.inference_mode():
        runner = MetaRunner(config, model, drafter)
        rehearse(runner, config)
    return variants


def rehearse(runner: MetaRunner, config: EngineConfig) -> None:
    """Run steps of each kind, as `GPUModelRunner` would execute, sample and draft for them."""
    sampled = _ALL_VARIANTS if config.speculative_config is None else VARIANTS
    decodes = decode_steps(runner.batch, is_adaptive=True).values()  # near its end, any request drafts less
    for step in [*decodes, *prompt_steps(runner.batch.sizes)]:
        for variant in sampled:
            held = runner.graph_runner.full_key(step, variant)
            if held is not None:
                runner.graph_runner.full(*held, behind=[])
    for step in mixed_steps(runner.batch):
        _run_mixed(runner, step, sampled)


def _run_mixed(runner: MetaRunner, step: DeviceStep, sampled: Sequence[tuple[bool, bool]]) -> None:
    """Run a step that no graph holds, once, and sample from it in several ways."""
    graph_runner, drafting = runner.graph_runner, runner.drafting
    indices = runner.batch.header.logit_index[: step.num_logits]
    reads_all = drafting is not None and drafting.drafter is not None and drafting.drafter.reads_all_hidden
    hidden = graph_runner.mixed(step, None if reads_all else indices)
    if runner.columns is None:
        return
    chosen = hidden.index_select(0, indices) if reads_all else hidden
    logits = runner.model.logits(chosen, sharded=True, in_float32=False)
    tokens = graph_runner.tokens_of(step, *graph_runner.mixed_shape(step))
    behind = [Behind(row, 0, step.num_tokens // len(step.rows)) for row in step.rows]
    for variant in sampled:
        runner.sampling.plain(logits, len(step.sampling), variant, verifies=bool(step.num_drafts))
        if drafting is not None:
            drafting.propose(step, tokens, behind, variant[0], hidden=hidden if reads_all else chosen)


def mixed_steps(batch: DeviceBatch) -> Iterator[DeviceStep]:
    """Yield mixed steps: of each padded size, and long ones; prompts alone, and beside decodes that verify drafts."""
    sizes = batch.sizes
    yield from (step for num_tokens in mixed_sizes(sizes) for step in _of_tokens(num_tokens, batch))
    size = 2 * sizes.largest_mixed
    while size <= sizes.max_num_tokens:
        for num_tokens in (size - 1, size, size + 1, size + 16):  # kernels for multiples of 16 are their own
            if num_tokens <= sizes.max_num_tokens:
                yield from _of_tokens(num_tokens, batch)
        size += size // 2


def _of_tokens(num_tokens: int, batch: DeviceBatch) -> Iterator[DeviceStep]:
    """Yield steps of so many tokens: one to four prompts, and one prompt after a decode."""
    most, max_num_seqs = batch.max_drafts, batch.sizes.max_num_seqs
    for count in range(1, min(_MOST_PROMPTS, num_tokens, max_num_seqs) + 1):
        lens = [num_tokens // count] * (count - 1)
        rows, drafts = list(range(count)), [most] * count if most else []
        yield DeviceStep(rows, [*lens, num_tokens - sum(lens)], [0] * count, 0, rows, num_next=drafts, most_next=most)
    for num_drafts in sorted({0, most}):
        if num_tokens > 1 + num_drafts and max_num_seqs > 1:
            yield DeviceStep(
                rows=[0, 1],
                query_lens=[1 + num_drafts, num_tokens - 1 - num_drafts],
                starts=[1, 0],
                num_decodes=1,
                sampling=[0, 1],
                num_drafts=[num_drafts, 0] if num_drafts else [],
                num_next=[most, most] if most else [],
                decode_len=1 + num_drafts,
                most_next=most,
            )
