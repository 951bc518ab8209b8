"""How much memory sampling takes beside the logits, at most.

What runs depends on what requests ask for, so these are bounds, which a test compares with what the sampler allocates.
"""

from __future__ import annotations

from teachllm.config import EngineConfig
from teachllm.models.model_config import ModelConfig
from teachllm_kernels.sampling.random_sample import workspace_bytes

# Rows that are scored, or sampled where the sampler's general way is taken, together: it holds so many copies of their
# logits in float32 at once, and so many bytes for each token of their sequences, at most. A row takes 9 MiB for a
# vocabulary of 150,000: with twice as many, a small model would need more to sample than to compute.
SAMPLED_AT_ONCE = 16
LOGITS_COPIES = 14
BYTES_OF_HISTORY = 24
_SCORED_COPIES = 9  # of a prompt's


def sampling_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Return what sampling takes beside the logits, at most."""
    num_seqs, max_len = config.max_num_seqs, config.max_model_len
    assert num_seqs and max_len
    per_row = LOGITS_COPIES * 4 * model.vocab_size + BYTES_OF_HISTORY * max_len
    scored = min(SAMPLED_AT_ONCE, max_len) * _SCORED_COPIES * 4 * model.vocab_size
    return max(min(num_seqs, SAMPLED_AT_ONCE) * per_row, scored, workspace_bytes(num_seqs, model.vocab_size))
