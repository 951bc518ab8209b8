"""ModelRunner for a GPU: as `model_runner.py`, with rows on the device, graphs, and results that come a step late.

    execute(plan)  header and new blocks to the device; then a graph, or the same kernels one by one
    sample(step)   ids stay on the device for the step after this one, and cross to the host through pinned memory, as
                   do the logprobs that were asked for

Neither waits for the device, but for log-probabilities of prompts, where they are asked for, and to record a size of
batch when it comes for the second time. A batch of decodes, or of a few short prompts, is one graph from row to sampled
token, a mixed batch runs in pieces; rows that ask for more than temperature and filters (logprobs, penalties,
constraints) are sampled outside.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from teachllm.config import EngineConfig
from teachllm.core.memory import MemoryPlan
from teachllm.core.scheduler_output import SchedulerOutput
from teachllm.layers.attention import AttentionMetadata
from teachllm.layers.attention_backends.selection import select_backend
from teachllm.models.loader import load_model
from teachllm.models.model_config import ModelConfig
from teachllm.sampling.sampler import Sampler, SamplerOutput
from teachllm.worker.cuda_graphs import LARGEST_MIXED_GRAPH, AttentionCall, Graphs, padded_size
from teachllm.worker.device_batch import DeviceBatch, DeviceStep
from teachllm.worker.kv_cache import KVCache, allocate_kv_cache, attention_needs, measured_plan, plan_memory
from teachllm.worker.launched_step import LaunchedStep, PendingStep
from teachllm.worker.memory_needs import SAMPLED_AT_ONCE, compare, measure_needs, sampling_bytes, ungated_bytes
from teachllm.worker.prompt_scores import PromptScores
from teachllm_kernels.compile_ahead import compiling_ahead
from teachllm_kernels.decode_plan import DecodePlan, plan_decode
from teachllm_kernels.hopper_decode import fits_hopper_decode

_PROMPTS = (8, 32)  # tokens; batches of 2 to 8 and of 17 to 32 decodes have the same products


class GPUModelRunner:
    """The model, its KV cache and its rows on one GPU. Arguments as `ModelRunner`'s.

    Attributes:
        times_steps: results say how long their steps took; False costs nothing.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        assert config.max_model_len and config.max_num_seqs and config.max_num_batched_tokens
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(device)
        self._device = device
        self.times_steps = False
        self._last: PendingStep | None = None
        needs = attention_needs(config, model_config)
        self._backend = select_backend(config.attention_backend, needs, device, config.batch_invariant)
        self._eager = config.enforce_eager or not self._backend.in_graphs
        self._max_num_seqs = config.max_num_seqs
        self._model_config = model_config
        free, total = torch.cuda.mem_get_info(device)
        predicted = plan_memory(config, model_config, device)  # before any weight is read
        allocated = torch.cuda.memory_allocated(device)
        self.model: Any = load_model(model_config, config, device, progress)
        weights = torch.cuda.memory_allocated(device) - allocated
        self._batch = DeviceBatch(
            config.max_num_seqs, config.max_model_len, config.block_size, config.max_num_batched_tokens, device
        )
        self._sampler = Sampler(config.max_num_seqs, model_config.vocab_size, device)
        self._graphs: Graphs[Any] = Graphs(device)
        self._graph_mode = "eager"  # of the last step, see `ModelRunnerOutput`
        num_heads, num_kv_heads = model_config.num_attention_heads, model_config.num_kv_heads
        head_size, dtype = model_config.head_size, getattr(torch, model_config.dtype)
        on_hopper = fits_hopper_decode(device, dtype, head_size, num_heads // num_kv_heads, config.block_size)
        self._plans = {
            window: DecodePlan.allocate(
                *(config.max_num_seqs, num_heads, num_kv_heads, head_size, device), on_hopper=on_hopper
            )
            for window in (set(model_config.windows) if self._backend.splits_decodes else ())
        }
        self._kv_caches = allocate_kv_cache(model_config, 1, config.block_size, device)  # to measure with
        self.memory = self._measured(predicted, config, weights, free, total)
        self._kv_caches = []  # a block may be as long as the longest sequence
        self._kv_caches = allocate_kv_cache(model_config, self.memory.num_blocks, config.block_size, device)
        self._prompt_scores = PromptScores(self.model, self._sampler)
        # What lives as long as the engine need not be looked at by every collection, which stops a step for it.
        gc.collect()
        gc.freeze()

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> LaunchedStep:
        """Launches the forward pass of a plan; for a batch of plain decodes, sampling too."""
        with torch.cuda.device(self._device):  # which one is current is each thread's own
            began = self._start_clock() if self.times_steps else None
            launched = self._execute(plan)
            launched.began = began
            return launched

    @torch.inference_mode()
    def sample(self, launched: LaunchedStep) -> PendingStep:
        """Samples what the graph has not, and sends the ids on their way."""
        with torch.cuda.device(self._device):
            self._last = self._sample(launched)
            return self._last

    def _start_clock(self) -> torch.cuda.Event:
        """When the step in front is done, if nobody has asked for its result yet; else now.

        In the first case the device has work all the time, and what it waits between two steps is the second one's.
        """
        if self._last is not None and not self._last.is_taken:
            return self._last.arrived
        now = torch.cuda.Event(enable_timing=True)
        now.record()
        return now

    def close(self) -> None:
        """Lets collections look at everything again."""
        gc.unfreeze()

    def _measured(self, predicted: MemoryPlan, config: EngineConfig, weights: int, free: int, total: int) -> MemoryPlan:
        """The plan with what the largest step takes, measured by running it; `free` and `total` are from the start."""
        num_bytes = sampling_bytes(config, self._model_config)

        def run() -> tuple[torch.Tensor, ...]:
            self._compile_ahead(num_bytes)
            return self._largest_step(self._kv_caches, num_bytes)

        needs = measure_needs(predicted, run, self._device, total - free, self._eager)
        needs["activations"] = max(needs["activations"], ungated_bytes(config, self._model_config, self._device))
        measured = {"weights": weights, **needs}
        compare(predicted, measured)
        return measured_plan(predicted, config, free, measured)

    @torch.inference_mode()
    def _compile_ahead(self, num_sampling_bytes: int) -> None:
        """Compiles what an engine meets first, side by side: the largest step, sampling, a decode, short prompts."""
        batch = self._batch
        with compiling_ahead(self._device):
            logits = self._largest_step(self._kv_caches, num_sampling_bytes)[1]
            rows, known = batch.sample_rows[:1], batch.num_known
            for variant in ((True, True), (True, False)):  # the first takes the longest of all
                self._sampler.sample_plain(logits[:1], rows, known, variant)
            # What a request's penalties or bias have changed is in float32, and its rows are gathered.
            self._sampler.sample_plain(logits[:1].float(), rows.clone(), known, (True, True))
            for num_tokens, num_decodes in ((1, 1), *((n, 0) for n in _PROMPTS)):
                step = DeviceStep([0], [num_tokens], [0], num_decodes, sampling=[0])
                shape = step.full_graph_shape(self._max_num_seqs, batch.input_ids.shape[0])
                if shape is not None and self._backend.in_graphs:
                    batch.send(step, *shape)
                    self._full_step(*shape, step.is_decode, variant=(False, False))

    @torch.inference_mode()
    def _largest_step(self, kv_caches: KVCache, num_sampling_bytes: int) -> tuple[torch.Tensor, ...]:
        """As many tokens as a step may have, all padding, as many logits, and room to sample from them."""
        batch, size = self._batch, self._batch.input_ids.shape[0]
        batch.slot_mapping.fill_(-1)
        metadata = self._metadata(1, size, 0)
        metadata.outside = lambda call: None
        hidden = self.model(batch.input_ids, batch.positions, kv_caches, metadata)
        logits = self.model.lm_logits(hidden.index_select(0, batch.logit_index[:-1]))  # none of padding
        return hidden, logits, torch.empty(num_sampling_bytes, dtype=torch.uint8, device=self._device)

    def _execute(self, plan: SchedulerOutput) -> LaunchedStep:
        self._batch.update(plan, (self._sampler, self._prompt_scores))
        step = self._batch.prepare(plan)
        rows = [step.rows[i] for i in step.sampling]
        variant = self._sampler.plain_variant(rows)
        scores = self._prompt_scores.any_due(plan.scheduled, step.rows)
        if not scores and self._backend.in_graphs:
            full = step.full_graph_shape(self._max_num_seqs, self._batch.input_ids.shape[0])
            if full is not None:
                logits = self._full(step, *full, variant)
                return LaunchedStep(step, rows, variant, logits, self._batch.output, None, self._graph_mode)
        wanted = self._batch.logit_index[: len(rows)] if rows else None
        hidden = self._mixed(step, None if scores else wanted)
        prompt_logprobs = None
        if scores:
            where = (plan.scheduled, step.rows, step.starts, hidden, self._batch.token_ids)
            prompt_logprobs = self._prompt_scores.score(*where)
        logits = None
        if wanted is not None:
            logits = self.model.lm_logits(hidden.index_select(0, wanted) if scores else hidden)
        return LaunchedStep(step, rows, variant, logits, self._batch.output, prompt_logprobs, self._graph_mode)

    def _sample(self, launched: LaunchedStep) -> PendingStep:
        if launched.logits is None:
            return PendingStep(launched)
        rows, variant, batch = launched.rows, launched.variant, self._batch
        count = len(rows)
        logits = launched.logits[:count]
        outputs: list[SamplerOutput] = []
        if variant is not None:
            sampled = self._sampler.sample_plain(logits, batch.sample_rows[:count], batch.num_known, variant)
        else:
            sampled, outputs = self._sample_any(logits, rows)
        batch.append(sampled)
        launched.logits = None  # the next step may have the memory
        return PendingStep(launched, outputs)

    def _sample_any(self, logits: torch.Tensor, rows: list[int]) -> tuple[torch.Tensor, list[SamplerOutput]]:
        """Token ids, and what the sampler makes of the rows, whatever they ask for.

        A few rows at a time, which bounds the memory that it takes.
        """
        batch = self._batch
        lengths = batch.num_known.index_select(0, batch.sample_rows[: len(rows)]).long()
        outputs: list[SamplerOutput] = []
        for first in range(0, len(rows), SAMPLED_AT_ONCE):
            some = slice(first, first + SAMPLED_AT_ONCE)
            output = self._sampler.sample(logits[some].float(), rows[some], lengths[some], batch.token_ids)
            outputs.append(output)
        return torch.cat([output.token_ids for output in outputs]), outputs

    # -- in one graph --------------------------------------------------------------------------------------

    def _full(
        self, step: DeviceStep, num_seqs: int, num_tokens: int, variant: tuple[bool, bool] | None
    ) -> torch.Tensor | None:
        """The logits of a step padded to a graph's size; None if it has sampled."""
        is_decode = step.is_decode
        key = ("full", num_seqs, num_tokens, is_decode, variant)
        has_graph = self._graphs.has(key)
        if not has_graph and not self._eager and self._graphs.is_due(key):
            self._batch.clear(num_seqs, num_tokens)  # what is captured also runs once: on padding alone
            has_graph = self._graphs.capture(key, lambda: self._full_step(num_seqs, num_tokens, is_decode, variant))
        self._batch.send(step, num_seqs, num_tokens)
        self._graph_mode = "full" if has_graph else "eager"
        return self._graphs.replay(key) if has_graph else self._full_step(num_seqs, num_tokens, is_decode, variant)

    def _full_step(
        self, num_seqs: int, num_tokens: int, is_decode: bool, variant: tuple[bool, bool] | None
    ) -> torch.Tensor | None:
        """From rows to logits, or to sampled ids: what a full graph holds."""
        batch = self._batch
        batch.build(num_seqs)
        can_fuse = self.model.fuses_decodes and self._backend.splits_decodes
        is_fused = is_decode and can_fuse and all(plan.fuses(num_seqs) for plan in self._plans.values())
        if is_decode:
            self._plan_decodes(num_seqs, is_fused)
        metadata = self._metadata(num_seqs, num_tokens, num_seqs if is_decode else 0)
        metadata.is_fused = is_fused
        hidden = self.model(batch.input_ids[:num_tokens], batch.positions[:num_tokens], self._kv_caches, metadata)
        if not is_decode:
            hidden = hidden.index_select(0, batch.logit_index[:num_seqs])
        logits = self.model.lm_logits(hidden)
        if variant is None:
            return logits
        sampled = self._sampler.sample_plain(logits, batch.sample_rows[:num_seqs], batch.num_known, variant)
        batch.append(sampled)
        return None

    # -- anything else -------------------------------------------------------------------------------------

    def _mixed(self, step: DeviceStep, wanted: torch.Tensor | None) -> torch.Tensor:
        """Hidden states of any batch, [num_wanted, hidden_size]; None: of all tokens and the padding behind them."""
        batch, num_seqs, num_tokens = self._batch, len(step.rows), step.num_tokens
        # Padded without graphs too: the same kernels then give the same bits.
        is_padded = self._backend.in_graphs and num_tokens <= LARGEST_MIXED_GRAPH
        size = padded_size(num_tokens, batch.input_ids.shape[0]) if is_padded else num_tokens
        padded_seqs = num_seqs + (size > num_tokens)
        key = ("mixed", size)
        in_pieces = is_padded and self._graphs.has(key)
        if is_padded and not in_pieces and not self._eager and self._graphs.is_due(key):
            in_pieces = self._capture_mixed(key, size)
        batch.send(step, padded_seqs, size)
        batch.build(padded_seqs)
        if step.num_decodes:
            self._plan_decodes(step.num_decodes)
        metadata = self._metadata(padded_seqs, size, step.num_decodes)
        self._graph_mode = "piecewise" if in_pieces else "eager"
        metadata.query_lens = step.query_lens
        metadata.kv_lens = [start + count for start, count in zip(step.starts, step.query_lens, strict=True)]
        if in_pieces:
            hidden = self._graphs.replay_pieces(key, metadata)
        else:
            if wanted is not None and not is_padded:
                metadata.wanted = wanted
                metadata.ending = partial(self._ending, wanted) if self._backend.splits_decodes else None
            hidden = self.model(batch.input_ids[:size], batch.positions[:size], self._kv_caches, metadata)
        return hidden.index_select(0, wanted) if is_padded and wanted is not None else hidden

    def _capture_mixed(self, key: tuple[str, int], size: int) -> bool:
        """Records a mixed step of `size` tokens; they are all padding meanwhile. False if that cannot be done."""
        batch = self._batch
        batch.slot_mapping[:size].fill_(-1)
        metadata = self._metadata(1, size, 0)

        def run(outside: Callable[[AttentionCall], None] | None) -> torch.Tensor:
            metadata.outside = outside or (lambda call: None)
            return self.model(batch.input_ids[:size], batch.positions[:size], self._kv_caches, metadata)

        return self._graphs.capture_pieces(key, run)

    def _metadata(self, num_seqs: int, num_tokens: int, num_decodes: int) -> AttentionMetadata:
        batch = self._batch
        prefill_start = None
        if num_decodes < num_seqs:
            prefill_start = batch.query_start[num_decodes : num_seqs + 1] - num_decodes
        return AttentionMetadata(
            query_start=batch.query_start[: num_seqs + 1],
            seq_lens=batch.seq_lens[:num_seqs],
            block_tables=batch.block_tables,
            slot_mapping=batch.slot_mapping[:num_tokens],
            query_lens=[],
            kv_lens=[],
            backend=self._backend,
            rows=batch.rows[:num_seqs],
            num_decodes=num_decodes,
            prefill_start=prefill_start,
            plans=dict(self._plans),
        )

    def _ending(self, wanted: torch.Tensor) -> AttentionMetadata:
        """The wanted tokens as decodes, planned. Behind the attention of all layers but the last one."""
        batch, count = self._batch, wanted.shape[0]
        metadata = AttentionMetadata(
            query_start=torch.arange(count + 1, dtype=torch.int32, device=self._device),
            seq_lens=batch.positions.index_select(0, wanted).int() + 1,
            block_tables=batch.block_tables,
            slot_mapping=batch.slot_mapping[:0],
            query_lens=[],
            kv_lens=[],
            backend=self._backend,
            rows=batch.sample_rows[:count],
            num_decodes=count,
            plans=dict(self._plans),
        )
        self._plan(metadata.seq_lens, metadata.query_start, batch.sample_rows[:count])
        return metadata

    def _plan_decodes(self, count: int, fused: bool = False) -> None:
        batch = self._batch
        self._plan(batch.seq_lens[:count], batch.query_start[: count + 1], batch.rows[:count], fused)

    def _plan(self, seq_lens: torch.Tensor, query_start: torch.Tensor, rows: torch.Tensor, fused: bool = False) -> None:
        for window, plan in self._plans.items():
            plan_decode(plan, seq_lens, query_start, rows, self._model_config.num_kv_heads, window, fused)
