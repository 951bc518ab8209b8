"""Run one forward pass on a GPU: as one CUDA graph, as recorded pieces, or as the same kernels one by one.

    full     a batch of decodes, or of a few short prompts, is one graph from row to sampled token
    mixed    any other batch: everything between two attentions is one recorded piece

Whether a graph can hold a step and whether one is captured is decided here and nowhere else. `GraphSizes` says what a
step is padded to; `Graphs` only captures and replays. All that is known ahead (`known_steps.py`) is captured before the
first request, or, where an engine is to start fast, a graph is captured when it is needed for the second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from teachllm.layers.attention import AttentionMetadata
from teachllm.layers.attention_backends.base import AttentionBackend
from teachllm.models.base import Model
from teachllm.spec_decode.step_times import Prior
from teachllm.worker.gpu.attention_inputs import FlatBatch, GPUAttention
from teachllm.worker.gpu.cuda_graphs import AttentionCall, FullKey, Graphs
from teachllm.worker.gpu.device_batch import DeviceBatch
from teachllm.worker.gpu.device_step import DeviceStep
from teachllm.worker.gpu.gpu_sampling import GPUSampling
from teachllm.worker.gpu.known_steps import (
    ALL_VARIANTS,
    VARIANTS,
    decode_steps,
    known_tokens,
    mixed_sizes,
    prompt_steps,
)
from teachllm.worker.gpu.spec_decode.capture_ahead import as_prior, per_token_behind, seconds_of
from teachllm.worker.gpu.spec_decode.draft_progress import Behind
from teachllm.worker.gpu.spec_decode.gpu_drafting import GPUDrafting
from teachllm.worker.kv_cache import KVCache


class GraphRunner:
    """Run the forward pass of a batch that `DeviceBatch` holds, and in a full graph samples and drafts as well.

    Args:
        is_last_stage: this rank has the output head; another stage returns no logits.
        is_eager: never capture a graph.

    Attributes:
        kv_caches: the model's KV caches; set before the first step.
        graph_mode: how the last step ran, see `ModelRunnerOutput`.
    """

    def __init__(
        self,
        *,
        model: Model,
        graphs: Graphs,
        batch: DeviceBatch,
        attention: GPUAttention,
        backend: AttentionBackend,
        sampling: GPUSampling,
        drafting: GPUDrafting | None,
        is_last_stage: bool,
        is_eager: bool,
    ) -> None:
        self.model, self._graphs, self._batch = model, graphs, batch
        self._attention, self._backend = attention, backend
        self._sampling, self._drafting = sampling, drafting
        self._is_last_stage, self._eager, self._sizes = is_last_stage, is_eager, batch.sizes
        self.kv_caches: KVCache = []
        self.graph_mode = "eager"

    # -- in one graph --------------------------------------------------------------------------------------

    def full_key(self, step: DeviceStep, variant: tuple[bool, bool] | None) -> tuple[DeviceStep, FullKey] | None:
        """Return the graph that can hold a step, recorded or not, and the step as padded for it.

        Args:
            variant: of the sampler; None: the step asks for more than a graph samples.

        Returns:
            None if no graph can hold the step.
        """
        drafting, samples = self._drafting, step.is_decode and variant is not None
        if not self._backend.in_graphs or (drafting is not None and drafting.reads_step and not samples):
            return None
        decode_len = step.decode_len if step.is_decode else 0
        # What a graph leaves behind is gone with the next one: a drafter that reads it must be in the same.
        if drafting is not None and samples and (step.speculates or drafting.reads_step):
            # A step verifies and asks for equally many drafts, the larger of both numbers. They differ when a length
            # changes, and a step with some padding takes less than a graph more for each pair.
            most = max(step.decode_len - 1, step.most_next)
            padded = replace(step, decode_len=1 + most, most_next=most)
            if (shape := self._sizes.full(padded)) is not None:
                return padded, FullKey(*shape, 1 + most, variant, most)
            num_drafts: int | None = step.most_next
        else:
            num_drafts = None
        if not decode_len:
            variant = None  # prompts are sampled after their graph: that is launched long before the device gets there
        shape = self._sizes.full(step)
        return None if shape is None else (step, FullKey(*shape, decode_len, variant, num_drafts))

    def full(self, step: DeviceStep, key: FullKey, behind: Sequence[Behind]) -> torch.Tensor | None:
        """Run a step as `full_key` returns it, and return its logits; None if it has sampled.

        Args:
            behind: what a drafter in this graph has to catch up with.
        """
        has_graph = self._graphs.has(key)
        if not has_graph and not self._eager and self._graphs.is_due(key):
            has_graph = self._capture(key)
        self._batch.send(step, key.num_seqs, key.num_tokens)
        if key.num_drafts is not None and self._drafting is not None:
            self._drafting.catch_up(behind)
        self.graph_mode = "full" if has_graph else "eager"
        return self._graphs.replay(key) if has_graph else self.full_step(key)

    def _capture(self, key: FullKey) -> bool:
        """Capture a full graph, on padding alone."""
        self._batch.clear(key.num_seqs, key.num_tokens)
        return self._graphs.capture(key, lambda: self.full_step(key))

    def known_keys(self, is_adaptive: bool) -> list[FullKey]:
        """Return every full graph that may be needed, those with the most tokens first.

        Args:
            is_adaptive: as of `decode_steps`.
        """
        speculates = self._drafting is not None
        decodes = decode_steps(self._batch, is_adaptive).values()
        asked = [(step, variant) for step in decodes for variant in (VARIANTS if speculates else ALL_VARIANTS)]
        asked += [(step, None) for step in prompt_steps(self._sizes)]
        held = [self.full_key(step, variant) for step, variant in asked]
        keys = dict.fromkeys(each[1] for each in held if each is not None)
        return sorted(keys, key=lambda key: key.num_tokens, reverse=True)

    @torch.inference_mode()
    def record_known(self, is_adaptive: bool, progress: Callable[[int, int], None]) -> None:
        """Capture all that may be needed, so that no request waits for a capture. The largest graph comes first: the
        others find room in the memory that it has taken.

        Args:
            is_adaptive: as of `decode_steps`.
            progress: called with (graphs that are recorded, graphs in all).
        """
        if self._eager or not self._backend.in_graphs:
            return
        records = [partial(self._capture, key) for key in self.known_keys(is_adaptive)]
        records += [partial(self._capture_mixed, size) for size in reversed(mixed_sizes(self._sizes))]
        for done, record in enumerate(records, start=1):
            record()
            progress(done, len(records))

    @torch.inference_mode()
    def record_ahead(self, sizes: Sequence[int], is_adaptive: bool, num_blocks: int) -> Prior | None:
        """Capture the decodes of an engine that speculates, and time them if lengths adapt. See `capture_ahead.py`.

        Args:
            sizes: as in `AdaptiveLength`.
            num_blocks: KV blocks that the timed rows may use.

        Returns:
            None if nothing was timed.
        """
        batch, drafting = self._batch, self._drafting
        if self._eager or drafting is None:
            return None
        recorded: dict[tuple[int, int], FullKey] = {}
        seconds: dict[tuple[int, int], float] = {}
        with torch.cuda.device(batch.device):
            steps = decode_steps(batch, is_adaptive)
            for size, step in steps.items():
                for variant in VARIANTS:
                    held = self.full_key(step, variant)
                    assert held is not None
                    if self._graphs.has(held[1]) or self._capture(held[1]):
                        recorded[size] = held[1]
            num_known = known_tokens(batch)
            if not is_adaptive or not num_known:
                return None
            batch.pretend(num_known, num_blocks)
            for size, key in recorded.items():
                batch.send(steps[size], key.num_seqs, key.num_tokens)
                seconds[size] = seconds_of(partial(self._graphs.replay, key), batch)
            behind = per_token_behind(drafting)
            batch.forget()
        return as_prior(seconds, behind, batch, sizes)

    def full_step(self, key: FullKey) -> torch.Tensor | None:
        """Run what a full graph holds: from rows to logits, or to sampled ids and the next drafts."""
        batch, drafting, decode_len = self._batch, self._drafting, key.decode_len
        num_decodes = key.num_seqs if decode_len else 0
        batch.build(key.num_seqs, num_decodes)
        tokens = FlatBatch.of(batch, key.num_seqs, key.num_tokens, num_decodes, decode_len or 1)
        hidden = self._forward(key.num_tokens, self._attention.metadata(tokens, can_fuse=self.model.fuses_decodes))
        if not self._is_last_stage:
            return None
        if not decode_len:
            hidden = hidden.index_select(0, batch.header.logit_index[: key.num_seqs])
        logits = self.model.logits(hidden, sharded=True, in_float32=False)
        if key.variant is None:
            return logits
        self._sampling.plain(logits, key.num_seqs, key.variant, verifies=decode_len > 1)
        if drafting is not None and key.num_drafts is not None:
            drafting.propose_decodes(tokens, key.num_drafts, key.variant[0], hidden)
        return None

    def _forward(self, num_tokens: int, metadata: AttentionMetadata) -> torch.Tensor:
        """Return the hidden states of the batch's first tokens, or of the tokens that `metadata` selects."""
        input_ids, positions = self._batch.input_ids[:num_tokens], self._batch.positions[:num_tokens]
        aux_hidden_states = {} if self._drafting is None else self._drafting.aux_hidden_states()
        return self.model(input_ids, positions, self.kv_caches, metadata, aux_hidden_states)

    # -- anything else -------------------------------------------------------------------------------------

    def mixed(self, step: DeviceStep, logits_indices: torch.Tensor | None) -> torch.Tensor:
        """Return the hidden states of any batch, [num_logits, hidden_size].

        Args:
            logits_indices: the flat tokens whose hidden states are returned; None: all, and the padding after them.
        """
        batch = self._batch
        padded_seqs, size = self.mixed_shape(step)
        is_padded = self._is_padded(step)
        key = _mixed_key(size)
        in_pieces = is_padded and self._graphs.has(key)
        if is_padded and not in_pieces and not self._eager and self._graphs.is_due(key):
            in_pieces = self._capture_mixed(size)
        batch.send(step, padded_seqs, size)
        batch.build(padded_seqs, step.num_decodes)
        tokens = self.tokens_of(step, padded_seqs, size)
        metadata = self._attention.metadata(tokens, can_fuse=False)
        self.graph_mode = "piecewise" if in_pieces else "eager"
        if in_pieces:
            hidden = self._graphs.replay_pieces(key, metadata)
        else:
            if logits_indices is not None and not is_padded and not step.num_drafts:
                metadata.logits_indices = logits_indices
                metadata.last_layer_metadata = (
                    partial(self._last_layer_metadata, logits_indices) if self._backend.splits_decodes else None
                )
            hidden = self._forward(size, metadata)
        if logits_indices is None or metadata.logits_indices is not None:
            return hidden
        return hidden.index_select(0, logits_indices)

    def _is_padded(self, step: DeviceStep) -> bool:
        """Return whether a mixed step is padded; without graphs too, as the same kernels then give the same bits."""
        return self._backend.in_graphs and step.num_tokens <= self._sizes.largest_mixed

    def mixed_shape(self, step: DeviceStep) -> tuple[int, int]:
        """Return (sequences, tokens) of a mixed step, with padding."""
        num_tokens = step.num_tokens
        size = self._sizes.mixed(num_tokens) if self._is_padded(step) else num_tokens
        return len(step.rows) + (size > num_tokens), size

    def _capture_mixed(self, size: int) -> bool:
        """Capture a mixed step of `size` tokens, all padding meanwhile; return False if that fails."""
        batch = self._batch
        batch.slot_mapping[:size].fill_(-1)
        metadata = self._attention.metadata(FlatBatch.of(batch, 1, size, 0))

        def run(outside: Callable[[AttentionCall], None] | None) -> torch.Tensor:
            metadata.outside = outside or (lambda call: None)
            return self._forward(size, metadata)

        return self._graphs.capture_pieces(_mixed_key(size), run)

    def tokens_of(self, step: DeviceStep, num_seqs: int, size: int) -> FlatBatch:
        """Return the flat batch of a mixed step that has been built."""
        tokens = FlatBatch.of(self._batch, num_seqs, size, step.num_decodes, step.decode_len)
        tokens.query_lens = step.query_lens
        tokens.kv_lens = [start + count for start, count in zip(step.starts, step.query_lens, strict=True)]
        if step.num_decodes < num_seqs:
            tokens.num_decode_tokens = sum(step.query_lens[: step.num_decodes])
        return tokens

    def _last_layer_metadata(self, logits_indices: torch.Tensor) -> AttentionMetadata:
        """Plan the tokens with logits as decodes; called after the attention of all layers but the last one."""
        batch, count = self._batch, logits_indices.shape[0]
        positions = batch.positions.index_select(0, logits_indices)
        tokens = FlatBatch(
            input_ids=logits_indices,
            positions=positions,
            slot_mapping=batch.slot_mapping[:0],
            seq_lens=positions.int() + 1,
            query_start=torch.arange(count + 1, dtype=torch.int32, device=self._batch.device),
            rows=batch.header.sample_rows[:count],
            num_decodes=count,
        )
        return self._attention.metadata(tokens, can_fuse=False)


def _mixed_key(size: int) -> tuple[str, int]:
    """Name the pieces of mixed steps of `size` tokens."""
    return "mixed", size
