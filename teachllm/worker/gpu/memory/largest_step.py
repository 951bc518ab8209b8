"""Run the step by which memory is measured: as many tokens as a step may have, all padding, and as many logits.

No attention is computed, because it reads and writes tensors that exist anyway. vLLM's `profile_run` does the same. A
runner runs this step on its GPU, and `meta_runner.py` runs it on meta tensors: prediction and measurement are one code
path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from teachllm.models.base import Model
from teachllm.sampling.shared_vocabulary import Columns
from teachllm.worker.gpu.attention_inputs import FlatBatch, GPUAttention
from teachllm.worker.gpu.device_batch import DeviceBatch
from teachllm.worker.gpu.spec_decode.gpu_drafting import GPUDrafting
from teachllm.worker.kv_cache import KVCache


@dataclass(frozen=True, kw_only=True)
class LargestStep:
    """Hold what the largest step runs with.

    Attributes:
        drafting: the drafter and its buffers; None if the engine does not speculate.
        columns: this rank's part of the vocabulary; None if another stage computes the logits.
    """

    model: Model
    batch: DeviceBatch
    attention: GPUAttention
    drafting: GPUDrafting | None
    columns: Columns | None

    def forward(self, kv_caches: KVCache, num_tokens: int | None = None) -> torch.Tensor:
        """Compute the hidden states of `num_tokens` tokens, or of as many as a step may have if it is None."""
        batch = self.batch
        batch.slot_mapping.fill_(-1)
        size = batch.input_ids.shape[0] if num_tokens is None else num_tokens
        tokens = FlatBatch.of(batch, 1, size, 0)
        metadata = self.attention.metadata(tokens)
        metadata.outside = lambda call: None
        return self.model(tokens.input_ids, tokens.positions, kv_caches, metadata)

    def run(
        self, kv_caches: KVCache, num_sampling_bytes: int, num_tokens: int | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Compute hidden states, drafts and all logits, and allocate what sampling takes beside them.

        Args:
            num_tokens: as in `forward`.

        Returns:
            What is alive at the end: hidden states; on the last stage this rank's logits, and all ranks' if they are
            more; the sampler's bytes.
        """
        hidden = self.forward(kv_caches, num_tokens)
        if self.drafting is not None:
            self.drafting.largest_step(hidden)
        logits: list[torch.Tensor] = []
        if self.columns is not None:
            logits.append(
                self.model.logits(
                    hidden.index_select(0, self.batch.header.logit_index[:-1]),  # freed before sampling; not padding's
                    sharded=True,
                    in_float32=False,
                )
            )
            if not self.columns.are_all:
                logits.append(self.columns.gathered(logits[0]))
        return hidden, *logits, torch.empty(num_sampling_bytes, dtype=torch.uint8, device=self.batch.device)
