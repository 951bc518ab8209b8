"""`DraftBatch` on a GPU: what a drafter reads and writes of the rows of a `DeviceBatch`, as flat tokens.

All requests draft as deep as one does, and their nodes of a level are computed together, whether or not they go on
there: the launches are the same whatever holds, so a graph can contain them. Who has nothing to compute is told so by
its slots. Tensors are those of `GPUDrafting` and stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from teachllm.spec_decode.drafter import FlatTokens
from teachllm.worker.gpu.attention_inputs import FlatBatch
from teachllm_kernels.speculation.draft_rows import draft_inputs, following_ids

if TYPE_CHECKING:
    from teachllm.worker.gpu.spec_decode.gpu_drafting import GPUDrafting


@dataclass(slots=True)
class Asking:
    """Name the requests that sample, and may ask for drafts.

    Attributes:
        rows: [num_seqs] int32, -1 is padding.
        num_next: [num_seqs] int32, for how many; for none, the drafter follows all the same.
        num_drafts: the most.
        any_random: one of them samples at random.
        newest, newest_token: [num_seqs] int32, `DeviceBatch.last` and `last_token` of each.
    """

    rows: torch.Tensor
    num_next: torch.Tensor
    num_drafts: int
    any_random: bool
    newest: torch.Tensor
    newest_token: torch.Tensor


class GPUDraftBatch:
    """For requests that the drafter has followed so far.

    Args:
        step: the tokens that the model has just computed.
        hidden: see `DraftBatch`; None: the drafter reads none.
    """

    def __init__(self, drafting: GPUDrafting, asking: Asking, step: FlatBatch, hidden: torch.Tensor | None) -> None:
        self._drafting, self._asking, self._step = drafting, asking, step
        self._rows, self._tree = asking.rows, drafting.tree
        self.num_levels = drafting.tree.num_levels(asking.num_drafts)
        self.hidden = drafting.no_hidden if hidden is None else hidden
        self.features: Mapping[int, torch.Tensor] = drafting.features
        self.newest = self.last = asking.newest

    def behind(self) -> FlatTokens:
        self.last = self._drafting.second[: self._rows.shape[0]]
        return self._flat(self._fill(num_tokens=2, offset=-2, follows=True))

    def verified(self) -> tuple[torch.Tensor, FlatTokens]:
        # All tokens of the step, those that are true together at the head of each request's: a prompt's, or the newest
        # token's and the path that held. What follows them is overwritten before anything reads it.
        step, drafting, batch = self._step, self._drafting, self._drafting.batch
        size = step.input_ids.shape[0]
        following, positions = drafting.input_ids[:size], drafting.positions[:size]
        following_ids(step.rows, step.query_start, step.seq_lens, batch.token_ids, following, positions)
        self.last = self._asking.newest_token
        places = drafting.in_order[:size] if batch.places is None else batch.places[:size]
        # A path that held is a chain by now: no mask of the tree.
        return places, (following, positions, drafting.attention.metadata(replace(step, first_place=None)))

    def push(self, level: int, logits: torch.Tensor) -> None:
        self._drafting.draw(level, logits, self._asking)

    def pushed(self, level: int, shift: int = 0) -> FlatTokens:
        nodes, least = self._tree.levels[level], self._tree.levels[level + 1][0] + 1
        depth = None if self._tree.is_chain else level + shift
        tokens = self._fill(len(nodes), nodes[0] + shift, id_shift=-shift, least=least, depth=depth)
        tokens.first_place = None if self._tree.is_chain else nodes[0] + 1
        return self._flat(tokens)

    def parents(self, level: int) -> torch.Tensor:
        parents = self._drafting.parents[level]
        return parents[: self._rows.shape[0] * len(self._tree.levels[level])]

    def _fill(
        self,
        num_tokens: int,
        offset: int,
        id_shift: int = 0,
        least: int = 1,
        depth: int | None = None,
        follows: bool = False,
    ) -> FlatBatch:
        drafting, batch, count = self._drafting, self._drafting.batch, self._rows.shape[0]
        tokens = drafting.flat(self._rows, drafting.starts(num_tokens)[: count + 1], num_tokens * count)
        tokens.num_decodes, tokens.decode_len = count, num_tokens
        draft_inputs(
            rows=self._rows,
            num_drafts=self._asking.num_next,
            token_ids=batch.token_ids,
            num_known=batch.num_known,
            block_tables=batch.block_tables,
            block_size=batch.block_size,
            input_ids=tokens.input_ids,
            positions=tokens.positions,
            slot_mapping=tokens.slot_mapping,
            seq_lens=tokens.seq_lens,
            num_tokens=num_tokens,
            offset=offset,
            id_shift=id_shift,
            least=least,
            depth=depth,
            follows=follows,
        )
        return tokens

    def _flat(self, tokens: FlatBatch) -> FlatTokens:
        return tokens.input_ids, tokens.positions, self._drafting.attention.metadata(tokens)


class UndraftedBatch:
    """Tokens that a drafter computes, and drafts nothing behind.

    Args:
        hidden: see `DraftBatch`; None: a drafter that catches up reads none.
    """

    num_levels = 0

    def __init__(self, drafting: GPUDrafting, tokens: FlatTokens, hidden: torch.Tensor | None = None) -> None:
        self._tokens, self._places = tokens, drafting.in_order[: tokens[0].shape[0]]
        self.hidden = drafting.no_hidden if hidden is None else hidden
        self.features: Mapping[int, torch.Tensor] = drafting.features
        self.last = self.newest = self._places[:0]

    def behind(self) -> FlatTokens:
        return self._tokens

    def verified(self) -> tuple[torch.Tensor, FlatTokens]:
        return self._places, self._tokens

    def push(self, level: int, logits: torch.Tensor) -> None:
        raise AssertionError("nothing is drafted")

    def pushed(self, level: int, shift: int = 0) -> FlatTokens:
        raise AssertionError("nothing is drafted")

    def parents(self, level: int) -> torch.Tensor:
        raise AssertionError("nothing is drafted")
