"""GPUModelRunner: as `cpu/model_runner.py`, with rows on the device, graphs, and results that come a step late.

    execute(plan)  header and new blocks to the device; then a graph, or the same kernels one by one (`GraphRunner`)
    sample(step)   ids stay on the device for the step after this one, and cross to the host through pinned memory, as
                   do the logprobs that were asked for

Neither synchronizes with the device, except for prompt logprobs and when a batch size is captured on its second
occurrence. Rows that ask for more than temperature and filters (logprobs, penalties, constraints) are sampled outside
of the graphs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial

import torch

from teachllm.config import EngineConfig
from teachllm.core.memory import MemoryPlan
from teachllm.core.scheduler_output import SchedulerOutput, TokenLogprobs
from teachllm.distributed.group import agreed_least, barrier
from teachllm.distributed.layout import layout_of
from teachllm.distributed.ranks import ALONE, Ranks
from teachllm.layers.attention_backends.selection import select_backend
from teachllm.layers.dtypes import torch_dtype
from teachllm.loading.loader import load_model
from teachllm.models.base import Model
from teachllm.models.model_config import ModelConfig
from teachllm.models.own_model import model_of_rank
from teachllm.models.stage import Stage
from teachllm.sampling.sampler import Sampler, SamplerOutput
from teachllm.sampling.shared_vocabulary import Columns
from teachllm.spec_decode.load import DrafterConfig, load_drafter
from teachllm.spec_decode.step_times import Prior
from teachllm.spec_decode.tree import DraftTree
from teachllm.startup_progress import StartupProgress, ignore_progress
from teachllm.worker.gpu.attention_inputs import GPUAttention
from teachllm.worker.gpu.cuda_graphs import Graphs
from teachllm.worker.gpu.device_batch import NUM_STEPS, DeviceBatch
from teachllm.worker.gpu.device_step import DeviceStep
from teachllm.worker.gpu.gpu_sampling import GPUSampling
from teachllm.worker.gpu.graph_runner import GraphRunner
from teachllm.worker.gpu.launched_step import LaunchedStep, PendingStep
from teachllm.worker.gpu.memory.largest_step import LargestStep
from teachllm.worker.gpu.memory.measured import compare, measure_needs
from teachllm.worker.gpu.memory.predicted import predict_needs
from teachllm.worker.gpu.memory.sampling_needs import sampling_bytes
from teachllm.worker.gpu.spec_decode.gpu_drafting import GPUDrafting
from teachllm.worker.gpu.startup.compile_process import finish_compiling, start_compiling
from teachllm.worker.kv_cache import (
    KVCache,
    allocate_kv_cache,
    allocate_layers,
    attention_needs,
    drafter_needs,
    kv_cache_specs,
)
from teachllm.worker.kv_scales import calibrate, enable_kv_quantization
from teachllm.worker.memory_plan import measured_plan, plan_memory
from teachllm.worker.prompt_logprobs import PromptLogprobs
from teachllm_kernels.attention.kv_move import KVMover


class GPUModelRunner:
    """The model, its KV cache and its rows on one GPU. Arguments as `ModelRunner`'s."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        device: torch.device,
        progress: StartupProgress | None = None,
        drafter: DrafterConfig | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        assert config.max_model_len and config.max_num_seqs and config.max_num_batched_tokens
        self._ranks, layout = ranks, ranks.coords.layout
        assert layout == layout_of(config)
        whole, model_config = model_config, model_of_rank(model_config, ranks.coords)
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(device)
        self._device = device
        if not (config.disable_custom_all_reduce or config.batch_invariant):  # long steps' sums are rounded otherwise
            ranks.tensor.open_symmetric_buffer(whole.hidden_size, torch_dtype(whole.dtype), device)
        self._is_observed = False
        self._last: PendingStep | None = None
        needs = attention_needs(config, model_config)
        self._backend = select_backend(config.attention_backend, needs, device, config.batch_invariant)
        speculation = config.speculative_config
        if speculation is not None and not self._backend.in_graphs:
            raise ValueError(
                f"attention_backend={self._backend.name!r} verifies no drafts: set attention_backend=triton, or leave "
                "speculative_config out"
            )
        self._eager = config.enforce_eager or not (self._backend.in_graphs and ranks.tensor.in_graphs)
        self._model_config = model_config
        if torch.cuda.memory_reserved(device):  # by an engine that was closed, and may not have been collected yet
            gc.collect()
            torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        tree = None if speculation is None else DraftTree.of_config(speculation)
        if tree is not None and not tree.is_chain and not self._backend.splits_decodes:
            raise ValueError("batch_invariant verifies chains of drafts: leave speculative_token_tree out")
        progress = progress or ignore_progress
        is_first_here = ranks.coords.rank % config.num_local_ranks == 0  # of this machine's ranks
        compiling = start_compiling(config, whole, drafter, device, is_first_here)
        if compiling.needs is None:
            prediction = predict_needs(config, model_config, device, drafter)  # before any weight is read
        else:
            prediction = compiling.needs[ranks.coords.stage]
        predicted = plan_memory(config, model_config, device, drafter, prediction.needs)
        allocated = torch.cuda.memory_allocated(device)
        self.model: Model = load_model(whole, config, device, partial(progress, "weights"), ranks)
        if layout.pipeline > 1:
            self.model = Stage(self.model, ranks, whole.hidden_size, torch_dtype(whole.dtype))
        draft_caches: KVCache = []
        loaded = None if drafter is None else load_drafter(drafter, config, self.model, draft_caches, device)
        if model_config.has_quantized_kv:
            enable_kv_quantization(self.model, kv_cache_specs(model_config), device)
            if drafter is not None and loaded is not None and drafter.specs:
                enable_kv_quantization(loaded.module, drafter.specs, device)
        weights = torch.cuda.memory_allocated(device) - allocated
        self._batch = DeviceBatch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            device=device,
            tree=tree,
            num_steps=max(NUM_STEPS, 2 + layout.pipeline),
        )
        self._sampler = Sampler(config.max_num_seqs, model_config.vocab_size, device)
        self._graphs = Graphs(device, ranks.world.traffic, is_shared=ranks.world.size > 1)
        self._attention = GPUAttention(needs, self._backend, self._batch, 1 + self._batch.max_drafts)
        self._drafting: GPUDrafting | None = None
        if speculation is not None and tree is not None and (loaded is not None or speculation.method == "ngram"):
            own = needs if drafter is None else drafter_needs(drafter, needs)
            attention = GPUAttention(own, self._backend, self._batch, max(1 + self._batch.max_drafts, 2))
            self._drafting = GPUDrafting(
                speculation, loaded, tree, model_config, batch=self._batch, sampler=self._sampler, attention=attention
            )
        rate = None if speculation is None else speculation.synthetic_rate
        self._columns = Columns(whole.vocab_size, ranks.tensor)
        self._sampling = GPUSampling(self._batch, self._sampler, self._drafting, rate, self._columns)
        self._graph_runner = GraphRunner(
            model=self.model,
            graphs=self._graphs,
            batch=self._batch,
            attention=self._attention,
            backend=self._backend,
            sampling=self._sampling,
            drafting=self._drafting,
            is_last_stage=ranks.coords.is_last_stage,
            is_eager=self._eager,
        )
        if compiling.process is not None:
            finish_compiling(compiling.process, partial(progress, "kernels"))
        barrier(ranks.world, device)  # of a machine's ranks, one has waited for the kernels
        self._allocate(config, drafter, 1, draft_caches)  # to measure with
        memory = self._measured(predicted, config, weights, free, total, prediction.unmeasured)
        self.memory = memory.of_blocks(agreed_least(ranks.world, memory.num_blocks, device))
        self._allocate(config, drafter, self.memory.num_blocks, draft_caches)
        if model_config.has_quantized_kv:
            calibrate(self.model, whole, self._kv_caches, loaded, ranks)
        self._prompt_logprobs = PromptLogprobs(lambda hidden: self.model.logits(hidden), self._sampler)
        # What lives as long as the engine need not be looked at by every collection, which stops a step for it.
        gc.collect()
        gc.freeze()
        if config.startup == "full":
            is_adaptive = speculation is not None and speculation.adaptive
            with torch.cuda.device(device):
                self._graph_runner.record_known(is_adaptive, partial(progress, "graphs"))

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> LaunchedStep:
        """Launch the forward pass of a plan; for a batch of plain decodes, sampling too."""
        with torch.cuda.device(self._device):  # which one is current is each thread's own
            began = self._start_clock() if self._is_observed else None
            launched = self._execute(plan)
            launched.began = began
            return launched

    @torch.inference_mode()
    def sample(self, launched: LaunchedStep) -> PendingStep:
        """Sample what the graph has not, and start to copy the ids to the host."""
        with torch.cuda.device(self._device):
            self._last = self._sample(launched)
            return self._last

    def receive_sampled_tokens(self, step: int, sampled_token_ids: Sequence[Sequence[int]]) -> None:
        """Receive, on other stages, what the last one sampled in a step, before the first plan made with it."""
        self._batch.receive_sampled_tokens(step, sampled_token_ids)

    def _start_clock(self) -> torch.cuda.Event:
        """Return when the step in front is done, if its result has not been taken yet; else now.

        In the first case the device has work all the time, and what it waits between two steps is the second one's.
        """
        if self._last is not None and not self._last.is_taken:
            return self._last.arrived
        now = torch.cuda.Event(enable_timing=True)
        now.record()
        return now

    def _allocate(
        self, config: EngineConfig, drafter: DrafterConfig | None, num_blocks: int, draft_caches: KVCache
    ) -> None:
        """Allocate KV caches of the model and, into `draft_caches`, of the drafter, in place of the earlier ones."""
        self._kv_caches = self._graph_runner.kv_caches = []  # a block may be as long as the longest sequence
        draft_caches.clear()
        self._kv_caches = allocate_kv_cache(self._model_config, num_blocks, config.block_size, self._device)
        self._graph_runner.kv_caches = self._kv_caches
        if drafter is not None:
            draft_caches += allocate_layers(
                drafter.specs, drafter.kv_dtype, num_blocks, config.block_size, self._device
            )
        if self._batch.places is not None:
            self._sampling.mover = KVMover([*self._kv_caches, *draft_caches])

    def prepare(self, sizes: Sequence[int], is_adaptive: bool) -> Prior | None:
        """Do the same as `GraphRunner.record_ahead`."""
        return self._graph_runner.record_ahead(sizes, is_adaptive, self.memory.num_blocks)

    def observe(self, is_on: bool) -> None:
        """Start, or stop, adding to outputs how long their steps took on the device."""
        self._is_observed = is_on

    @torch.inference_mode()
    def execute_dummy_step(self) -> None:
        """Compute an empty step: this rank's experts are there for replicas that have tokens."""
        self.model.execute_dummy_step()

    def close(self) -> None:
        """Drop the runner's graphs, and let garbage collections look at everything again."""
        self._graphs.clear()
        gc.unfreeze()

    def _measured(
        self,
        predicted: MemoryPlan,
        config: EngineConfig,
        weights: int,
        free: int,
        total: int,
        unmeasured: int,
    ) -> MemoryPlan:
        """Return the plan with what the largest step takes, measured by running it.

        Args:
            free, total: the GPU's bytes from the start.
            unmeasured: activations that the largest step does not show, as predicted.
        """
        num_bytes = sampling_bytes(config, self._model_config)
        run = partial(self._largest_step, self._kv_caches, num_bytes)
        needs = measure_needs(predicted, run, self._device, total - free, self._eager)
        needs["activations"] = max(needs["activations"], unmeasured)
        measured = {"weights": weights, **needs}
        compare(predicted, measured)
        return measured_plan(predicted, config, free, measured)

    @torch.inference_mode()
    def _largest_step(self, kv_caches: KVCache, num_sampling_bytes: int) -> tuple[torch.Tensor, ...]:
        """Compute `LargestStep.run`: as many tokens and logits as a step may have, and room to sample from them."""
        step = LargestStep(
            model=self.model,
            batch=self._batch,
            attention=self._attention,
            drafting=self._drafting,
            columns=self._columns if self._ranks.coords.is_last_stage else None,
        )
        return step.run(kv_caches, num_sampling_bytes)

    def _execute(self, plan: SchedulerOutput) -> LaunchedStep:
        drafting, kept = self._drafting, (self._sampler, self._prompt_logprobs)
        self._batch.update(plan, kept if drafting is None else (*kept, drafting))
        step = self._batch.prepare(plan)
        if not self._ranks.coords.is_last_stage:
            self._batch.mark_pending_remote(plan.step, step)
        behind = [] if drafting is None else drafting.note(plan.scheduled, step.rows)
        rows = step.sampled_rows
        variant = self._sampler.plain_variant(rows)
        if drafting is not None and variant is not None:
            variant = (variant[0], variant[0])  # as they are recorded
        scores = self._prompt_logprobs.any_due(plan.scheduled, step.rows)
        if not scores and (held := self._graph_runner.full_key(step, variant)) is not None:
            step, key = held
            logits, to_draft = self._graph_runner.full(step, key, behind), None
            if drafting is not None and not key.samples:
                tokens = self._graph_runner.tokens_of(step, key.num_seqs, key.num_tokens)
                to_draft = partial(drafting.propose, step, tokens, behind)
            return self._launched(step, rows, variant, logits if rows else None, None, to_draft)
        logits_indices = self._batch.header.logit_index[: len(rows)] if rows else None
        reads_all = drafting is not None and drafting.drafter is not None and drafting.drafter.reads_all_hidden
        hidden = self._graph_runner.mixed(step, None if scores or reads_all else logits_indices)
        if not self._ranks.coords.is_last_stage:
            return self._launched(step, rows, variant, None, None, None)
        scores_all, prompt_logprobs = scores or reads_all, None
        if scores:
            prompt_logprobs = self._prompt_logprobs.score(
                plan.scheduled, step.rows, starts=step.starts, hidden=hidden, token_ids=self._batch.token_ids
            )
        logits = None
        if logits_indices is not None:
            chosen = hidden.index_select(0, logits_indices) if scores_all else hidden
            logits = self.model.logits(chosen, sharded=True, in_float32=False)
            hidden = hidden if reads_all else chosen
        to_draft = None
        if drafting is not None:
            tokens = self._graph_runner.tokens_of(step, *self._graph_runner.mixed_shape(step))
            to_draft = partial(drafting.propose, step, tokens, behind, hidden=hidden)
        return self._launched(step, rows, variant, logits, prompt_logprobs, to_draft)

    def _launched(
        self,
        step: DeviceStep,
        rows: list[int],
        variant: tuple[bool, bool] | None,
        logits: torch.Tensor | None,
        prompt_logprobs: list[list[TokenLogprobs] | None] | None,
        to_draft: Callable[..., None] | None,
    ) -> LaunchedStep:
        """Return a step under way."""
        batch = self._batch
        return LaunchedStep(
            step,
            rows,
            variant,
            logits,
            output=batch.output,
            prompt_logprobs=prompt_logprobs,
            graph_mode=self._graph_runner.graph_mode,
            num_fields=batch.num_fields,
            to_draft=to_draft,
        )

    def _sample(self, launched: LaunchedStep) -> PendingStep:
        rows, variant = launched.rows, launched.variant
        outputs: list[SamplerOutput] = []
        if launched.logits is not None:
            logits, num_seqs = launched.logits[: len(rows)], len(launched.step.sampling)
            if variant is not None:
                self._sampling.plain(logits, num_seqs, variant, bool(launched.step.num_drafts))
            else:
                outputs = self._sampling.any(logits, rows, num_seqs, launched.step.sampled_places)
            launched.logits = None  # the next step may have the memory
        pending = PendingStep(launched, outputs)
        if launched.to_draft is not None:  # the host need not wait for it
            launched.to_draft(any_random=variant is None or variant[0])
            launched.to_draft = None
        return pending
