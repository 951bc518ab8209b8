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
from teachllm.worker.gpu.attention_inputs import FlatBatch
from teachllm.worker.gpu.cuda_graphs import GraphSizes
from teachllm.worker.gpu.device_batch import DeviceBatch
from teachllm.worker.gpu.device_step import DeviceStep
from teachllm.worker.gpu.known_steps import ALL_VARIANTS, VARIANTS, decode_steps, mixed_sizes, prompt_steps
from teachllm.worker.gpu.memory.meta_runner import MetaRunner
from teachllm.worker.gpu.spec_decode.draft_progress import Behind
from teachllm_kernels.attention.decode_plan import decode_shape
from teachllm_kernels.dry_run import dry_run
from teachllm_kernels.gpu_type import GPUType
from teachllm_kernels.variants import KernelVariants


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
        StepRehearsal(MetaRunner(config, model, drafter)).run_all()
    return variants


class StepRehearsal:
    """Run steps on the meta device as `GPUModelRunner` would execute, sample and draft for them.

    Args:
        runner: made in the dry run in which the steps are run.
    """

    def __init__(self, runner: MetaRunner) -> None:
        self._runner = runner
        self._drafted: set[tuple[int, bool, int]] = set()

    def run_all(self) -> None:
        """Run steps of each kind."""
        runner = self._runner
        sampled = VARIANTS if runner.drafting is not None else [each for each in ALL_VARIANTS if each is not None]
        decodes = decode_steps(runner.batch, is_adaptive=True).values()  # near its end, any request drafts less
        mixed = mixed_steps(runner.batch, runner.num_kv_heads)
        for step in (*decodes, *prompt_steps(runner.batch.sizes), *mixed):
            self.run(step, sampled)

    def run(self, step: DeviceStep, sampled: Sequence[tuple[bool, bool]]) -> None:
        """Run a step, and sample from it in several ways, see `Sampler.plain_variant`."""
        graph_runner = self._runner.graph_runner
        held = [graph_runner.full_key(step, variant) for variant in sampled] if step.sampling else [None]
        if None in held:
            self._run_mixed(step, sampled)
        for padded, key in {each[1]: each for each in held if each is not None}.values():
            logits = graph_runner.full(padded, key, behind=[])
            if logits is not None and self._runner.columns is not None:
                tokens = graph_runner.tokens_of(padded, key.num_seqs, key.num_tokens)
                self._sample(step, logits[: step.num_logits], tokens, sampled)

    def _run_mixed(self, step: DeviceStep, sampled: Sequence[tuple[bool, bool]]) -> None:
        """Run a step that no graph holds, once."""
        runner, drafting = self._runner, self._runner.drafting
        indices = runner.batch.header.logit_index[: step.num_logits] if step.sampling else None
        reads_all = drafting is not None and drafting.drafter is not None and drafting.drafter.reads_all_hidden
        hidden = runner.graph_runner.mixed(step, None if reads_all else indices)
        if runner.columns is None or indices is None:
            return
        chosen = hidden.index_select(0, indices) if reads_all else hidden
        logits = runner.model.logits(chosen, sharded=True, in_float32=False)
        tokens = runner.graph_runner.tokens_of(step, *runner.graph_runner.mixed_shape(step))
        self._sample(step, logits, tokens, sampled, hidden if reads_all else chosen)

    def _sample(
        self,
        step: DeviceStep,
        logits: torch.Tensor,
        tokens: FlatBatch,
        sampled: Sequence[tuple[bool, bool]],
        hidden: torch.Tensor | None = None,
    ) -> None:
        """Sample and draft after a forward pass."""
        sampling, drafting, count = self._runner.sampling, self._runner.drafting, len(step.sampling)
        if drafting is not None:
            drafting.catch_up([Behind(row, 0, step.num_tokens // len(step.rows)) for row in step.rows])
        for variant in sampled:
            sampling.plain(logits, count, variant, verifies=bool(step.num_drafts))
            if drafting is None:
                continue
            drafter, key = drafting.drafter, (count, variant[0], step.most_next)
            reads_tokens = drafter is not None and (drafter.follows_always or drafter.reads_all_hidden)
            if reads_tokens or key not in self._drafted:  # otherwise the number of requests decides what is launched
                self._drafted.add(key)
                drafting.propose(step, tokens, [], variant[0], hidden=hidden)


def mixed_steps(batch: DeviceBatch, num_kv_heads: int) -> Iterator[DeviceStep]:
    """Yield mixed steps of each size, padded and long, and of each number of sequences.

    Kernels differ by the number of tokens (products), by that of sequences (attention and its plan), and by where in a
    tensor the prompts begin, behind the decodes. These three hardly depend on each other, so not all pairs are run.
    """
    sizes, long, most = batch.sizes, long_sizes(batch.sizes), batch.max_drafts
    for num_tokens in (*mixed_sizes(sizes), *long):
        yield from _of_sequences(num_tokens, 1, batch, [most])
    usual = [sizes.largest_mixed, *(size for size in long if size % 16 == 0)][:2]
    for num_tokens in usual:
        yield from _of_sequences(num_tokens, 1, batch, sorted({sizes.drafts(count) for count in range(most + 1)}))
    shapes = {decode_shape(count, num_kv_heads): count for count in range(sizes.max_num_seqs, 0, -1)}
    for count in sorted({*sizes.decodes(), *shapes.values()}):
        for num_tokens in usual:
            yield from _of_sequences(num_tokens, count, batch, sorted({0, most}))
    yield DeviceStep([0], [sizes.largest_mixed], [0], num_decodes=0, sampling=[])  # a chunk that is not the last
    yield from (DeviceStep([0], [num_tokens], [0], num_decodes=0, sampling=[]) for num_tokens in long[:3])


def long_sizes(sizes: GraphSizes) -> list[int]:
    """Return numbers of tokens of steps that are never padded, from the least to the most; 16 divides some of them."""
    found, size = {sizes.max_num_tokens}, sizes.largest_mixed + 16
    while size <= sizes.max_num_tokens:
        found |= {size - 1, size, size + 1}
        size += size // 2 // 16 * 16
    return sorted(size for size in found if sizes.largest_mixed < size <= sizes.max_num_tokens)


def _of_sequences(num_tokens: int, count: int, batch: DeviceBatch, lengths: Sequence[int]) -> Iterator[DeviceStep]:
    """Yield steps of so many tokens: of `count` prompts alone, and of `count` decodes, or one less, and a prompt.

    Args:
        lengths: how many drafts each of the decodes verifies.
    """
    most, sizes = batch.max_drafts, batch.sizes
    if num_tokens > sizes.max_num_tokens:
        return
    if count <= num_tokens:
        rows, lens = list(range(count)), [num_tokens // count] * (count - 1)
        drafts = [most] * count if most else []
        yield DeviceStep(rows, [*lens, num_tokens - sum(lens)], [0] * count, 0, rows, num_next=drafts, most_next=most)
    num_decodes = min(count, sizes.max_num_seqs - 1)
    for num_drafts in lengths if num_decodes else ():
        rest = num_tokens - num_decodes * (1 + num_drafts)
        if rest > 0:
            rows = list(range(num_decodes + 1))
            yield DeviceStep(
                rows=rows,
                query_lens=[*[1 + num_drafts] * num_decodes, rest],
                starts=[*[1] * num_decodes, 0],
                num_decodes=num_decodes,
                sampling=rows,
                num_drafts=[*[num_drafts] * num_decodes, 0] if num_drafts else [],
                num_next=[most] * len(rows) if most else [],
                decode_len=1 + num_drafts,
                most_next=most,
            )
