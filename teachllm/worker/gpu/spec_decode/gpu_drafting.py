"""Drafting on a GPU: as `drafting.py`, on rows that live on the device, without a word from the host.

The host counts on every draft it has asked for and learns what held a step later. A batch of decodes is drafted for
inside the graph that verified it; behind a step with prompts the same calls are launched one by one.

A draft model computes two tokens of each request that it is in step with (`draft_progress.py`), whatever held: the
newest, and the one before. Of who asks for no drafts it computes the latter alone; the newest one's block may be
another's yet. What it is behind with is a pass of its own, before the graph.

Drafts of requests that sample at random are drawn, and the logits they were drawn from are kept for the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from teachllm.core.scheduler_output import NewRow, ScheduledRequest
from teachllm.layers.dtypes import torch_dtype
from teachllm.models.base import AuxOut
from teachllm.models.model_config import ModelConfig
from teachllm.sampling.sampler import Sampler
from teachllm.sampling.transfers import to_device
from teachllm.sampling.verify import Proposals
from teachllm.spec_decode.drafter import ModelDrafter
from teachllm.spec_decode.tree import DraftTree
from teachllm.speculative_config import SpeculativeConfig
from teachllm.worker.gpu.attention_inputs import FlatBatch, GPUAttention
from teachllm.worker.gpu.device_batch import DeviceBatch
from teachllm.worker.gpu.device_step import DeviceStep
from teachllm.worker.gpu.spec_decode.draft_progress import Behind, DraftProgress, in_parts
from teachllm.worker.gpu.spec_decode.gpu_draft_batch import Asking, GPUDraftBatch, UndraftedBatch
from teachllm_kernels.speculation.draft_rows import push
from teachllm_kernels.speculation.prompt_lookup import prompt_lookup_triton
from teachllm_kernels.speculation.verify_drafts import draft_proposals
from teachllm_kernels.step_inputs import step_inputs


class GPUDrafting:
    """A drafter at work on the rows of a `DeviceBatch`.

    Args:
        drafter: None for prompt lookup.
        tree: the shape of its drafts.
        model: which it drafts for.
        attention: of the drafter's layers.

    Attributes:
        reads_step: it needs hidden states or features of every step.
        features: by layer [max_num_tokens, hidden_size], where a step leaves them.
    """

    def __init__(
        self,
        speculation: SpeculativeConfig,
        drafter: ModelDrafter | None,
        tree: DraftTree,
        model: ModelConfig,
        batch: DeviceBatch,
        sampler: Sampler,
        attention: GPUAttention,
    ) -> None:
        dtype, vocab_size, max_num_tokens = torch_dtype(model.dtype), model.vocab_size, batch.input_ids.shape[0]
        self.drafter, self.tree = drafter, tree
        self.reads_step = drafter is not None and (drafter.follows_always or not drafter.has_layers)
        self._speculation = speculation
        self._batch, self._sampler, self.attention = batch, sampler, attention
        device, num_rows = batch.device, batch.num_known.shape[0]
        widths = [len(nodes) for nodes in tree.levels]
        self._room = max(max_num_tokens, max(2, *widths) * (num_rows + 1))
        self.input_ids, self.positions, self.slot_mapping = (
            torch.zeros(self._room, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.seq_lens = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self.in_order = torch.arange(self._room, device=device)
        # First tokens of sequences of so many tokens each, and the last ones of those of two.
        each = torch.arange(num_rows + 2, dtype=torch.int32, device=device)
        self._starts = {num: num * each for num in {1, 2, *widths}}
        self.second = self._starts[2] + 1
        self._levels = _levels(tree, num_rows + 1, device)
        self.parents = [level.parents for level in self._levels]
        layers = () if drafter is None else drafter.feature_layers
        size = (max_num_tokens, model.hidden_size)
        self.features = {layer: torch.zeros(size, dtype=dtype, device=device) for layer in layers}
        self.no_hidden = torch.empty((0, model.hidden_size), dtype=dtype, device=device)
        self.keeps_logits = drafter is not None
        self._num_inner = len(tree.inner)
        kept = (num_rows + 1) * self._num_inner if self.keeps_logits else 0  # a row of padding has its place, too
        self.draft_logits = torch.zeros((kept, vocab_size), dtype=dtype, device=device)
        self._vocab_size = vocab_size
        self._progress = DraftProgress(batch.block_size, batch.max_drafts)

    def open_rows(self, opened: Sequence[tuple[int, NewRow]]) -> None:
        """Do nothing: nothing is computed of these rows yet, and `note` finds from where on."""

    def close_row(self, row: int) -> None:
        """Forget the request in `row`."""
        self._progress.close_row(row)

    def starts(self, num_tokens: int) -> torch.Tensor:
        """Return where each sequence's flat tokens begin if all have `num_tokens`: [max_num_seqs + 2] int32."""
        return self._starts[num_tokens]

    def aux_hidden_states(self) -> dict[int, AuxOut]:
        """Return what keeps the features of a step, as `Model` takes it."""

        def keep(kept: torch.Tensor, residual: torch.Tensor) -> None:
            kept[: residual.shape[0]].copy_(residual)

        return {layer: partial(keep, kept) for layer, kept in self.features.items()}

    def note(self, scheduled_requests: Sequence[ScheduledRequest], rows: Sequence[int]) -> list[Behind]:
        """Return what the drafter has to compute, beside a plan's step, to be in step after it."""
        return self._progress.note(scheduled_requests, rows) if self.catches_up else []

    def proposals(self, num_seqs: int, num_logits: int) -> Proposals | None:
        """Return what the positions of the step were proposed by drawing, see `Sampler`; None: drafts are certain."""
        if not self.keeps_logits:
            return None
        batch = self._batch
        assert batch.tree is not None
        width = self.tree.most_siblings
        found = torch.full((num_logits * (width + 1),), -1, dtype=torch.int32, device=batch.device)
        siblings, draft_rows = found[num_logits:].view(num_logits, width), found[:num_logits]
        draft_proposals(
            first=batch.header.sample_first[: num_seqs + 1],
            rows=batch.header.sample_rows,
            token_ids=batch.token_ids,
            num_known=batch.num_known,
            num_drawn=batch.num_real,
            children=batch.tree.children,
            kept=batch.tree.kept,
            siblings=siblings,
            draft_rows=draft_rows,
            num_kept=self._num_inner,
        )
        return Proposals(siblings, self.draft_logits, draft_rows)

    # -- drafting ------------------------------------------------------------------------------------------

    def propose_decodes(self, step: FlatBatch, num_drafts: int, any_random: bool, hidden: torch.Tensor) -> None:
        """Draft for a batch of decodes, all in step, as its header describes; the launches do not depend on it."""
        self._propose(step.rows, num_drafts, any_random, step, hidden)

    def propose(
        self,
        step: DeviceStep,
        tokens: FlatBatch,
        behind: Sequence[Behind],
        any_random: bool,
        hidden: torch.Tensor | None = None,
    ) -> None:
        """Draft after any other step.

        Args:
            tokens: the step's, with padding.
            behind: as in `catch_up`.
            hidden: see `DraftBatch`; None: the drafter reads none.
        """
        self.catch_up(behind)
        if not step.num_next and (self.drafter is None or not self.drafter.follows_always):
            return
        rows = to_device([step.rows[index] for index in step.sampling], torch.int32, self._batch.device)
        self._propose(rows, max(step.num_next, default=0), any_random, tokens, hidden)

    def _propose(
        self, rows: torch.Tensor, num_drafts: int, any_random: bool, step: FlatBatch, hidden: torch.Tensor | None
    ) -> None:
        batch, num_seqs = self._batch, rows.shape[0]
        num_next = batch.header.num_next[:num_seqs]
        if self.drafter is None:
            self._look_up(rows, num_next, num_drafts)
            return
        asking = Asking(rows, num_next, num_drafts, any_random, batch.last[:num_seqs], batch.last_token[:num_seqs])
        self.drafter.propose(GPUDraftBatch(self, asking, step, hidden))

    @property
    def catches_up(self) -> bool:
        """Return whether the drafter has layers, and does not follow every step."""
        return self.drafter is not None and self.drafter.has_layers and not self.drafter.follows_always

    def catch_up(self, behind: Sequence[Behind]) -> None:
        """Compute what `note` has found, before the step or after it, once its tokens have been sent."""
        if self.drafter is None or not behind:
            return
        batch = self._batch
        for part in in_parts(behind, self._room):
            rows, starts, counts = zip(*part, strict=True)
            ends = np.cumsum(counts).tolist()
            header = to_device([0, *ends, *rows, *starts], torch.int32, batch.device)
            query_start, every_row, planned = header.split([len(rows) + 1, len(rows), len(rows)])
            tokens = self.flat(every_row, query_start, ends[-1])
            tokens.query_lens = list(counts)
            tokens.kv_lens = [start + count for start, count in zip(starts, counts, strict=True)]
            step_inputs(
                rows=every_row,
                query_start=query_start,
                planned_start=planned,
                token_ids=batch.token_ids,
                num_known=batch.num_known,
                block_tables=batch.block_tables,
                block_size=batch.block_size,
                input_ids=tokens.input_ids,
                positions=tokens.positions,
                slot_mapping=tokens.slot_mapping,
                seq_lens=tokens.seq_lens,
                all_known=True,
            )
            flat = (tokens.input_ids, tokens.positions, self.attention.metadata(tokens))
            self.drafter.propose(UndraftedBatch(self, flat))

    def flat(self, rows: torch.Tensor, query_start: torch.Tensor, num_tokens: int) -> FlatBatch:
        """Return `num_tokens` tokens of the drafter, yet to be filled."""
        return FlatBatch(
            input_ids=self.input_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            slot_mapping=self.slot_mapping[:num_tokens],
            seq_lens=self.seq_lens[: rows.shape[0]],
            query_start=query_start,
            rows=rows,
        )

    def _look_up(self, rows: torch.Tensor, num_next: torch.Tensor, num_drafts: int) -> None:
        """Draft by prompt lookup."""
        if not num_drafts:
            return
        batch, spec = self._batch, self._speculation
        # As wide for fewer drafts, so that these need no kernels of their own.
        drafts = torch.zeros((rows.shape[0], batch.max_drafts), dtype=torch.int32, device=batch.device)
        counts = torch.zeros_like(rows)
        prompt_lookup_triton(
            batch.token_ids,
            rows,
            batch.num_known,
            drafts[:, :num_drafts],
            counts,
            max_ngram=spec.prompt_lookup_max,
            min_ngram=spec.prompt_lookup_min,
        )
        if spec.rejection_sample_method == "synthetic":  # what is not found is made up, so that all is verified
            index = torch.arange(batch.max_drafts, device=batch.device)
            known = batch.num_known.index_select(0, rows.clamp(min=0)).unsqueeze(1)
            made_up = (known.long() * 40503 + index * 2654435761) % self._vocab_size
            drafts = torch.where(index < counts.unsqueeze(1), drafts, made_up.int())
            counts = counts.fill_(num_drafts)
        push(rows, torch.minimum(num_next, counts), drafts, batch.token_ids, batch.num_known, batch.num_real, 0)

    def largest_step(self, hidden: torch.Tensor) -> None:
        """Compute as many tokens as there may be, all padding, and nothing of attention: to measure, and to compile.

        Args:
            hidden: [max_num_tokens, hidden_size], of the model's largest step.
        """
        if self.drafter is None or not self.drafter.has_layers:
            return
        size = hidden.shape[0] if self.reads_step else self._room
        tokens = self.flat(self.starts(1)[:1], self.starts(1)[:2], size)
        tokens.slot_mapping.fill_(-1)
        metadata = self.attention.metadata(tokens)
        metadata.outside = lambda call: None
        self.drafter.propose(UndraftedBatch(self, (tokens.input_ids, tokens.positions, metadata), hidden))

    def draw(self, level: int, logits: torch.Tensor, asking: Asking) -> None:
        """Draw the drafts of a level, and keep the logits they were drawn from where they may be asked for.

        Args:
            logits: [num_seqs * nodes of the level before, vocab_size].
        """
        batch, what, rows = self._batch, self._levels[level], asking.rows
        num_seqs = rows.shape[0]
        each = rows if what.num_before == 1 else rows.repeat_interleave(what.num_before)
        if asking.any_random:  # also what they are verified against: drawn from nothing finer
            logits = logits.to(self.draft_logits.dtype)
            padding = batch.num_known.shape[0]
            places = torch.where(rows >= 0, rows, padding).long().unsqueeze(1) * self._num_inner + what.kept
            inner = logits if what.inner is None else logits.unflatten(0, (num_seqs, -1)).index_select(1, what.inner)
            self.draft_logits.index_copy_(0, places.flatten(), inner.view(-1, inner.shape[-1]))
        drawn: list[torch.Tensor] = []
        for _ in range(what.num_siblings):
            if drawn:  # one after the other, of what is left: the noise of each id is the same
                logits = logits.scatter(1, drawn[-1].unsqueeze(1), float("-inf"))
            drawn.append(self._sampler.draw_drafts_plain(logits, each, batch.num_known, level, asking.any_random))
        drafts = torch.stack(drawn, dim=1).view(num_seqs, -1)
        if what.picked is not None:
            drafts = drafts.index_select(1, what.picked)
        first = self.tree.levels[level][0]
        push(rows, asking.num_next, drafts, batch.token_ids, batch.num_known, batch.num_real, first)

    @property
    def batch(self) -> DeviceBatch:
        return self._batch


