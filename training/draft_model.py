"""A draft model: the target's own architecture, seven times smaller, with the same vocabulary.

It knows nothing of the target's insides, so it is served like any model and fits any target of this vocabulary;
but it must read the whole text itself (https://arxiv.org/abs/2211.17192).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from drafting import NUM_DRAFTS, TrainingBatch, ahead, chain_mask, distil, lesson, read_config
from torch import Tensor
from train import save

# Copying takes two layers: one to mark what came before a token, one to find it. The embedding is half of the weights.
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class TrainedDraftModel(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @classmethod
    def fresh(cls, target: Any, shape: dict[str, int] = SHAPE) -> TrainedDraftModel:
        """Untrained, like the target but for its shape."""
        from transformers import Qwen3Config, Qwen3ForCausalLM

        same = read_config(Path(target.name_or_path))
        return cls(Qwen3ForCausalLM(Qwen3Config(**same | shape)))

    @classmethod
    def load(cls, folder: Path) -> TrainedDraftModel:
        from transformers import AutoModelForCausalLM

        return cls(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))

    def loss(self, batch: TrainingBatch) -> Tensor:
        wanted, target_logits = lesson(batch, 1)
        hidden = self.model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        return distil(self.model.lm_head(hidden[wanted]), target_logits)

    def drafts(self, batch: TrainingBatch) -> Tensor:
        from transformers import DynamicCache

        rows, length = batch.ids.shape
        positions = torch.arange(length, device=batch.ids.device)
        cache = DynamicCache()
        tokens, guesses = batch.ids, []
        for step in range(NUM_DRAFTS):
            hidden = self.model.model(
                input_ids=tokens,
                position_ids=positions[None] + step,
                attention_mask=chain_mask(length, step, tokens.device).expand(rows, 1, -1, -1),
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
            tokens = self.model.lm_head(hidden).argmax(dim=-1)
            guesses.append(tokens)
        # It guesses token i + 1 from token i, so the chain that follows the sampled token begins one position later.
        return ahead(torch.stack(guesses, dim=-1), 1)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save(self.model, folder)
