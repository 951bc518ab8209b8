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
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from teachllm.config import EngineConfig
from teachllm.core.memory import MemoryPlan
from teachllm.core.scheduler_output import SchedulerOutput, TokenLogprobs
from teachllm.layers.attention import AttentionMetadata
from teachllm.layers.attention_backends.base import AttentionNeeds
from teachllm.layers.attention_backends.selection import select_backend
from teachllm.models.loader import load_model
from teachllm.models.model_config import ModelConfig
from teachllm.sampling.sampler import Sampler, SamplerOutput
from teachllm.sampling.verify import Proposals
from teachllm.spec_decode.load import DrafterConfig, load_drafter
from teachllm.worker.cuda_graphs import LARGEST_MIXED_GRAPH, AttentionCall, Graphs, padded_size
from teachllm.worker.device_batch import LONGEST_DECODE, DeviceBatch, DeviceStep
from teachllm.worker.gpu_drafting import GPUDrafting
from teachllm.worker.kv_cache import (
    KVCache,
    allocate_kv_cache,
    allocate_layers,
    attention_needs,
    drafter_needs,
    measured_plan,
    plan_memory,
)
from teachllm.worker.launched_step import LaunchedStep, PendingStep
from teachllm.worker.memory_needs import SAMPLED_AT_ONCE, compare, measure_needs, sampling_bytes, ungated_bytes
from teachllm.worker.prompt_scores import PromptScores
from teachllm_kernels.compile_ahead import compiling_ahead
from teachllm_kernels.decode_plan import DecodePlan, plan_decode
from teachllm_kernels.draft_rows import synthetic_verdict
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
        drafter: DrafterConfig | None = None,
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
        speculation = config.speculative_config
        if speculation is not None and not self._backend.in_graphs:
            raise ValueError(
                f"attention_backend={self._backend.name!r} verifies no drafts: set attention_backend=triton, or leave "
                "speculative_config out"
            )
        self._eager = config.enforce_eager or not self._backend.in_graphs
        self._max_num_seqs = config.max_num_seqs
        self._model_config = model_config
        free, total = torch.cuda.mem_get_info(device)
        if drafter is not None and not drafter.tree.is_chain:
            raise ValueError("speculative_token_tree: a GPU verifies chains only: leave it out, or set device=cpu")
        predicted = plan_memory(config, model_config, device, drafter)  # before any weight is read
        allocated = torch.cuda.memory_allocated(device)
        self.model: Any = load_model(model_config, config, device, progress)
        draft_caches: KVCache = []
        loaded = None if drafter is None else load_drafter(drafter, config, self.model, draft_caches, device)
        weights = torch.cuda.memory_allocated(device) - allocated
        self._batch = DeviceBatch(
            *(config.max_num_seqs, config.max_model_len, config.block_size, config.max_num_batched_tokens, device),
            max_drafts=0 if speculation is None else speculation.max_drafts,
        )
        self._sampler = Sampler(config.max_num_seqs, model_config.vocab_size, device)
        self._graphs: Graphs[Any] = Graphs(device)
        self._graph_mode = "eager"  # of the last step, see `ModelRunnerOutput`
        self._plans = self._decode_plans(needs, 1 + self._batch.max_drafts)
        self._synthetic_rate = None if speculation is None else speculation.synthetic_rate
        self._drafting: GPUDrafting | None = None
        if speculation is not None and (loaded is not None or speculation.method == "ngram"):
            own = needs if drafter is None else drafter_needs(drafter, needs)
            plans = self._decode_plans(own, max(1 + self._batch.max_drafts, 2))
            workers = (self._batch, self._sampler, self._backend)
            self._drafting = GPUDrafting(speculation, loaded, model_config, *workers, plans, own.num_kv_heads)
        self._allocate(config, drafter, 1, draft_caches)  # to measure with
        self.memory = self._measured(predicted, config, weights, free, total)
        self._allocate(config, drafter, self.memory.num_blocks, draft_caches)
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

    def _decode_plans(self, needs: AttentionNeeds, decode_len: int) -> dict[int | None, DecodePlan]:
        """Room for the plans of some layers' decodes, of so many tokens each, by window."""
        if not self._backend.splits_decodes:
            return {}
        dtype, group = getattr(torch, needs.dtype), needs.num_heads // needs.num_kv_heads
        on_hopper = fits_hopper_decode(self._device, dtype, needs.head_size, group, needs.block_size)
        heads = (needs.num_heads, needs.num_kv_heads, needs.head_size)
        options: dict[str, Any] = {"max_query_len": min(decode_len, LONGEST_DECODE), "on_hopper": on_hopper}
        return {w: DecodePlan.allocate(self._max_num_seqs, *heads, self._device, **options) for w in needs.windows}

    def _allocate(
        self, config: EngineConfig, drafter: DrafterConfig | None, num_blocks: int, draft_caches: KVCache
    ) -> None:
        """KV caches of the model and, into `draft_caches`, of the drafter, in place of those that there were."""
        self._kv_caches = []  # a block may be as long as the longest sequence
        draft_caches.clear()
        self._kv_caches = allocate_kv_cache(self._model_config, num_blocks, config.block_size, self._device)
        if drafter is not None:
            draft_caches += allocate_layers(drafter.specs, drafter.dtype, num_blocks, config.block_size, self._device)

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
                    self._full_step(*shape, int(step.is_decode), (False, False))

    @torch.inference_mode()
    def _largest_step(self, kv_caches: KVCache, num_sampling_bytes: int) -> tuple[torch.Tensor, ...]:
        """As many tokens as a step may have, all padding, as many logits, and room to sample from them."""
        batch, size = self._batch, self._batch.input_ids.shape[0]
        batch.slot_mapping.fill_(-1)
        metadata = self._metadata(1, size, 0)
        metadata.outside = lambda call: None
        hidden = self.model(batch.input_ids, batch.positions, kv_caches, metadata)
        logits = self.model.lm_logits(hidden.index_select(0, batch.logit_index[:-1]))  # none of padding
        if self._drafting is not None:
            self._drafting.largest_step(hidden)
        return hidden, logits, torch.empty(num_sampling_bytes, dtype=torch.uint8, device=self._device)

    def _execute(self, plan: SchedulerOutput) -> LaunchedStep:
        drafting, kept = self._drafting, (self._sampler, self._prompt_scores)
        self._batch.update(plan, kept if drafting is None else (*kept, drafting))
        step = self._batch.prepare(plan)
        behind = None if drafting is None else drafting.note(plan.scheduled, step.rows)
        rows = step.sampled_rows
        variant = self._sampler.plain_variant(rows)
        scores = self._prompt_scores.any_due(plan.scheduled, step.rows)
        if not scores and self._backend.in_graphs:
            full = step.full_graph_shape(self._max_num_seqs, self._batch.input_ids.shape[0])
            # What a graph leaves behind is gone with the next one: a drafter that reads it must be in the same.
            is_whole = step.is_decode and variant is not None and behind is None
            if full is not None and (is_whole or drafting is None or not drafting.reads_step):
                num_inside = None
                if drafting is not None and is_whole and (step.num_next or drafting.reads_step):
                    num_inside = step.most_next
                logits = self._full(step, *full, variant, num_inside)
                to_draft = None
                if drafting is not None and num_inside is None and (step.num_next or behind):
                    to_draft = partial(drafting.propose, step, *full, behind or [], hidden=self._batch.input_ids)
                return self._launched(step, rows, variant, logits, None, to_draft)
        wanted = self._batch.logit_index[: len(rows)] if rows else None
        reads_all = drafting is not None and drafting.drafter is not None and drafting.drafter.reads_all_hidden
        hidden = self._mixed(step, None if scores or reads_all else wanted)
        scores_all, prompt_logprobs = scores or reads_all, None
        if scores:
            where = (plan.scheduled, step.rows, step.starts, hidden, self._batch.token_ids)
            prompt_logprobs = self._prompt_scores.score(*where)
        logits = None
        if wanted is not None:
            chosen = hidden.index_select(0, wanted) if scores_all else hidden
            logits = self.model.lm_logits(chosen)
            hidden = hidden if reads_all else chosen
        to_draft = None
        if drafting is not None:
            to_draft = partial(drafting.propose, step, *self._mixed_shape(step), behind or [], hidden=hidden)
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
        """A step under way."""
        batch = self._batch
        told = (batch.output, prompt_logprobs, self._graph_mode)
        return LaunchedStep(step, rows, variant, logits, *told, num_fields=batch.num_fields, to_draft=to_draft)

    def _sample(self, launched: LaunchedStep) -> PendingStep:
        rows, variant = launched.rows, launched.variant
        outputs: list[SamplerOutput] = []
        if launched.logits is not None:
            logits, num_seqs = launched.logits[: len(rows)], len(launched.step.sampling)
            if variant is not None:
                self._sample_plain(logits, num_seqs, variant, bool(launched.step.num_drafts))
            else:
                proposals = self._proposals(num_seqs, len(rows), bool(launched.step.num_drafts))
                sampled, outputs = self._sample_any(logits, rows, proposals)
                self._take(sampled, num_seqs)
            launched.logits = None  # the next step may have the memory
        pending = PendingStep(launched, outputs)
        if launched.to_draft is not None:  # the host need not wait for it
            launched.to_draft(any_random=variant is None or variant[0])
            launched.to_draft = None
        return pending

    def _sample_plain(self, logits: torch.Tensor, num_seqs: int, variant: tuple[bool, bool], verifies: bool) -> None:
        """Samples positions of `num_seqs` sequences, [num_logits, vocab_size], that ask for no more than filters."""
        batch, count = self._batch, logits.shape[0]
        rows = batch.sample_rows[:count]
        if not batch.max_drafts:
            batch.append(self._sampler.sample_plain(logits, rows, batch.num_known, variant))
            return
        positions = batch.positions.index_select(0, batch.logit_index[:count])
        proposals = self._proposals(num_seqs, count, verifies and variant[0])
        self._take(self._sampler.sample_positions(logits, rows, positions, variant, proposals), num_seqs)

    def _proposals(self, num_seqs: int, num_logits: int, verifies: bool) -> Proposals | None:
        """What positions were proposed by drawing."""
        return self._drafting.proposals(num_seqs, num_logits) if self._drafting is not None and verifies else None

    def _take(self, sampled: torch.Tensor, num_seqs: int) -> None:
        """Sampled tokens of `num_seqs` sequences become known, with the drafts that they confirm."""
        batch = self._batch
        if not batch.max_drafts:
            batch.append(sampled)
            return
        if self._synthetic_rate is not None:
            where = (batch.sample_first[: num_seqs + 1], batch.sample_rows, sampled, batch.token_ids, batch.num_known)
            synthetic_verdict(*where, self._synthetic_rate, batch.max_drafts)
        batch.accept(sampled, num_seqs)

    def _sample_any(
        self, logits: torch.Tensor, rows: list[int], proposals: Proposals | None = None
    ) -> tuple[torch.Tensor, list[SamplerOutput]]:
        """Token ids, and what the sampler makes of the rows, whatever they ask for.

        A few rows at a time, which bounds the memory that it takes.
        """
        batch = self._batch
        lengths = batch.positions.index_select(0, batch.logit_index[: len(rows)]) + 1
        outputs: list[SamplerOutput] = []
        for first in range(0, len(rows), SAMPLED_AT_ONCE):
            some = slice(first, first + SAMPLED_AT_ONCE)
            theirs = proposals
            if proposals is not None:
                theirs = replace(proposals, siblings=proposals.siblings[some], draft_rows=proposals.draft_rows[some])
            output = self._sampler.sample(logits[some].float(), rows[some], lengths[some], batch.token_ids, theirs)
            outputs.append(output)
        return torch.cat([output.token_ids for output in outputs]), outputs

    # -- in one graph --------------------------------------------------------------------------------------

    def _full(
        self,
        step: DeviceStep,
        num_seqs: int,
        num_tokens: int,
        variant: tuple[bool, bool] | None,
        num_drafts: int | None,
    ) -> torch.Tensor | None:
        """The logits of a step padded to a graph's size; None if it has sampled.

        Args:
            num_drafts: to propose in it, at most; None: the drafter is not in it.
        """
        decode_len = step.decode_len if step.is_decode else 0
        what = (num_seqs, num_tokens, decode_len, variant, num_drafts)
        key = ("full", *what)
        has_graph = self._graphs.has(key)
        if not has_graph and not self._eager and self._graphs.is_due(key):
            self._batch.clear(num_seqs, num_tokens)  # what is captured also runs once: on padding alone
            has_graph = self._graphs.capture(key, lambda: self._full_step(*what))
        self._batch.send(step, num_seqs, num_tokens)
        self._graph_mode = "full" if has_graph else "eager"
        return self._graphs.replay(key) if has_graph else self._full_step(*what)

    def _full_step(
        self,
        num_seqs: int,
        num_tokens: int,
        decode_len: int,
        variant: tuple[bool, bool] | None,
        num_drafts: int | None = None,
    ) -> torch.Tensor | None:
        """From rows to logits, or to sampled ids and the next drafts: what a full graph holds.

        Args:
            decode_len: tokens of a decode, at most; 0: all are prompts.
            num_drafts: as of `_full`.
        """
        batch, drafting = self._batch, self._drafting
        batch.build(num_seqs)
        can_fuse = decode_len == 1 and self.model.fuses_decodes and self._backend.splits_decodes
        is_fused = can_fuse and all(plan.fuses(num_seqs) for plan in self._plans.values())
        if decode_len:
            self._plan_decodes(num_seqs, decode_len, is_fused)
        metadata = self._metadata(num_seqs, num_tokens, num_seqs if decode_len else 0, decode_len or 1)
        metadata.is_fused = is_fused
        hidden = self._forward(num_tokens, metadata)
        if not decode_len:
            hidden = hidden.index_select(0, batch.logit_index[:num_seqs])
        logits = self.model.lm_logits(hidden)
        if variant is None:
            return logits
        self._sample_plain(logits, num_seqs, variant, verifies=decode_len > 1)
        if drafting is not None and num_drafts is not None:
            drafting.propose_decodes(num_seqs, num_tokens, decode_len, num_drafts, variant[0], hidden)
        return None

    def _forward(self, num_tokens: int, metadata: AttentionMetadata) -> torch.Tensor:
        """Hidden states of the batch's first tokens, or of the wanted ones."""
        batch, taps = self._batch, {} if self._drafting is None else self._drafting.taps()
        tapped = {"taps": taps} if taps else {}
        return self.model(
            batch.input_ids[:num_tokens], batch.positions[:num_tokens], self._kv_caches, metadata, **tapped
        )

    # -- anything else -------------------------------------------------------------------------------------

    def _mixed(self, step: DeviceStep, wanted: torch.Tensor | None) -> torch.Tensor:
        """Hidden states of any batch, [num_wanted, hidden_size]; None: of all tokens and the padding behind them."""
        batch = self._batch
        padded_seqs, size = self._mixed_shape(step)
        is_padded = self._is_padded(step)
        key = ("mixed", size)
        in_pieces = is_padded and self._graphs.has(key)
        if is_padded and not in_pieces and not self._eager and self._graphs.is_due(key):
            in_pieces = self._capture_mixed(key, size)
        batch.send(step, padded_seqs, size)
        batch.build(padded_seqs)
        if step.num_decodes:
            self._plan_decodes(step.num_decodes, step.decode_len)
        num_decode_tokens = sum(step.query_lens[: step.num_decodes])
        metadata = self._metadata(padded_seqs, size, step.num_decodes, step.decode_len, num_decode_tokens)
        self._graph_mode = "piecewise" if in_pieces else "eager"
        metadata.query_lens = step.query_lens
        metadata.kv_lens = [start + count for start, count in zip(step.starts, step.query_lens, strict=True)]
        if in_pieces:
            hidden = self._graphs.replay_pieces(key, metadata)
        else:
            if wanted is not None and not is_padded and not step.num_drafts:
                metadata.wanted = wanted
                metadata.ending = partial(self._ending, wanted) if self._backend.splits_decodes else None
            hidden = self._forward(size, metadata)
        return hidden if wanted is None or metadata.wanted is not None else hidden.index_select(0, wanted)

    def _is_padded(self, step: DeviceStep) -> bool:
        """Whether a mixed step is. Without graphs too: the same kernels then give the same bits."""
        return self._backend.in_graphs and step.num_tokens <= LARGEST_MIXED_GRAPH

    def _mixed_shape(self, step: DeviceStep) -> tuple[int, int]:
        """(sequences, tokens) of a mixed step, with padding."""
        num_tokens = step.num_tokens
        size = padded_size(num_tokens, self._batch.input_ids.shape[0]) if self._is_padded(step) else num_tokens
        return len(step.rows) + (size > num_tokens), size

    def _capture_mixed(self, key: tuple[str, int], size: int) -> bool:
        """Records a mixed step of `size` tokens; they are all padding meanwhile. False if that cannot be done."""
        batch = self._batch
        batch.slot_mapping[:size].fill_(-1)
        metadata = self._metadata(1, size, 0)

        def run(outside: Callable[[AttentionCall], None] | None) -> torch.Tensor:
            metadata.outside = outside or (lambda call: None)
            return self._forward(size, metadata)

        return self._graphs.capture_pieces(key, run)

    def _metadata(
        self,
        num_seqs: int,
        num_tokens: int,
        num_decodes: int,
        decode_len: int = 1,
        num_decode_tokens: int | None = None,
    ) -> AttentionMetadata:
        batch = self._batch
        prefill_start = None
        if num_decodes < num_seqs:
            first = num_decodes if num_decode_tokens is None else num_decode_tokens
            prefill_start = batch.query_start[num_decodes : num_seqs + 1] - first
        elif num_decode_tokens is None:
            num_decode_tokens = num_tokens
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
            decode_len=decode_len,
            num_decode_tokens=num_decode_tokens,
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

    def _plan_decodes(self, count: int, decode_len: int = 1, fused: bool = False) -> None:
        batch = self._batch
        self._plan(batch.seq_lens[:count], batch.query_start[: count + 1], batch.rows[:count], decode_len, fused)

    def _plan(
        self,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor,
        rows: torch.Tensor,
        decode_len: int = 1,
        fused: bool = False,
    ) -> None:
        for window, plan in self._plans.items():
            seen = None if window is None else window + decode_len - 1
            plan_decode(plan, seq_lens, query_start, rows, self._model_config.num_kv_heads, seen, fused)
