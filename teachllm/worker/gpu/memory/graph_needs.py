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
from teachllm.worker.gpu.cuda_graphs import GraphSizes
from teachllm.worker.gpu.known_steps import VARIANTS, decode_steps, mixed_sizes, prompt_steps
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
    """Return the bytes that all recordings hold, those included that an engine with speculation records ahead."""
    num_seqs, num_tokens = config.max_num_seqs, config.max_num_batched_tokens
    assert num_seqs and num_tokens
    size, largest = dtype_bytes(model.dtype), GraphSizes(num_seqs, num_tokens).largest_mixed
    most = num_seqs + 1  # with one of padding
    num_layers = num_recordings(config) * model.num_layers
    if config.speculative_config is not None:
        tree, batch = DraftTree.of_config(config.speculative_config), runner.batch
        # Steps that verify drafts are recorded when they are needed, too, up to what the most requests may verify.
        verified = [count * (1 + batch.max_drafts) for count in batch.sizes.decodes()]
        most = max(most, *(1 + count for count in verified if count <= num_tokens))
        steps = decode_steps(batch, config.speculative_config.adaptive).values()
        rounds = sum(tree.num_levels(step.most_next) for step in steps)  # a drafter runs once for each level
        num_drafter_layers = 0 if drafter is None else len(drafter.specs)
        num_layers += len(VARIANTS) * (len(steps) * model.num_layers + rounds * num_drafter_layers)
    forward = runner.forward_bytes(min(max(largest, most), num_tokens))
    num_columns = model.vocab_size  # of logits; ranks that share them keep their part beside all of them
    if config.tensor_parallel_size > 1:
        num_columns += -(-model.vocab_size // config.tensor_parallel_size)
    logits = most * (model.hidden_size + num_columns) * size + workspace_bytes(most, model.vocab_size)
    return forward + logits + num_layers * _KERNELS_PER_LAYER * _BYTES_PER_KERNEL


def num_recordings(config: EngineConfig) -> int:
    """Return the number of recordings when every size has been met: decodes, prompts alone, mixed steps.

    Decodes and prompts count with one way of sampling each, though every further one (greedy, random, filtered, outside
    of the graph) is recorded beside it. `GraphSizes` tells the sizes of prompts, step by step.
    """
    num_seqs, num_tokens = config.max_num_seqs, config.max_num_batched_tokens
    assert num_seqs and num_tokens
    sizes = GraphSizes(num_seqs, num_tokens)
    return len(sizes.decodes()) + len(prompt_steps(sizes)) + len(mixed_sizes(sizes))
