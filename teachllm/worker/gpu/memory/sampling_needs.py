"""Bound the memory that sampling takes beside the logits.

What runs depends on what requests ask for, so these are bounds. A test compares them with what the sampler allocates.
"""

from __future__ import annotations

from teachllm.config import EngineConfig
from teachllm.models.model_config import ModelConfig
from teachllm.worker.prompt_logprobs import SAMPLED_AT_ONCE
from teachllm_kernels.sampling.random_sample import workspace_bytes

# The sampler's general way holds at most so many copies of logits in float32 at once, and so many bytes for each token
# of the sequences.
LOGITS_COPIES = 14
BYTES_OF_HISTORY = 24
_SCORED_COPIES = 9  # of the logits by which a prompt is scored


def sampling_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Return the most bytes that sampling takes beside the logits."""
    num_seqs, max_len = config.max_num_seqs, config.max_model_len
    assert num_seqs and max_len
    per_row = LOGITS_COPIES * 4 * model.vocab_size + BYTES_OF_HISTORY * max_len
    scored = min(SAMPLED_AT_ONCE, max_len) * _SCORED_COPIES * 4 * model.vocab_size
    return max(min(num_seqs, SAMPLED_AT_ONCE) * per_row, scored, workspace_bytes(num_seqs, model.vocab_size))
