"""Compute what an engine on a GPU takes beside its KV cache: predicted from shapes, then measured by one step.

    activations   what a step keeps alive at once, at most: either the widest point of the forward pass, of
                  `max_num_batched_tokens` tokens, or the logits of `max_num_seqs` of them with the sampler's workspaces
    step buffers  rows, block tables, the header, attention's partial results: made on the meta device, and counted; and
                  what a backend keeps
    CUDA graphs   one pool for the tensors of all recordings, as large as the largest, and what a recorded kernel costs
    libraries     cuBLAS's workspace for each stream, and code that is loaded as it is needed

The step that measures them has the tokens and the sequences of the largest one, but no attention is computed: it reads
and writes tensors that are there all the same. vLLM's `profile_run` does it so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from itertools import chain

import torch

from teachllm.config import EngineConfig
from teachllm.core.memory import MemoryPlan, NotEnoughMemoryError, format_bytes
from teachllm.layers.attention_backends import selection
from teachllm.layers.dtypes import dtype_bytes
from teachllm.models.draft_heads.medusa import MedusaConfig
from teachllm.models.model_config import ModelConfig
from teachllm.spec_decode.load import DrafterConfig
from teachllm.spec_decode.tree import DraftTree
from teachllm.worker.gpu.cuda_graphs import GraphSizes
from teachllm.worker.gpu.device_batch import DeviceBatch
from teachllm.worker.gpu.device_step import DeviceStep
from teachllm.worker.gpu.spec_decode.capture_ahead import VARIANTS, decode_steps
from teachllm_kernels.attention.decode_plan import DecodePlan
from teachllm_kernels.linear.hopper_gated_linear import FROM_ROWS
from teachllm_kernels.linear.hopper_linear import has_hopper
from teachllm_kernels.sampling.random_sample import workspace_bytes

# Rows that are scored, or sampled where the sampler's general way is taken, together: it holds so many copies of their
# logits in float32 at once, and so many bytes for each token of their sequences, at most. A row takes 9 MiB for a
# vocabulary of 150,000: with twice as many, a small model would need more to sample than to compute.
SAMPLED_AT_ONCE = 16
_LOGITS_COPIES = 14
_SCORED_COPIES = 9  # of a prompt's
_BYTES_OF_HISTORY = 24

_KERNELS_A_LAYER = 9
_BYTES_A_KERNEL = 8 << 10  # of a recording, an assumption: `benchmarks/ledger.py` prints what recordings took
_CODE = 128 << 20  # kernels that libraries and Triton load, an assumption likewise; the measured one replaces it
_REPORT_THRESHOLD_BYTES = 32 << 20


def predict_needs(
    config: EngineConfig, model: ModelConfig, device: torch.device, drafter: DrafterConfig | None = None
) -> dict[str, int]:
    """Bytes by the names of `MemoryPlan`'s fields; the weights are `model.weight_bytes`.

    Args:
        config: resolved for this model.
        device: a GPU.
    """
    return {
        "activations": activation_bytes(config, model, device, drafter),
        "buffers": buffer_bytes(config, model, drafter),
        "graphs": graph_bytes(config, model, drafter) if has_graphs(config) else 0,
        "libraries": _CODE + (2 if has_graphs(config) else 1) * _workspace_bytes(device),
    }


def activation_bytes(
    config: EngineConfig, model: ModelConfig, device: torch.device, drafter: DrafterConfig | None = None
) -> int:
    """Return what a step keeps alive at its peak, at most."""
    num_tokens, num_seqs = config.max_num_batched_tokens, config.max_num_seqs
    assert num_tokens and num_seqs
    size, speculation = dtype_bytes(model.dtype), config.speculative_config
    hidden = num_tokens * model.hidden_size * size
    num_logits = num_seqs * (1 if speculation is None else 1 + len(DraftTree.of_config(speculation).parents))
    return max(
        num_tokens * _width(config, model, device) * size,
        ungated_bytes(config, model, device),
        _dequantizing_bytes(num_tokens, model, _is_gated(config, model, device)),
        hidden + _logits_bytes(config, model, num_logits * size) + sampling_bytes(config, model),
        hidden + num_tokens * _drafter_width(config, drafter, device) * size,
    )


def _logits_bytes(config: EngineConfig, model: ModelConfig, num_bytes: int) -> int:
    """Of so many bytes for each token of the vocabulary; ranks that share it keep their part beside all of them."""
    num_parts = config.tensor_parallel_size
    return num_bytes * (model.vocab_size + (-(-model.vocab_size // num_parts) if num_parts > 1 else 0))


def _drafter_width(config: EngineConfig, drafter: DrafterConfig | None, device: torch.device) -> int:
    """The same of a drafter that follows every token of a step, or catches up with as many."""
    if drafter is None or isinstance(drafter.head, MedusaConfig):
        return 0
    if drafter.head is None:
        return _width(config, drafter.model, device)
    return 0


def _width(config: EngineConfig, model: ModelConfig, device: torch.device) -> int:
    """Return the elements that a token of the largest step keeps alive."""
    return model.gated_peak_width if _is_gated(config, model, device) else _peak_width(config, model)


def _peak_width(config: EngineConfig, model: ModelConfig) -> int:
    return model.fixed_peak_width if config.batch_invariant else model.peak_width


def _dequantizing_bytes(num_tokens: int, model: ModelConfig, is_gated: bool) -> int:
    """Return the bytes that a step of many tokens takes while weights are dequantized."""
    kinds = model.dequantized  # as `Dequantized`
    peaks = (size + num_tokens * (gated_width if is_gated else width) for size, width, gated_width in kinds)
    return max(peaks, default=0) * dtype_bytes(model.dtype)


def ungated_bytes(config: EngineConfig, model: ModelConfig, device: torch.device) -> int:
    """The peak of a step one token short of being gated (`hopper_gated_linear`), if the largest step is; else 0.

    It has gate and up in memory, which the largest one never has, and may need more than that one.
    """
    if not _is_gated(config, model, device):
        return 0
    num_bytes = (FROM_ROWS - 1) * model.peak_width * dtype_bytes(model.dtype)
    return max(num_bytes, _dequantizing_bytes(FROM_ROWS - 1, model, is_gated=False))


def _is_gated(config: EngineConfig, model: ModelConfig, device: torch.device) -> bool:
    """Return whether `hopper_gated_linear` runs in the step of most tokens; `Linear.gated` decides."""
    assert config.max_num_batched_tokens
    is_large = config.max_num_batched_tokens >= FROM_ROWS
    return is_large and dtype_bytes(model.dtype) == 2 and not config.batch_invariant and has_hopper(device)


def sampling_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Return what sampling takes beside the logits, at most."""
    num_seqs, max_len = config.max_num_seqs, config.max_model_len
    assert num_seqs and max_len
    per_row = _LOGITS_COPIES * 4 * model.vocab_size + _BYTES_OF_HISTORY * max_len
    scored = min(SAMPLED_AT_ONCE, max_len) * _SCORED_COPIES * 4 * model.vocab_size
    return max(min(num_seqs, SAMPLED_AT_ONCE) * per_row, scored, workspace_bytes(num_seqs, model.vocab_size))


