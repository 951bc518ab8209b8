"""Share a machine's memory between weights, what steps need and KV blocks, before anything is loaded.

On a GPU what steps need is predicted, then measured: see `worker/gpu/memory/`, which a CPU's engine does not load. On a
CPU it is estimated.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from teachllm.config import EngineConfig
from teachllm.core.memory import MemoryPlan, NotEnoughMemoryError, format_bytes
from teachllm.layers.dtypes import dtype_bytes
from teachllm.models.model_config import ModelConfig
from teachllm.spec_decode.load import DrafterConfig
from teachllm.worker.kv_cache import kv_cache_specs

_CPU_DEFAULT_BYTES = 1 << 30


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    drafter: DrafterConfig | None = None,
    needs: Mapping[str, int] | None = None,
) -> MemoryPlan:
    """Share this machine's memory between weights, activations and KV blocks, before anything is loaded.

    Args:
        config: resolved for this model.
        model: of several ranks, what one has.
        drafter: with weights, and layers under the same block ids.
        needs: what steps need on a GPU, if it has been predicted already.

    Raises:
        ValueError: one sequence of `max_model_len` does not fit, or a size that was given does not; with the
            table and the largest setting that does.
    """
    assert config.max_model_len and config.max_num_seqs and config.max_num_batched_tokens
    on_gpu = device.type == "cuda"
    processes = config.num_local_ranks * config.data_parallel_size  # which all take their share of the main memory
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else _free_ram() // processes
    specs, weights = kv_cache_specs(model), model.weight_bytes
    if drafter is not None:
        specs, weights = [*specs, *drafter.specs], weights + drafter.weight_bytes
    plan = MemoryPlan(0, weights, 0, specs, config.block_size, config.max_model_len)
    if on_gpu:
        if needs is None:
            from teachllm.worker.gpu.memory.predicted import predict_needs

            needs = predict_needs(config, model, device, drafter).needs
        plan = _with_needs(plan, needs)
    else:
        plan = replace(plan, activations=_cpu_activation_bytes(config, model))
    return _with_budget(plan, config, free, device.type)


def measured_plan(plan: MemoryPlan, config: EngineConfig, free: int, measured: Mapping[str, int]) -> MemoryPlan:
    """Return a GPU's plan with bytes that were measured in place of those predicted. Errors as in `plan_memory`.

    Args:
        free: bytes that were free when `plan` was made.
        measured: bytes by the names of the plan's fields.
    """
    return _with_budget(_with_needs(plan, measured), config, free, "cuda")


def memory_table(plan: MemoryPlan) -> str:
    """Return a plan's rows as lines of text."""
    return "\n".join(f"  {what:<16}{amount:>12}  {why}" for what, amount, why in plan.rows())


def _with_needs(plan: MemoryPlan, needs: Mapping[str, int]) -> MemoryPlan:
    """Return the plan with other bytes in the fields that `needs` names."""
    fields: dict[str, Any] = dict(needs)
    return replace(plan, **fields)


def _with_budget(plan: MemoryPlan, config: EngineConfig, free: int, device_type: str) -> MemoryPlan:
    assert config.max_num_seqs
    if config.num_gpu_blocks_override is not None:
        budget = plan.taken + config.num_gpu_blocks_override * plan.bytes_per_block
    elif config.kv_cache_memory_bytes is not None:
        budget = plan.taken + config.kv_cache_memory_bytes
    elif device_type == "cuda":
        budget = int(free * config.gpu_memory_utilization)
    else:
        # A laptop's memory is shared with everything else: take what the settings can use, not all there is.
        per_sequence = -(-plan.max_model_len // plan.block_size) * plan.bytes_per_block
        useful = min(config.max_num_seqs * per_sequence, max(_CPU_DEFAULT_BYTES, per_sequence))
        budget = min(plan.taken + useful, int(free * config.gpu_memory_utilization))
    plan = replace(plan, budget=budget)
    _check_given(config, plan, free)
    if config.num_gpu_blocks_override is None:
        _check_longest(config, plan)
    return plan


def _check_given(config: EngineConfig, plan: MemoryPlan, free: int) -> None:
    """Refuse a size that was given and is more than the machine has: zeros cost nothing until they are used."""
    given = config.num_gpu_blocks_override or config.kv_cache_memory_bytes
    if given is None or plan.budget <= free:
        return
    room = max(free - plan.taken, 0)
    if config.num_gpu_blocks_override is not None:
        name, most = "num_gpu_blocks_override", room // plan.bytes_per_block
    else:
        name, most = "kv_cache_memory_bytes", room
    fits = f"set {name}={most} or less" if most else "take a smaller model or a machine with more memory"
    message = f"{name}={given} does not fit into the {format_bytes(free)} that are free: {fits}"
    raise NotEnoughMemoryError(message, memory_table(plan))


def _check_longest(config: EngineConfig, plan: MemoryPlan) -> None:
    """Refuse a budget that cannot hold one sequence of `max_model_len`.

    The error names the largest length that fits, or what leaves no room for a KV cache at all.
    """
    if plan.num_tokens >= plan.max_model_len:
        return
    if plan.taken >= plan.budget:
        needs = (
            f"weights ({format_bytes(plan.weights)}) and what a step needs ({format_bytes(plan.taken - plan.weights)})"
        )
        advice = "take a smaller model, raise gpu_memory_utilization, or lower max_num_batched_tokens and max_num_seqs"
        message = f"{needs} do not fit into the {format_bytes(plan.budget)} that the engine may use: {advice}"
        raise NotEnoughMemoryError(message, memory_table(plan))
    fits = f"set max_model_len={plan.num_tokens} or less, or " if plan.num_tokens > 1 else ""
    holds = f"the KV cache would hold {plan.num_tokens} tokens, less than one sequence of max_model_len="
    grow = "raise gpu_memory_utilization, or free some memory"
    if config.kv_cache_memory_bytes is not None:
        grow = f"set kv_cache_memory_bytes={-(-plan.max_model_len // plan.block_size) * plan.bytes_per_block} or more"
    raise NotEnoughMemoryError(f"{holds}{plan.max_model_len}: {fits}{grow}", memory_table(plan))


def _cpu_activation_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Estimate the largest step: a dozen tensors of the hidden size, and float32 logits of every sequence."""
    assert config.max_num_seqs and config.max_num_batched_tokens
    hidden = 12 * config.max_num_batched_tokens * model.hidden_size * dtype_bytes(model.dtype)
    return hidden + 2 * config.max_num_seqs * model.vocab_size * 4


def _free_ram() -> int:
    """Return the bytes of main memory that can be had without swapping."""
    try:
        with open("/proc/meminfo") as meminfo:
            available = next(line for line in meminfo if line.startswith("MemAvailable"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration):  # not Linux: what is installed, the best guess of the standard library
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
