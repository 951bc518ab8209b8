"""From a step's logits to known tokens, on a GPU: what is sampled is compared with drafts and written into the rows.

Rows that ask for no more than temperature and filters are sampled by a kernel or two, in a graph if there is one. All
others go the sampler's general way, a few at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from teachllm.sampling.sampler import Sampler, SamplerOutput
from teachllm.sampling.shared_vocabulary import Columns
from teachllm.sampling.verify import Proposals
from teachllm.worker.gpu.device_batch import DeviceBatch
from teachllm.worker.gpu.spec_decode.gpu_drafting import GPUDrafting
from teachllm.worker.prompt_logprobs import SAMPLED_AT_ONCE
from teachllm_kernels.attention.kv_move import KVMover
from teachllm_kernels.speculation.verify_drafts import synthetic_verdict


class GPUSampling:
    """Samples positions of a `DeviceBatch`.

    Args:
        drafting: knows what drafts were drawn from; None: nothing drafts here.
        synthetic_rate: see `SpeculativeConfig`.
        columns: which of the logits this rank has.

    Attributes:
        mover: moves K and V of what holds of a tree; None: drafts are chains, or there are none.
    """

    def __init__(
        self,
        batch: DeviceBatch,
        sampler: Sampler,
        drafting: GPUDrafting | None,
        synthetic_rate: float | None,
        columns: Columns,
    ) -> None:
        self._batch, self._sampler, self._drafting = batch, sampler, drafting
        self._synthetic_rate, self._columns = synthetic_rate, columns
        self.mover: KVMover | None = None

    def plain(self, logits: torch.Tensor, num_seqs: int, variant: tuple[bool, bool], verifies: bool) -> None:
        """Sample positions of `num_seqs` sequences, [num_logits, own columns], that ask for no more than filters."""
        batch, count = self._batch, logits.shape[0]
        rows = batch.header.sample_rows[:count]
        if batch.tree is None:
            batch.append(self.tokens(logits, rows, variant))
            return
        logits = self._columns.gathered(logits)
        positions = batch.positions.index_select(0, batch.header.logit_index[:count])
        proposals = self._proposals(num_seqs, count, verifies and variant[0])
        self._take(self._sampler.sample_positions(logits, rows, positions, variant, proposals), num_seqs)

    def tokens(self, logits: torch.Tensor, rows: torch.Tensor, variant: tuple[bool, bool]) -> torch.Tensor:
        """Return [R] int64, the tokens of as many request rows, [R, own columns], that ask for no more than filters.

        Where ranks have some columns each, logits are gathered only for filters.
        """
        columns, (_, any_filtered) = self._columns, variant
        is_shared = not columns.are_all and columns.each_has_some and not any_filtered
        whole = logits if is_shared else columns.gathered(logits)
        known = self._batch.num_known
        return self._sampler.sample_plain(whole, rows, known, variant, columns if is_shared else None)

    def any(self, logits: torch.Tensor, rows: list[int], num_seqs: int, places: Sequence[int]) -> list[SamplerOutput]:
        """Sample positions whatever they ask for, a few at a time, which bounds the memory that it takes.

        Args:
            logits: [num_logits, own columns].
            rows: the request row of each.
            places: see `DeviceBatch.histories`.

        Returns:
            What the sampler makes of them, in order.
        """
        batch, verifies = self._batch, any(places)
        proposals = self._proposals(num_seqs, len(rows), verifies)
        lengths = batch.positions.index_select(0, batch.header.logit_index[: len(rows)]) + 1
        outputs: list[SamplerOutput] = []
        for first in range(0, len(rows), SAMPLED_AT_ONCE):
            some = slice(first, first + SAMPLED_AT_ONCE)
            theirs = proposals
            if proposals is not None:
                theirs = replace(proposals, siblings=proposals.siblings[some], draft_rows=proposals.draft_rows[some])
            output = self._sampler.sample(
                self._columns.gathered(logits[some]).float(),
                rows[some],
                lengths[some],
                batch.token_ids,
                theirs,
                batch.histories(some, places) if verifies else None,
            )
            outputs.append(output)
        self._take(torch.cat([output.token_ids for output in outputs]), num_seqs)
        return outputs

    def _proposals(self, num_seqs: int, num_logits: int, verifies: bool) -> Proposals | None:
        """Return what positions were proposed by drawing."""
        return self._drafting.proposals(num_seqs, num_logits) if self._drafting is not None and verifies else None

    def _take(self, sampled: torch.Tensor, num_seqs: int) -> None:
        """Add sampled tokens of `num_seqs` sequences to the known ones, with the drafts that they confirm."""
        batch = self._batch
        if batch.tree is None:
            batch.append(sampled)
            return
        first = batch.header.sample_first[: num_seqs + 1]
        if self._synthetic_rate is not None:
            synthetic_verdict(
                first=first,
                rows=batch.header.sample_rows,
                sampled=sampled,
                token_ids=batch.token_ids,
                num_known=batch.num_known,
                children=batch.tree.children,
                rate=self._synthetic_rate,
            )
        batch.accept(sampled, num_seqs)
        if self.mover is not None:
            self.mover.move(batch.path[:num_seqs], first, batch.header.sample_rows, batch.num_known, batch.block_tables)
