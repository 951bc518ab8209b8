"""Drafting on a GPU: as `drafting.py`, on rows that live on the device, without a word from the host.

The host counts on every draft it has asked for and learns what held a step later. A batch of decodes is drafted for
inside the graph that verified it; behind a step with prompts the same calls are launched one by one.

    in step    the newest token of every request, and the one before, are all that a draft model has not computed: two
               tokens each, whatever held
    behind     a prompt, or a request that was not drafted for meanwhile: the host knows at most how many tokens that
               are, and so many are computed, though some may have been before

Drafts of requests that sample at random are drawn, and the logits they were drawn from are kept for the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from teachllm.core.scheduler_output import NewRow, ScheduledRequest
from teachllm.layers.attention import AttentionMetadata
from teachllm.layers.attention_backends.base import AttentionBackend
from teachllm.models.llama import Tap
from teachllm.models.model_config import ModelConfig
from teachllm.sampling.sampler import Sampler
from teachllm.sampling.transfers import to_device
from teachllm.sampling.verify import Proposals
from teachllm.spec_decode.drafter import FlatTokens, ModelDrafter
from teachllm.speculative_config import SpeculativeConfig
from teachllm.worker.device_batch import DeviceBatch, DeviceStep
from teachllm_kernels.decode_plan import DecodePlan, plan_decode
from teachllm_kernels.draft_rows import draft_inputs, draft_proposals, following_ids, push
from teachllm_kernels.prompt_lookup import prompt_lookup_triton
from teachllm_kernels.step_inputs import step_inputs


@dataclass(slots=True)
class Behind:
    """A request whose drafter computes more than its two newest tokens.

    Attributes:
        start: the first of them; of one that drafts, at most.
        count: how many.
    """

    row: int
    start: int
    count: int


class GPUDrafting:
    """A drafter at work on the rows of a `DeviceBatch`.

    Args:
        drafter: None for prompt lookup.
        model: which it drafts for.
        plans: for the drafter's layers, by window; empty where the backend splits no decodes.
        num_kv_heads: of the drafter's layers.

    Attributes:
        reads_step: it needs hidden states or features of every step.
        features: by layer [max_num_tokens, hidden_size], where a step leaves them.
    """

    def __init__(
        self,
        speculation: SpeculativeConfig,
        drafter: ModelDrafter | None,
        model: ModelConfig,
        batch: DeviceBatch,
        sampler: Sampler,
        backend: AttentionBackend,
        plans: Mapping[int | None, DecodePlan],
        num_kv_heads: int,
    ) -> None:
        dtype, vocab_size, max_num_tokens = getattr(torch, model.dtype), model.vocab_size, batch.input_ids.shape[0]
        self.drafter = drafter
        self.reads_step = drafter is not None and (drafter.follows_always or not drafter.has_layers)
        self._speculation = speculation
        self._batch, self._sampler, self._backend, self._plans = batch, sampler, backend, plans
        self._num_kv_heads = num_kv_heads
        device, num_rows, self._most = batch.device, batch.num_known.shape[0], batch.max_drafts
        self._room = max_num_tokens + 3 * num_rows
        self.input_ids, self.positions, self.slot_mapping = (
            torch.zeros(self._room, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.seq_lens = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        # First tokens of sequences of one and of two tokens each, and the last ones of the latter.
        self.starts = {n: n * torch.arange(num_rows + 2, dtype=torch.int32, device=device) for n in (1, 2)}
        self.second = self.starts[2] + 1
        layers = () if drafter is None else drafter.feature_layers
        size = (max_num_tokens, model.hidden_size)
        self.features = {layer: torch.zeros(size, dtype=dtype, device=device) for layer in layers}
        self.keeps_logits = drafter is not None
        kept = (num_rows + 1) * self._most if self.keeps_logits else 0  # a row of padding has its place, too
        self.draft_logits = torch.zeros((kept, vocab_size), dtype=dtype, device=device)
        self._vocab_size = vocab_size
        self._in_step: dict[int, int] = {}  # rows that were drafted for last, and a bound below what was computed
        self._computed: dict[int, int] = {}  # of the others, as far as the drafter has come, at least

    def open_rows(self, opened: Sequence[tuple[int, NewRow]]) -> None:
        """Nothing is computed of these yet; `note` says from where on."""

    def close_row(self, row: int) -> None:
        """Forgets the request in `row`."""
        self._in_step.pop(row, None)
        self._computed.pop(row, None)

    def taps(self) -> dict[int, Tap]:
        """What keeps the features of a step, as `LlamaForCausalLM.forward` takes it."""

        def keep(kept: torch.Tensor, stream: torch.Tensor) -> None:
            kept[: stream.shape[0]].copy_(stream)

        return {layer: partial(keep, kept) for layer, kept in self.features.items()}

    def note(self, shares: Sequence[ScheduledRequest], rows: Sequence[int]) -> list[Behind] | None:
        """Which requests of a plan the drafter is behind with, if it is to follow them; None: all are in step."""
        if self.drafter is None or not self.drafter.has_layers or self.drafter.follows_always:
            return None
        behind: list[Behind] = []
        room = self._room - 2 * len(shares)  # of who is in step the two newest
        for share, row in zip(shares, rows, strict=True):
            end = share.start + share.num_tokens
            if row in self._in_step and not share.num_next_drafts:
                self._computed[row] = self._in_step.pop(row)
            if not share.num_next_drafts:
                self._computed.setdefault(row, share.start)
                continue
            if row not in self._in_step:
                start = self._computed.pop(row, share.start)
                count = end + share.samples - start
                if count > room:  # its drafts will be bad ones, and it tries again with the next plan
                    self._computed[row] = start
                    continue
                room -= count
                behind.append(Behind(row, start, count))
            if share.samples:
                # Of two plans in flight, all drafts may have fallen.
                self._in_step[row] = max(share.start - 2 * self._most, 0)
            else:
                self._computed[row] = end
        return behind or None

    def proposals(self, num_seqs: int, num_logits: int) -> Proposals | None:
        """What the positions of the step were proposed by drawing, see `Sampler`; None: drafts are certain."""
        if not self.keeps_logits:
            return None
        batch = self._batch
        siblings, draft_rows = torch.full((2, num_logits), -1, dtype=torch.int32, device=batch.device)
        first = batch.sample_first[: num_seqs + 1]
        where = (first, batch.sample_rows, batch.token_ids, batch.num_known, batch.num_real)
        draft_proposals(*where, siblings, draft_rows, self._most)
        return Proposals(siblings.unsqueeze(1), self.draft_logits, draft_rows)

    # -- drafting ------------------------------------------------------------------------------------------

    def propose_decodes(
        self,
        num_seqs: int,
        num_tokens: int,
        decode_len: int,
        num_drafts: int,
        any_random: bool,
        hidden: torch.Tensor,
    ) -> None:
        """Drafts for a batch of decodes, all in step, as its header says; the same launches whatever it says."""
        batch = self._batch
        rows, num_next = batch.rows[:num_seqs], batch.num_next[:num_seqs]
        if self.drafter is None:
            self._look_up(rows, num_next, num_drafts)
            return
        step = _Tokens(
            input_ids=batch.input_ids[:num_tokens],
            positions=batch.positions[:num_tokens],
            slot_mapping=batch.slot_mapping[:num_tokens],
            seq_lens=batch.seq_lens[:num_seqs],
            query_start=batch.query_start[: num_seqs + 1],
            rows=rows,
            num_decodes=num_seqs,
            decode_len=decode_len,
            query_lens=[],
            kv_lens=[],
        )
        self.drafter.propose(_Batch(self, rows, num_next, num_drafts, any_random, step, None, batch.last, hidden))

    def propose(
        self,
        step: DeviceStep,
        padded_seqs: int,
        size: int,
        behind: Sequence[Behind],
        any_random: bool,
        hidden: torch.Tensor,
    ) -> None:
        """Drafts behind any other step.

        Args:
            padded_seqs, size: sequences and tokens of the step, with padding.
            behind: as `note` has found them.
            hidden: see `DraftBatch`.
        """
        batch, device = self._batch, self._batch.device
        asking = [index for index, num in enumerate(step.num_next) if num]
        if not asking and not behind and (self.drafter is None or not self.drafter.follows_always):
            return
        rows = to_device([step.rows[step.sampling[index]] for index in asking], torch.int32, device)
        num_next = to_device([step.num_next[index] for index in asking], torch.int32, device)
        num_drafts = max(step.num_next, default=0)
        if self.drafter is None:
            self._look_up(rows, num_next, num_drafts)
            return
        newest = batch.last.index_select(0, to_device(asking, torch.int64, device))
        num_prompts = padded_seqs - step.num_decodes
        tokens = _Tokens(
            input_ids=batch.input_ids[:size],
            positions=batch.positions[:size],
            slot_mapping=batch.slot_mapping[:size],
            seq_lens=batch.seq_lens[:padded_seqs],
            query_start=batch.query_start[: padded_seqs + 1],
            rows=batch.rows[:padded_seqs],
            num_decodes=step.num_decodes,
            decode_len=step.decode_len,
            query_lens=step.query_lens,
            kv_lens=[start + count for start, count in zip(step.starts, step.query_lens, strict=True)],
            num_decode_tokens=sum(step.query_lens[: step.num_decodes]) if num_prompts else None,
        )
        sampling = [step.sampling[index] for index in asking]
        late = self._late(behind, [(step.rows[i], step.starts[i] + step.query_lens[i]) for i in sampling])
        self.drafter.propose(_Batch(self, rows, num_next, num_drafts, any_random, tokens, late, newest, hidden))

    def _late(self, behind: Sequence[Behind], asking: Sequence[tuple[int, int]]) -> _Late:
        """The flat tokens of a draft model that is behind with some requests.

        Args:
            asking: (row, tokens that the model has computed at most) of those that ask for drafts, who come first.
        """
        count_of = {each.row: each for each in behind}
        # Of who is in step the newest two, wherever they are by now.
        known = [count_of.pop(row, Behind(row, end - 1, 2)) for row, end in asking]
        every = [*known, *count_of.values()]
        starts = np.cumsum([0] + [each.count for each in every])
        device, total = self._batch.device, int(starts[-1])
        header = to_device([*starts.tolist(), *(e.row for e in every), *(e.start for e in every)], torch.int32, device)
        query_start, every_row, planned = header.split([len(every) + 1, len(every), len(every)])
        return _Late(every, total, query_start, every_row, planned)

    def _look_up(self, rows: torch.Tensor, num_next: torch.Tensor, num_drafts: int) -> None:
        """Prompt lookup."""
        if not num_drafts:
            return
        batch, spec = self._batch, self._speculation
        drafts = torch.zeros((rows.shape[0], num_drafts), dtype=torch.int32, device=batch.device)
        counts = torch.zeros_like(rows)
        ngrams = (spec.prompt_lookup_max, spec.prompt_lookup_min)
        prompt_lookup_triton(batch.token_ids, rows, batch.num_known, drafts, counts, *ngrams)
        if spec.rejection_sample_method == "synthetic":  # what is not found is made up, so that all is verified
            index = torch.arange(num_drafts, device=batch.device)
            known = batch.num_known.index_select(0, rows.clamp(min=0)).unsqueeze(1)
            made_up = (known.long() * 40503 + index * 2654435761) % self._vocab_size
            drafts = torch.where(index < counts.unsqueeze(1), drafts, made_up.int())
            counts = counts.fill_(num_drafts)
        push(rows, torch.minimum(num_next, counts), drafts, batch.token_ids, batch.num_known, batch.num_real, 0)

    def largest_step(self, hidden: torch.Tensor) -> None:
        """Computes as many tokens as there may be, all padding, and nothing of attention: to measure, and to compile.

        Args:
            hidden: [max_num_tokens, hidden_size], of the model's largest step.
        """
        if self.drafter is not None and self.drafter.has_layers:
            self.drafter.propose(_Largest(self, hidden))

    def draw(
        self, index: int, logits: torch.Tensor, rows: torch.Tensor, num_next: torch.Tensor, any_random: bool
    ) -> None:
        """Draws draft `index` from logits, [num_seqs, vocab_size], and keeps these where they may be asked for."""
        batch = self._batch
        drafted = self._sampler.draw_drafts_plain(logits, rows, batch.num_known, index, any_random)
        push(rows, num_next, drafted, batch.token_ids, batch.num_known, batch.num_real, index)
        if any_random:
            padding = batch.num_known.shape[0]
            places = torch.where(rows >= 0, rows, padding).long() * self._most + index
            self.draft_logits.index_copy_(0, places, logits.to(self.draft_logits.dtype))

    def metadata(self, tokens: _Tokens) -> AttentionMetadata:
        """Where flat tokens read and write, in the drafter's layers; the decodes among them planned."""
        count = tokens.num_decodes
        num_seqs = tokens.rows.shape[0]
        fits = count == num_seqs and tokens.decode_len == 1
        is_fused = fits and self._backend.splits_decodes and all(plan.fuses(num_seqs) for plan in self._plans.values())
        if count:
            starts, lens = tokens.query_start[: count + 1], tokens.seq_lens[:count]
            for window, plan in self._plans.items():
                seen = None if window is None else window + tokens.decode_len - 1
                plan_decode(plan, lens, starts, tokens.rows[:count], self._num_kv_heads, seen, is_fused)
        first_prompt = count if tokens.num_decode_tokens is None else tokens.num_decode_tokens
        return AttentionMetadata(
            query_start=tokens.query_start,
            seq_lens=tokens.seq_lens,
            block_tables=self._batch.block_tables,
            slot_mapping=tokens.slot_mapping,
            query_lens=tokens.query_lens,
            kv_lens=tokens.kv_lens,
            backend=self._backend,
            rows=tokens.rows,
            num_decodes=count,
            decode_len=tokens.decode_len,
            num_decode_tokens=tokens.input_ids.shape[0] if count == num_seqs else tokens.num_decode_tokens,
            is_fused=is_fused,
            prefill_start=tokens.query_start[count:] - first_prompt if count < num_seqs else None,
            plans=dict(self._plans),
        )

    @property
    def batch(self) -> DeviceBatch:
        return self._batch


