"""ModelRunner: a plan of integers in, sampled token ids out.

    execute(plan)  rows, flat tensors, forward, logits of the positions that need them
    sample(step)   one token per logits row; drafts are accepted as long as they are what would be sampled

The two are apart because what happens between them (a grammar's mask) may take as long as the forward itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from teachllm.config import EngineConfig
from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from teachllm.layers.attention_backends.selection import select_backend
from teachllm.models.loader import load_model
from teachllm.models.model_config import ModelConfig
from teachllm.sampling.sampler import Sampler
from teachllm.worker.cpu import keep_freed_memory
from teachllm.worker.input_batch import InputBatch, StepInputs
from teachllm.worker.kv_cache import allocate_kv_cache, attention_needs, plan_memory
from teachllm.worker.prompt_scores import PromptScores


@dataclass(slots=True)
class ExecutedStep:
    """A step between forward and sampling.

    Attributes:
        logits: [num_logits, vocab_size] float32, of the positions that are sampled from, in plan order.
        logits_rows: request row of each of them.
        lengths: [num_logits] int64, tokens before the one to sample.
        prompt_logprobs: per scheduled request, for those that asked.
    """

    plan: SchedulerOutput
    inputs: StepInputs
    logits: torch.Tensor
    logits_rows: list[int]
    lengths: torch.Tensor
    prompt_logprobs: list[list[TokenLogprobs] | None] | None


class ModelRunner:
    """The model, its KV cache and its rows on one device.

    Args:
        config: resolved for the model.
        progress: called with (bytes loaded, bytes in all) while weights load.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        assert config.max_model_len and config.max_num_seqs
        if device.type == "cpu":
            select_backend(config.attention_backend, attention_needs(config, model_config), device)  # or refuses
            keep_freed_memory()
        self.memory = plan_memory(config, model_config, device)  # before any weight is read
        self.model: Any = load_model(model_config, config, device, progress)
        self._kv_caches = allocate_kv_cache(model_config, self.memory.num_blocks, config.block_size, device)
        self._batch = InputBatch(config.max_num_seqs, config.max_model_len, config.block_size, device)
        self._sampler = Sampler(config.max_num_seqs, model_config.vocab_size, device)
        self._prompt_scores = PromptScores(self.model, self._sampler)
        self._device = device

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ExecutedStep:
        """Runs the forward pass of a plan."""
        self._batch.update(plan, (self._sampler, self._prompt_scores))
        inputs = self._batch.prepare(plan)
        hidden = self.model(inputs.input_ids, inputs.positions, self._kv_caches, inputs.metadata)

        wanted: list[int] = []  # flat token indices whose logits are sampled from
        logits_rows: list[int] = []
        for share, row, end in zip(plan.scheduled, inputs.rows, inputs.query_ends, strict=True):
            if share.samples:
                verified = len(share.draft_token_ids) + 1
                wanted.extend(range(end - verified, end))
                logits_rows.extend([row] * verified)
        indices = torch.tensor(wanted, dtype=torch.int64, device=self._device)
        # A decode-only step samples from every token: nothing to select.
        chosen = hidden if len(wanted) == hidden.shape[0] else hidden[indices]
        prompt_logprobs = None
        if self._prompt_scores.any_due(plan.scheduled, inputs.rows):
            where = (plan.scheduled, inputs.rows, inputs.starts, hidden, self._batch.token_ids)
            prompt_logprobs = self._prompt_scores.score(*where)
        return ExecutedStep(
            plan=plan,
            inputs=inputs,
            logits=self.model.compute_logits(chosen),
            logits_rows=logits_rows,
            lengths=inputs.positions[indices] + 1,
            prompt_logprobs=prompt_logprobs,
        )

    @torch.inference_mode()
    def sample(self, step: ExecutedStep) -> ModelRunnerOutput:
        """Samples the step's tokens and writes them into their rows.

        A draft is accepted if it equals the token sampled at its position from the target's own distribution,
        with the noise of that output index. So the output is the very one that would come without drafts.
        """
        token_ids = self._batch.token_ids.to(self._device)
        sampled = self._sampler.sample(step.logits, step.logits_rows, step.lengths, token_ids)
        ids: list[int] = sampled.token_ids.tolist() if step.logits_rows else []
        accepted: list[list[int]] = []
        logprobs: list[list[TokenLogprobs] | None] = []
        found = sampled.logprobs
        first = 0
        for share, row in zip(step.plan.scheduled, step.inputs.rows, strict=True):
            count = 0
            if share.samples:
                drafts = share.draft_token_ids
                count = 1
                while count <= len(drafts) and ids[first + count - 1] == drafts[count - 1]:
                    count += 1
                self._batch.append(row, ids[first : first + count])
            accepted.append(ids[first : first + count])
            if found is not None:
                entries = found[first : first + count]
                logprobs.append([entry for entry in entries if entry is not None] or None)
            first += len(share.draft_token_ids) + 1 if share.samples else 0
        return ModelRunnerOutput(accepted, logprobs or None, step.prompt_logprobs)