def buffer_bytes(config: EngineConfig, model: ModelConfig, drafter: DrafterConfig | None = None) -> int:
    """Return what a runner keeps from step to step beside weights and KV."""
    rows, budget, nowhere = config.max_num_seqs, config.max_num_batched_tokens, torch.device("meta")
    assert rows and budget
    tree = None if config.speculative_config is None else DraftTree.of_config(config.speculative_config)
    batch = _meta_batch(config, tree)
    heads = (model.num_attention_heads, model.num_kv_heads, model.head_size)
    kinds = [heads for _ in set(model.windows)]
    drafting = 0
    if drafter is not None and tree is not None:
        kinds += [(drafter.num_heads, spec.num_kv_heads, spec.head_size) for spec in drafter.specs[:1]]
        num_inner, size = len(tree.inner), dtype_bytes(model.dtype)
        drafting = (rows + 1) * num_inner * model.vocab_size * size  # logits that drafts were drawn from
        drafting += drafter.num_features * budget * model.hidden_size * size
    plans = [DecodePlan.allocate(rows, *kind, nowhere, max_query_len=1 + batch.max_drafts) for kind in kinds]
    found = [getattr(plan, name) for plan in plans for name in plan.__slots__]
    found += vars(batch).values()
    tensors = [each for each in found if isinstance(each, torch.Tensor) and not each._is_view()]
    kept = selection.workspace_bytes(config.attention_backend)
    return kept + drafting + sum(tensor.nbytes for tensor in tensors if tensor.device == nowhere)


def has_graphs(config: EngineConfig) -> bool:
    """Return whether steps are recorded: not with a backend that needs the host in each, as some chosen by name do."""
    return not config.enforce_eager and selection.is_recordable(config.attention_backend)