@dataclass(slots=True)
class _Tokens:
    """Flat tokens and where they belong; the fields are those of `AttentionMetadata`."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    query_start: torch.Tensor
    rows: torch.Tensor
    num_decodes: int = 0
    decode_len: int = 1
    query_lens: list[int] = field(default_factory=list)
    kv_lens: list[int] = field(default_factory=list)
    num_decode_tokens: int | None = None


@dataclass(slots=True)
class _Late:
    """What `DraftBatch.behind` computes where some requests are behind; `planned` is the first token of each."""

    every: Sequence[Behind]
    num_tokens: int
    query_start: torch.Tensor
    rows: torch.Tensor
    planned: torch.Tensor


class _Largest:
    """`DraftBatch` of padding, for which nothing is drafted."""

    num_levels = 0

    def __init__(self, drafting: GPUDrafting, hidden: torch.Tensor) -> None:
        self._drafting = drafting
        self.hidden = hidden
        self.features: Mapping[int, torch.Tensor] = drafting.features
        self.last = self.newest = drafting.starts[1][:0]

    def behind(self) -> FlatTokens:
        return self._flat(self._drafting.input_ids.shape[0])

    def verified(self) -> tuple[torch.Tensor, FlatTokens]:
        size = self.hidden.shape[0]
        return torch.arange(size, device=self.hidden.device), self._flat(size)

    def _flat(self, size: int) -> FlatTokens:
        drafting = self._drafting
        ids, positions, slots = (t[:size] for t in (drafting.input_ids, drafting.positions, drafting.slot_mapping))
        slots.fill_(-1)
        tokens = _Tokens(ids, positions, slots, drafting.seq_lens[:1], drafting.starts[1][:2], drafting.starts[1][:1])
        metadata = drafting.metadata(tokens)
        metadata.outside = lambda call: None
        return ids, positions, metadata

    def push(self, level: int, logits: torch.Tensor) -> None:
        raise AssertionError("nothing is drafted")

    def pushed(self, level: int, shift: int = 0) -> FlatTokens:
        raise AssertionError("nothing is drafted")

    def parents(self, level: int) -> torch.Tensor:
        raise AssertionError("nothing is drafted")


class _Batch:
    """`DraftBatch` on the device. All requests ask as long as one does; who does not is told so by its slots."""

    def __init__(
        self,
        drafting: GPUDrafting,
        rows: torch.Tensor,
        num_next: torch.Tensor,
        num_drafts: int,
        any_random: bool,
        step: _Tokens,
        late: _Late | None,
        newest: torch.Tensor,
        hidden: torch.Tensor,
    ) -> None:
        self._drafting, self._step, self._late = drafting, step, late
        self._rows, self._num_next, self._any_random = rows, num_next, any_random
        self.num_levels = num_drafts
        self.hidden = hidden
        self.features: Mapping[int, torch.Tensor] = drafting.features
        self.newest = self.last = newest[: rows.shape[0]]

    def behind(self) -> FlatTokens:
        drafting, batch, count = self._drafting, self._drafting.batch, self._rows.shape[0]
        if self._late is None:
            tokens = self._fill(num_tokens=2, offset=-2)
            self.last = drafting.second[:count]
            return self._flat(tokens)
        late = self._late
        tokens = self._tokens(len(late.every), late.num_tokens, late.rows, late.query_start)
        tokens.num_decodes, tokens.num_decode_tokens = 0, 0
        tokens.query_lens = [each.count for each in late.every]
        tokens.kv_lens = [each.start + each.count for each in late.every]
        step_inputs(
            *(late.rows, late.query_start, late.planned, batch.token_ids, batch.num_known, batch.block_tables),
            *(batch.block_size, tokens.input_ids, tokens.positions, tokens.slot_mapping, tokens.seq_lens),
            all_known=True,
        )
        self.last = late.query_start[1 : count + 1] - 1
        return self._flat(tokens)

    def verified(self) -> tuple[torch.Tensor, FlatTokens]:
        step, batch = self._step, self._drafting.batch
        following = self._drafting.input_ids[: step.input_ids.shape[0]]
        following_ids(step.rows, step.query_start, step.positions, batch.token_ids, following)
        self.last = batch.logit_index.index_select(0, self.newest)
        places = torch.arange(following.shape[0], device=following.device)
        return places, (following, step.positions, self._drafting.metadata(step))

    def push(self, level: int, logits: torch.Tensor) -> None:
        self._drafting.draw(level, logits, self._rows, self._num_next, self._any_random)

    def pushed(self, level: int, shift: int = 0) -> FlatTokens:
        return self._flat(self._fill(num_tokens=1, offset=level + shift, id_shift=-shift, least=level + 2))

    def parents(self, level: int) -> torch.Tensor:
        return self._drafting.starts[1][: self._rows.shape[0]]

    def _fill(self, num_tokens: int, offset: int, id_shift: int = 0, least: int = 1) -> _Tokens:
        batch, count = self._drafting.batch, self._rows.shape[0]
        query_start = self._drafting.starts[num_tokens][: count + 1]
        tokens = self._tokens(count, num_tokens * count, self._rows, query_start)
        tokens.decode_len = num_tokens
        draft_inputs(
            *(self._rows, self._num_next, batch.token_ids, batch.num_known, batch.block_tables, batch.block_size),
            *(tokens.input_ids, tokens.positions, tokens.slot_mapping, tokens.seq_lens),
            num_tokens=num_tokens,
            offset=offset,
            id_shift=id_shift,
            least=least,
        )
        return tokens

    def _tokens(self, num_seqs: int, num_tokens: int, rows: torch.Tensor, query_start: torch.Tensor) -> _Tokens:
        drafting = self._drafting
        return _Tokens(
            input_ids=drafting.input_ids[:num_tokens],
            positions=drafting.positions[:num_tokens],
            slot_mapping=drafting.slot_mapping[:num_tokens],
            seq_lens=drafting.seq_lens[:num_seqs],
            query_start=query_start,
            rows=rows,
            num_decodes=num_seqs,
            decode_len=1,
            query_lens=[],
            kv_lens=[],
        )

    def _flat(self, tokens: _Tokens) -> FlatTokens:
        return tokens.input_ids, tokens.positions, self._drafting.metadata(tokens)
