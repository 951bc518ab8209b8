"""ModelRunner: a plan of integers in, sampled token ids out.

    execute(plan)  rows, flat tensors, forward, logits of the positions that need them
    sample(step)   one token per logits row; drafts hold as long as they are what is sampled; then the next are drafted

The two are apart because what happens between them (a grammar's mask) may take as long as the forward itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from teachllm.config import EngineConfig
from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from teachllm.distributed.group import agreed_least
from teachllm.distributed.ranks import ALONE, Ranks
from teachllm.layers.attention_backends.base import AttentionBackend
from teachllm.layers.attention_backends.reference import REFERENCE
from teachllm.layers.attention_backends.selection import select_backend
from teachllm.layers.dtypes import torch_dtype
from teachllm.loading.loader import load_model
from teachllm.models.base import AuxOut, Model
from teachllm.models.model_config import ModelConfig
from teachllm.models.own_model import model_of_rank
from teachllm.models.stage import Stage
from teachllm.sampling.sampler import Sampler
from teachllm.sampling.verify import synthetic_tokens
from teachllm.spec_decode.drafter import ModelDrafter
from teachllm.spec_decode.load import DrafterConfig, load_drafter
from teachllm.spec_decode.step_times import Prior
from teachllm.spec_decode.tree import DraftTree
from teachllm.speculative_config import MAX_SPECULATIVE_TOKENS
from teachllm.startup_progress import StartupProgress
from teachllm.worker.cpu.drafting import Drafting
from teachllm.worker.cpu.input_batch import InputBatch, StepInputs
from teachllm.worker.cpu.libc_settings import keep_freed_memory
from teachllm.worker.kv_cache import (
    KVCache,
    allocate_kv_cache,
    allocate_layers,
    attention_needs,
    kv_cache_specs,
)
from teachllm.worker.kv_scales import calibrate, enable_kv_quantization
from teachllm.worker.memory_plan import plan_memory
from teachllm.worker.prompt_logprobs import PromptLogprobs
from teachllm.worker.rows import OpenedRow
from teachllm.worker.runner import ReadyOutput
from teachllm_kernels.attention.kv_quantization import as_bytes
from teachllm_kernels.sampling.philox import philox_uniform_reference


@dataclass(slots=True)
class ExecutedStep:
    """A step between forward and sampling.

    Attributes:
        logits: [num_logits, own part of the vocabulary] float32, of the positions that are sampled from, in plan
            order; none on a stage that is not the last.
        logits_rows: request row of each of them.
        lengths: [num_logits] int64, tokens before the one to sample.
        prompt_logprobs: per scheduled request, for those that asked.
        drafts: per scheduled request, what it verifies.
        hidden: [num_tokens, hidden_size], of all tokens.
        features: what the drafter reads besides, see `DraftBatch`.
        expert_load: as of `ModelRunnerOutput`.
    """

    plan: SchedulerOutput
    inputs: StepInputs
    logits: torch.Tensor
    logits_rows: list[int]
    lengths: torch.Tensor
    prompt_logprobs: list[list[TokenLogprobs] | None] | None
    drafts: list[Sequence[int]]
    hidden: torch.Tensor
    features: dict[int, torch.Tensor]
    expert_load: list[list[int]] | None = None


class ModelRunner:
    """The model, its KV cache and its rows on one device.

    Args:
        config: resolved for the model.
        progress: called with (stage, how much is done, of what), see `startup_progress.py`.
        drafter: with weights; None: there is none, or one on the host.
        ranks: that share the model; this runner has the part of one. All are given the same plans.
        attention, make_sampler: of `EngineOverrides`.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        device: torch.device,
        progress: StartupProgress | None = None,
        drafter: DrafterConfig | None = None,
        ranks: Ranks = ALONE,
        *,
        attention: AttentionBackend | None = None,
        make_sampler: Callable[..., Sampler] = Sampler,
    ) -> None:
        assert config.max_model_len and config.max_num_seqs
        self._ranks, whole = ranks, model_config
        model_config = model_of_rank(whole, ranks.coords)
        if device.type == "cpu":
            needs = attention_needs(config, model_config)
            attention = attention or select_backend(config.attention_backend, needs, device)
            keep_freed_memory()
        self.memory = plan_memory(config, model_config, device, drafter)  # before any weight is read
        num_blocks = agreed_least(ranks.world, self.memory.num_blocks, device)
        self.memory = self.memory.of_blocks(num_blocks)
        self.model: Model = load_model(whole, config, device, progress and partial(progress, "weights"), ranks)
        if ranks.coords.layout.pipeline > 1:
            self.model = Stage(self.model, ranks, whole.hidden_size, torch_dtype(whole.dtype))
        self._kv_caches = allocate_kv_cache(model_config, num_blocks, config.block_size, device)
        self._batch = InputBatch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            device=device,
            backend=attention or REFERENCE,
        )
        self._sampler = make_sampler(config.max_num_seqs, whole.vocab_size, device, ranks.tensor)
        self._prompt_logprobs = PromptLogprobs(partial(self.model.logits, sharded=True), self._sampler)
        self._device = device
        self._drafting: Drafting | None = None
        self._tree = DraftTree.chain(MAX_SPECULATIVE_TOKENS)
        speculation = config.speculative_config
        self._synthetic_rate = None if speculation is None else speculation.synthetic_rate
        self._moved: KVCache = []  # where drafts of a tree may lie apart
        self._pending_remote: dict[int, list[OpenedRow]] = {}  # whose tokens another stage samples, by step
        self._load: torch.Tensor | None = None  # of experts, in the step under way
        loaded: ModelDrafter | None = None
        if drafter is not None:
            own_caches = allocate_layers(drafter.specs, drafter.kv_dtype, num_blocks, config.block_size, device)
            loaded = load_drafter(drafter, config, self.model, own_caches, device)
            self._drafting = Drafting(loaded, self._batch, self._sampler, num_blocks, drafter.tree)
            self._tree = drafter.tree
            self._moved = [*self._kv_caches, *own_caches]
        if model_config.has_quantized_kv:
            enable_kv_quantization(self.model, kv_cache_specs(model_config), device)
            if drafter is not None and loaded is not None and drafter.specs:
                enable_kv_quantization(loaded.module, drafter.specs, device)
            calibrate(self.model, whole, self._kv_caches, loaded, ranks)

    def prepare(self, sizes: Sequence[int], is_adaptive: bool) -> Prior | None:
        """Return None: there is nothing to record on a CPU, and nothing is timed ahead."""
        return None

    def observe(self, is_on: bool) -> None:
        """Start, or stop, adding the tokens of each expert to outputs, if there are any experts."""
        self._load = self.model.count_load() if is_on and self.model.experts is not None else None

    def close(self) -> None:
        """Do nothing: all memory goes with the last reference."""

    @torch.inference_mode()
    def execute_dummy_step(self) -> None:
        """Compute an empty step: this rank's experts are there for replicas that have tokens."""
        self.model.execute_dummy_step()

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ExecutedStep:
        """Run the forward pass of a plan."""
        drafting = self._drafting
        kept = (self._sampler, self._prompt_logprobs)
        self._batch.update(plan, kept if drafting is None else (*kept, drafting))
        drafts: list[Sequence[int]] = [scheduled.draft_token_ids for scheduled in plan.scheduled]
        if drafting is not None:
            drafts = [drafting.drafts(self._batch.row(scheduled.request_id), scheduled) for scheduled in plan.scheduled]
        inputs = self._batch.prepare(plan, drafts, self._tree)
        features: dict[int, torch.Tensor] = {}
        aux_hidden_states: dict[int, AuxOut] = {}
        if drafting is not None:
            drafting.begin(inputs)
            aux_hidden_states = {
                layer: partial(features.__setitem__, layer) for layer in drafting.drafter.feature_layers
            }
        hidden = self.model(inputs.input_ids, inputs.positions, self._kv_caches, inputs.metadata, aux_hidden_states)
        expert_load = self._taken_load()

        if not self._ranks.coords.is_last_stage:
            self._pending_remote[plan.step] = self._batch.opened_rows(inputs.rows)
            nothing = hidden.new_empty((0, 0))
            return ExecutedStep(plan, inputs, nothing, [], nothing, None, drafts, hidden, features)
        logits_indices: list[int] = []  # flat token indices whose logits are sampled from
        logits_rows: list[int] = []
        for scheduled, row, end in zip(plan.scheduled, inputs.rows, inputs.query_ends, strict=True):
            if scheduled.samples:
                verified = len(scheduled.draft_token_ids) + 1
                logits_indices.extend(range(end - verified, end))
                logits_rows.extend([row] * verified)
        indices = torch.tensor(logits_indices, dtype=torch.int64, device=self._device)
        # A decode-only step samples from every token: nothing to select.
        chosen = hidden if len(logits_indices) == hidden.shape[0] else hidden[indices]
        prompt_logprobs = None
        if self._prompt_logprobs.any_due(plan.scheduled, inputs.rows):
            prompt_logprobs = self._prompt_logprobs.score(
                plan.scheduled, inputs.rows, starts=inputs.starts, hidden=hidden, token_ids=self._batch.token_ids
            )
        return ExecutedStep(
            plan=plan,
            inputs=inputs,
            logits=self.model.logits(chosen, sharded=True),
            logits_rows=logits_rows,
            lengths=inputs.positions[indices] + 1,
            prompt_logprobs=prompt_logprobs,
            drafts=drafts,
            hidden=hidden,
            features=features,
            expert_load=expert_load,
        )

    @torch.inference_mode()
    def sample(self, step: ExecutedStep) -> ReadyOutput:
        """Sample a token at every position that is verified, keep the tokens up to the first draft that does not
        hold, and have the drafter propose."""
        scheduled_requests, rows = step.plan.scheduled, step.inputs.rows
        if not self._ranks.coords.is_last_stage:
            return ReadyOutput(ModelRunnerOutput([[] for _ in scheduled_requests]))
        proposals = histories = None
        if self._drafting is not None:
            proposals = self._drafting.proposals(
                step.inputs, step.drafts, [scheduled.samples for scheduled in scheduled_requests]
            )
            histories = self._drafting.histories(
                step.inputs, step.drafts, [scheduled.samples for scheduled in scheduled_requests]
            )
        known_ids = self._batch.token_ids.to(self._device)
        # By position: a sampler of one's own may name its parameters as it likes, see `EngineOverrides`.
        sampled = self._sampler.sample(step.logits, step.logits_rows, step.lengths, known_ids, proposals, histories)
        token_ids = sampled.token_ids
        if self._synthetic_rate is not None:
            token_ids = self._synthetic_tokens(token_ids, step)
        ids: list[int] = token_ids.tolist() if step.logits_rows else []
        kept: list[list[int]] = []
        paths: list[list[int]] = []
        logprobs: list[list[TokenLogprobs] | None] = []
        found = sampled.logprobs
        first = 0
        for scheduled, drafts in zip(scheduled_requests, step.drafts, strict=True):
            end = first + (len(drafts) + 1 if scheduled.samples else 0)
            path = self._tree.walk(ids[first:end], drafts) if scheduled.samples else []
            at = [first, *(first + 1 + node for node in path)] if scheduled.samples else []
            paths.append(path)
            kept.append([ids[i] for i in at])
            if found is not None:
                logprobs.append([entry for i in at if (entry := found[i]) is not None] or None)
            first = end
        self._keep(rows, kept, paths)
        next_drafts = None
        if self._drafting is not None:
            next_drafts = self._drafting.propose(scheduled_requests, step.inputs, paths, step.hidden, step.features)
        return ReadyOutput(
            ModelRunnerOutput(
                kept,
                logprobs or None,
                step.prompt_logprobs,
                draft_token_ids=next_drafts,
                expert_load=step.expert_load,
            )
        )

    def _taken_load(self) -> list[list[int]] | None:
        """Return what was counted in this step, in the layers of this stage and of those before it."""
        if self._load is None:
            return None
        load, coords = self._load.clone(), self._ranks.coords
        self._load.zero_()
        if not coords.is_first_stage:
            load += self._ranks.world.recv(torch.empty_like(load), coords.before)
        if not coords.is_last_stage:
            self._ranks.world.send(load, coords.behind)
        return load.tolist()

    def receive_sampled_tokens(self, step: int, sampled_token_ids: Sequence[Sequence[int]]) -> None:
        """Receive, on other stages, what the last one sampled in a step, before the first plan made with it."""
        for failed in [each for each in self._pending_remote if each < step]:
            del self._pending_remote[failed]
        for (row, opening), token_ids in zip(self._pending_remote.pop(step), sampled_token_ids, strict=True):
            if self._batch.opening(row) == opening:  # or it is another request's by now
                self._batch.append(row, token_ids)

    def _synthetic_tokens(self, sampled: torch.Tensor, step: ExecutedStep) -> torch.Tensor:
        """Return each position's token in a benchmark: the first draft after it, or another one, by a seeded coin."""
        assert self._synthetic_rate is not None
        nexts: list[int] = []
        for scheduled, drafts in zip(step.plan.scheduled, step.drafts, strict=True):
            for place in range(len(drafts) + scheduled.samples):
                children = [node for node in self._tree.children[place] if node < len(drafts)]
                nexts.append(drafts[children[0]] if children else -1)
        rows = torch.tensor(step.logits_rows, dtype=torch.int64)
        coins = philox_uniform_reference(torch.zeros_like(rows), step.lengths, rows, 1)[:, 0]
        return synthetic_tokens(sampled, torch.tensor(nexts, dtype=torch.int64), coins, self._synthetic_rate)

    def _keep(self, rows: Sequence[int], kept: Sequence[Sequence[int]], paths: Sequence[Sequence[int]]) -> None:
        """Add tokens to the known ones; move K and V of drafts that hold to where their tokens stand now."""
        sources: list[int] = []
        targets: list[int] = []
        for row, token_ids, path in zip(rows, kept, paths, strict=True):
            first = self._batch.num_known(row)
            moved = [(first + node, first + place) for place, node in enumerate(path) if node != place]
            sources += self._batch.slots(row, [source for source, _ in moved])
            targets += self._batch.slots(row, [target for _, target in moved])
            self._batch.append(row, token_ids)
        if sources:
            source, target = torch.tensor(sources, device=self._device), torch.tensor(targets, device=self._device)
            for cache in map(as_bytes, chain.from_iterable(self._moved)):
                cache.flatten(0, 1).index_copy_(0, target, cache.flatten(0, 1)[source])
