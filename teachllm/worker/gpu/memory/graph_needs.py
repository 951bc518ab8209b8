"""Estimate the memory of CUDA graphs: one pool for the tensors of all recordings, and bytes for each recorded kernel.

The pool is as large as its largest recording needs. The forward pass of that one runs on the meta device.
"""

from __future__ import annotations

from teachllm.config import EngineConfig
from teachllm.layers.attention_backends import selection
from teachllm.layers.dtypes import dtype_bytes
from teachllm.models.model_config import ModelConfig
from teachllm.spec_decode.load import DrafterConfig
from teachllm.spec_decode.tree import DraftTree
from teachllm.worker.gpu.known_steps import mixed_sizes
from teachllm.worker.gpu.memory.meta_runner import MetaRunner
from teachllm_kernels.sampling.random_sample import workspace_bytes

_KERNELS_PER_LAYER = 9
_BYTES_PER_KERNEL = 8 << 10  # of a recording, an assumption: `benchmarks/ledger.py` prints what recordings took


def has_graphs(config: EngineConfig) -> bool:
    """Return whether steps are recorded; a backend that needs the host in each step, chosen by name, prevents it."""
    return not config.enforce_eager and selection.is_recordable(config.attention_backend)


def graph_bytes(
    config: EngineConfig, model: ModelConfig, runner: MetaRunner, drafter: DrafterConfig | None = None
) -> int:
    """Return the bytes that the recordings of all sizes hold, whether they are made ahead or when they are needed."""
    num_seqs, num_tokens = config.max_num_seqs, config.max_num_batched_tokens
    assert num_seqs and num_tokens
    size, batch, speculation = dtype_bytes(model.dtype), runner.batch, config.speculative_config
    most = num_seqs + 1  # with one of padding
    keys = runner.graph_runner.known_keys(speculation is not None and speculation.adaptive)
    num_layers = (len(keys) + len(mixed_sizes(batch.sizes))) * model.num_layers
    if speculation is not None:
        # Steps that verify drafts are recorded when they are needed, too, up to what the most requests may verify.
        verified = [count * (1 + batch.max_drafts) for count in batch.sizes.decodes()]
        most = max(most, *(1 + count for count in verified if count <= num_tokens))
        tree = DraftTree.of_config(speculation)
        rounds = sum(tree.num_levels(key.num_drafts or 0) for key in keys)  # a drafter runs once for each level
        num_layers += rounds * (0 if drafter is None else len(drafter.specs))
    forward = runner.forward_bytes(min(max(batch.sizes.largest_mixed, most), num_tokens))
    num_columns = model.vocab_size  # of logits; ranks that share them keep their part beside all of them
    if config.tensor_parallel_size > 1:
        num_columns += -(-model.vocab_size // config.tensor_parallel_size)
    logits = most * (model.hidden_size + num_columns) * size + workspace_bytes(most, model.vocab_size)
    return forward + logits + num_layers * _KERNELS_PER_LAYER * _BYTES_PER_KERNEL