def graph_bytes(config: EngineConfig, model: ModelConfig, drafter: DrafterConfig | None = None) -> int:
    """Return what all of `num_recordings` hold, and those that an engine that speculates records ahead."""
    num_seqs, num_tokens = config.max_num_seqs, config.max_num_batched_tokens
    assert num_seqs and num_tokens
    size, largest = dtype_bytes(model.dtype), GraphSizes(num_seqs, num_tokens).largest_mixed
    most = num_seqs + 1  # with one of padding
    num_layers = num_recordings(config) * model.num_layers
    if config.speculative_config is not None:
        tree = DraftTree.of_config(config.speculative_config)
        batch = _meta_batch(config, tree)
        # What speculates is recorded when it is needed, too: as many tokens as the most requests may verify.
        verified = [count * (1 + batch.max_drafts) for count in batch.sizes.decodes()]
        most = max(most, *(1 + count for count in verified if count <= num_tokens))
        steps = decode_steps(batch, config.speculative_config.adaptive).values()
        rounds = sum(tree.num_levels(step.most_next) for step in steps)  # a drafter runs once for each level
        num_drafter_layers = 0 if drafter is None else len(drafter.specs)
        num_layers += len(VARIANTS) * (len(steps) * model.num_layers + rounds * num_drafter_layers)
    logits = most * model.hidden_size * size + _logits_bytes(config, model, most * size)
    logits += workspace_bytes(most, model.vocab_size)
    num_kernels = num_layers * _KERNELS_A_LAYER
    return max(largest, most) * _peak_width(config, model) * size + logits + num_kernels * _BYTES_A_KERNEL


def _meta_batch(config: EngineConfig, tree: DraftTree | None) -> DeviceBatch:
    """Its tensors have sizes only."""
    rows, max_len, budget = config.max_num_seqs, config.max_model_len, config.max_num_batched_tokens
    assert rows and max_len and budget
    return DeviceBatch(rows, max_len, config.block_size, budget, torch.device("meta"), tree)


def num_recordings(config: EngineConfig) -> int:
    """Return how many there are when every size has been met: decodes, prompts alone, mixed steps.

    Each of the first two with one way of sampling, though every further one (greedy, random, filtered, outside of the
    graph) is recorded beside it. The sizes of prompts are asked of `GraphSizes`, step by step.
    """
    num_seqs, num_tokens = config.max_num_seqs, config.max_num_batched_tokens
    assert num_seqs and num_tokens
    sizes = GraphSizes(num_seqs, num_tokens)
    largest = sizes.largest_mixed
    full: set[tuple[bool, tuple[int, int]]] = set()
    for count in range(1, num_seqs + 1):
        each = list(range(count))
        decodes = DeviceStep(each, [1] * count, each, num_decodes=count, sampling=each)
        prompts = (DeviceStep(each, [1] * (count - 1) + [n], each, 0, each) for n in range(1, largest + 1))
        for step in chain([decodes], prompts):
            shape = sizes.full(step)
            if shape is None:  # nor is there one for longer prompts
                break
            full.add((step.is_decode, shape))
    mixed = {sizes.mixed(count) for count in range(1, largest + 1)}
    return len(full) + len(mixed)


def measure_needs(
    plan: MemoryPlan, run: Callable[[], object], device: torch.device, taken_before: int, is_eager: bool
) -> dict[str, int]:
    """Activations and libraries, measured by running the largest step.

    Args:
        plan: as predicted.
        run: the step; what it returns was alive at its end.
        taken_before: bytes that were in use on the device before anything was loaded.
        is_eager: no step is recorded.

    Raises:
        NotEnoughMemoryError: the step does not fit.
    """
    allocated = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        result = run()
    except torch.cuda.OutOfMemoryError:
        message = "the largest step does not fit: set a smaller max_num_batched_tokens or max_num_seqs"
        raise NotEnoughMemoryError(message, memory_table(plan)) from None
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del result
    workspaces = torch.cuda.memory_allocated(device) - allocated  # allocated once, by this stream's first product
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - taken_before - torch.cuda.memory_reserved(device)
    num_streams = 1 if is_eager else 2  # graphs are recorded on one of their own
    return {
        "activations": peak - allocated - workspaces,
        "libraries": max(outside, 0) + num_streams * workspaces,
    }


def compare(plan: MemoryPlan, measured: Mapping[str, int]) -> None:
    """Says in one line what was not as predicted: more than 5% off, and more than 32 MiB."""
    off: list[str] = []
    for name in ("weights", "activations"):
        predicted, found = getattr(plan, name), measured[name]
        if abs(found - predicted) > max(predicted / 20, _REPORT_THRESHOLD_BYTES):
            off.append(f"{name} take {format_bytes(found)} instead of {format_bytes(predicted)}")
    if off:
        warnings.warn(f"memory is not as predicted: {', '.join(off)}; the KV cache gets what is left", stacklevel=3)


def memory_table(plan: MemoryPlan) -> str:
    """A plan's rows as lines of text."""
    return "\n".join(f"  {what:<16}{amount:>12}  {why}" for what, amount, why in plan.rows())


def _workspace_bytes(device: torch.device) -> int:
    """PyTorch's choice for cuBLAS, for each stream."""
    major, _ = torch.cuda.get_device_capability(device)
    return 32 << 20 if major >= 9 else 8320 << 10
