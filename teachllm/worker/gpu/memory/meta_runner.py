"""Build what a GPU's runner has in memory on the meta device, to count its buffers and what its largest step holds.

Everything here runs inside of a `dry_run`: the meta device stands for its card.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from teachllm.config import EngineConfig
from teachllm.distributed.ranks import ALONE
from teachllm.layers.attention_backends.invariant import InvariantBackend
from teachllm.layers.attention_backends.triton import TritonBackend
from teachllm.layers.linear import Linear
from teachllm.layers.weights.bound_weight import BoundWeight
from teachllm.models.build import META
from teachllm.models.model_config import ModelConfig
from teachllm.sampling.sampler import Sampler
from teachllm.sampling.shared_vocabulary import Columns
from teachllm.spec_decode.draft_model import DraftModel
from teachllm.spec_decode.drafter import ModelDrafter
from teachllm.spec_decode.load import DrafterConfig, drafter_of, new_head
from teachllm.spec_decode.tree import DraftTree
from teachllm.worker.gpu.attention_inputs import GPUAttention
from teachllm.worker.gpu.cuda_graphs import Graphs
from teachllm.worker.gpu.device_batch import DeviceBatch
from teachllm.worker.gpu.gpu_sampling import GPUSampling
from teachllm.worker.gpu.graph_runner import GraphRunner
from teachllm.worker.gpu.memory.balanced_routing import BalancedRouting
from teachllm.worker.gpu.memory.largest_step import LargestStep
from teachllm.worker.gpu.memory.live_bytes import LiveBytes
from teachllm.worker.gpu.memory.meta_model import MetaModel, meta_model, meta_ranks
from teachllm.worker.gpu.memory.sampling_needs import sampling_bytes
from teachllm.worker.gpu.spec_decode.gpu_drafting import GPUDrafting
from teachllm.worker.kv_cache import allocate_layers, attention_needs, drafter_needs, kv_cache_specs
from teachllm.worker.kv_scales import enable_kv_quantization
from teachllm_kernels.selection import Operands


class MetaRunner:
    """Hold a few layers of a model, its drafter, and all rows and plans of a `GPUModelRunner`, on the meta device.

    Args:
        config: resolved for this model.
        model: one rank's part of it, if there are several.

    Attributes:
        batch: the rows of requests.
        model, drafting, sampling, graph_runner: as of a `GPUModelRunner`; nothing is recorded.
        columns: this rank's part of the vocabulary; None if another stage computes the logits.
        num_kv_heads: of a rank.
        buffer_bytes: the bytes that the runner keeps from step to step beside weights and KV.
        shares_experts: whether other replicas have some of a mixture's experts.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, drafter: DrafterConfig | None = None) -> None:
        assert config.max_num_seqs and config.max_model_len and config.max_num_batched_tokens
        self._config, self._model = config, model
        ranks, speculation = meta_ranks(config, model), config.speculative_config
        built = meta_model(config, model, ranks)
        all_specs = kv_cache_specs(model)
        specs = [all_specs[layer] for layer in built.layers]
        self.model, self.shares_experts = built.model, ranks.experts.size > ranks.tensor.size
        self._kv_caches = allocate_layers(specs, model.kv_dtype, 1, config.block_size, META)
        if model.has_quantized_kv:
            enable_kv_quantization(built.model, specs, META)
        self._drafter = proposer = None if drafter is None else _drafter(drafter, config, built)
        tree = None if speculation is None else DraftTree.of_config(speculation)
        with LiveBytes(META.type) as live:
            self.batch = DeviceBatch(
                max_num_seqs=config.max_num_seqs,
                max_model_len=config.max_model_len,
                block_size=config.block_size,
                max_num_batched_tokens=config.max_num_batched_tokens,
                device=META,
                tree=tree,
            )
            # In the largest step no backend computes anything, so only what decodes are planned for matters here.
            backend = InvariantBackend() if config.batch_invariant else TritonBackend()
            needs = attention_needs(config, model)
            attention = GPUAttention(needs, backend, self.batch, 1 + self.batch.max_drafts)
            drafting = None
            sampler = Sampler(config.max_num_seqs, model.vocab_size, META)
            if speculation is not None and tree is not None and (proposer is not None or speculation.method == "ngram"):
                own = needs if drafter is None else drafter_needs(drafter, needs)
                drafting = GPUDrafting(
                    speculation,
                    proposer,
                    tree,
                    model,
                    batch=self.batch,
                    sampler=sampler,
                    attention=GPUAttention(own, backend, self.batch, max(1 + self.batch.max_drafts, 2)),
                )
        self.buffer_bytes, self.num_kv_heads = live.now, needs.num_kv_heads
        columns = Columns(model.vocab_size, ranks.tensor)
        self.columns = columns if ranks.coords.is_last_stage else None
        self._step = LargestStep(
            model=built.model,
            batch=self.batch,
            attention=attention,
            drafting=drafting,
            columns=self.columns,
        )
        self.drafting = drafting
        self.sampling = GPUSampling(
            self.batch, sampler, drafting, None if speculation is None else speculation.synthetic_rate, columns
        )
        self.graph_runner = GraphRunner(
            model=built.model,
            graphs=_NoGraphs(),
            batch=self.batch,
            attention=attention,
            backend=backend,
            sampling=self.sampling,
            drafting=drafting,
            is_last_stage=ranks.coords.is_last_stage,
            is_eager=True,
        )
        self.graph_runner.kv_caches = self._kv_caches

    @torch.inference_mode()
    def step_bytes(self, num_tokens: int) -> int:
        """Return the bytes that a step of `num_tokens` tokens holds at its peak, sampling included."""
        with self._routing(), LiveBytes(META.type) as live:
            self._step.run(self._kv_caches, sampling_bytes(self._config, self._model), num_tokens)
        return live.peak

    @torch.inference_mode()
    def forward_bytes(self, num_tokens: int) -> int:
        """Return the bytes that the forward pass of `num_tokens` tokens holds at its peak."""
        with self._routing(), LiveBytes(META.type) as live:
            self._step.forward(self._kv_caches, num_tokens)
        return live.peak

    def gated_operands(self) -> Iterator[Operands]:
        """Yield the operands by which each layer of gate and up, a drafter's included, chooses its kernels."""
        modules = list(self.model.modules())
        if self._drafter is not None:
            modules += self._drafter.module.modules()
        for module in modules:
            if isinstance(module, Linear) and module.is_gated and isinstance(module.weight, BoundWeight):
                yield module.weight.operands  # others write gate and up

    def _routing(self) -> AbstractContextManager[object]:
        """Return the context in which a step of this model runs on meta tensors."""
        experts = self.model.experts
        return nullcontext() if experts is None or not self.shares_experts else BalancedRouting(experts.top_k)


class _NoGraphs(Graphs):
    """Hold no recordings: on the meta device nothing is recorded."""

    def __init__(self) -> None: ...

    def has(self, key: Hashable) -> bool:
        return False


def _drafter(drafter: DrafterConfig, config: EngineConfig, target: MetaModel) -> ModelDrafter:
    """Build a drafter on the meta device, as `load_drafter` does on a GPU."""
    built = meta_model(config, drafter.model, ALONE) if drafter.head is None else None
    specs = list(drafter.specs) if built is None else [drafter.specs[layer] for layer in built.layers]
    caches = allocate_layers(specs, drafter.kv_dtype, 1, config.block_size, META)
    found: ModelDrafter
    if built is not None:
        found = DraftModel(built.model, caches, drafter.model.vocab_size, drafter.target.vocab_size)
    else:
        assert drafter.head is not None
        found = drafter_of(new_head(drafter.head, drafter.model, META), target.model, caches)
    if drafter.target.has_quantized_kv:
        enable_kv_quantization(found.module, specs, META)
    return found