@dataclass(frozen=True, slots=True)
class _Level:
    """Draw the drafts of a level from the logits after the level before, of which each request has `num_before`.

    Attributes:
        num_siblings: that are drawn from each.
        picked: [num_nodes] int64, which of them the nodes are, by parent and sibling; None: all.
        inner: [num_inner] int64, those of the level before that have children; None: all.
        kept: [num_inner] int64, as of `TreeTensors`.
        parents: [num_seqs * num_nodes] int64, see `DraftBatch.parents`.
    """

    num_before: int
    num_siblings: int
    picked: torch.Tensor | None
    inner: torch.Tensor | None
    kept: torch.Tensor
    parents: torch.Tensor


def _levels(tree: DraftTree, num_seqs: int, device: torch.device) -> list[_Level]:
    found = []
    before: tuple[int, ...] = (-1,)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    for nodes in tree.levels:
        families = [tree.children[node + 1] for node in before]
        width = max(map(len, families))
        picked = [index * width + rank for index, family in enumerate(families) for rank in range(len(family))]
        inner = [index for index, family in enumerate(families) if family]
        parents = ints([before.index(tree.parents[node]) for node in nodes])
        seqs = torch.arange(num_seqs, device=device).unsqueeze(1) * len(before)
        found.append(
            _Level(
                num_before=len(before),
                num_siblings=width,
                picked=None if len(picked) == width * len(families) else ints(picked),
                inner=None if len(inner) == len(before) else ints(inner),
                kept=ints([tree.inner.index(before[index] + 1) for index in inner]),
                parents=(seqs + parents).flatten(),
            )
        )
        before = nodes
    return found
