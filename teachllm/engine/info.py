"""Tell what a model would need on this machine, before any weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from teachllm.config import EngineConfig
from teachllm.core.memory import MemoryPlan, format_bytes
from teachllm.distributed.layout import RankCoords, layout_of
from teachllm.engine.capacity import num_undisturbed
from teachllm.engine.make_core import check_ranks
from teachllm.engine.replicas.replica import replica_devices, share_of_threads
from teachllm.errors import counted
from teachllm.models.build import describe
from teachllm.models.model_config import ModelConfig, load_model_config
from teachllm.models.own_model import model_of_rank
from teachllm.quantization.formats.layer_schemes import quantization_of
from teachllm.spec_decode.load import load_drafter_config
from teachllm.worker.device import select_device
from teachllm.worker.memory_plan import plan_memory

Row = tuple[str, str, str]  # what, amount, explanation


def describe_model(config: EngineConfig, input_len: int | None = None, output_len: int | None = None) -> list[Row]:
    """Describe the model's shape, then its memory table, then how many equal requests run at once.

    Of several ranks, each is described; the table is for the rank with room for the fewest blocks, as many as all get.

    Args:
        input_len, output_len: tokens of such a request; None is 1024 and 128, or less where the model's context is.

    Raises:
        ValueError: the checkpoint is refused, one sequence does not fit, or such a request is too long; one line says
            why.
    """
    device = select_device(config.device)
    model = load_model_config(config, device.type)
    resolved = replace(config, device=str(device)).resolve(model.max_model_len)
    windowed = sum(window is not None for window in model.windows)
    layers = f"hidden size {model.hidden_size}" + (f", {windowed} with a sliding window" if windowed else "")
    heads = f"{model.num_attention_heads} query and {model.num_kv_heads} KV heads of {model.head_size}"
    code = "this project's code" if model.implementation == "teachllm" else "transformers' code, our paged attention"
    drafter, layout = load_drafter_config(resolved, model, device.type), layout_of(resolved)
    check_ranks(resolved, model, drafter)
    all_coords = [layout.coords(rank) for rank in range(layout.num_ranks)]
    parts = [model_of_rank(model, coords) for coords in all_coords]
    plans = [plan_memory(resolved, part, device, drafter) for part in parts]
    plan = min(plans, key=lambda each: each.num_blocks)
    input_len = input_len or min(1024, max(model.max_model_len - (output_len or 128), 1))
    output_len = output_len or min(128, max(model.max_model_len - input_len, 1))
    count = num_undisturbed(resolved, plan.num_blocks, input_len, output_len)
    limit = "all that max_num_seqs allows" if count == resolved.max_num_seqs else "none waits for blocks or loses them"
    return [
        *_replicas(resolved, device),
        ("architecture", model.architecture, code),
        ("parameters", f"{model.num_parameters / 1e6:,.1f} M", f"in {model.dtype} on {device}{_met(model)}"),
        *_quantization_rows(model, device),
        ("layers", str(model.num_layers), layers),
        ("heads", str(model.num_attention_heads), heads),
        ("context", f"{model.max_model_len} tokens", f"vocabulary of {model.vocab_size}"),
        *_in_use(device),
        *_ranks(parts, all_coords, [each.of_blocks(plan.num_blocks) for each in plans], plans.index(plan)),
        *plan.rows(),
        ("requests at once", str(count), f"of {counted(input_len, 'token')} in and {output_len} out: {limit}"),
    ]


def _ranks(
    parts: Sequence[ModelConfig], all_coords: Sequence[RankCoords], plans: Sequence[MemoryPlan], tightest: int
) -> list[Row]:
    """Return what each of several has."""
    if len(all_coords) == 1:
        return []
    rows = []
    for own, coords, plan in zip(parts, all_coords, plans, strict=True):
        modules = [
            f"layers {own.first_layer} to {own.first_layer + own.num_layers - 1}",
            *(["embedding"] if coords.is_first_stage else []),
            *(["output head"] if coords.is_last_stage else []),
        ]
        heads = f"{own.num_attention_heads} query and {own.num_kv_heads} KV heads"
        experts = ""
        if own.experts is not None and coords.layout.spreads_experts:
            experts = f", {own.experts.num_held} of {own.experts.num_experts} experts"
        kv = f"KV {format_bytes(plan.bytes_per_token)} per token, {plan.num_blocks} blocks"
        why = f"weights of {', '.join(modules)}: {heads}{experts}; {kv}"
        rows.append((f"rank {coords.rank}", format_bytes(plan.weights), why))
    return [*rows, ("what follows", f"rank {tightest}", "which has room for the fewest blocks, and so all have")]


def _replicas(config: EngineConfig, device: torch.device) -> list[Row]:
    """Return where each has what the other rows say."""
    if config.data_parallel_size == 1:
        return []
    if device.type == "cpu":
        share = f"{share_of_threads(config)} of the CPU's {torch.get_num_threads()} threads"
    else:
        share = "; ".join(" to ".join(dict.fromkeys((each[0], each[-1]))) for each in replica_devices(config))
    return [("replicas", str(config.data_parallel_size), f"each has all that follows, and {share}")]


def _quantization_rows(model: ModelConfig, device: torch.device) -> list[Row]:
    """Return what the weights of layers became; if they differ, what the first layer's became."""
    if model.quantization is None:
        return []
    takes = f"layers take {format_bytes(model.active_bytes)}"
    found = quantization_of(model.raw, Path(model.path), None, None)
    scheme = None if found is None else next(filter(None, map(found.schemes, describe(model.raw).projections)), None)
    what = model.quantization if scheme is None else f"{model.quantization}: {scheme}"
    if device.type == "cpu":
        takes += f": a CPU multiplies dequantized weights, in {model.dtype}"
    return [("quantization", what, takes)]


def _met(model: ModelConfig) -> str:
    """Describe how much of a mixture of experts one token meets."""
    if not model.has_experts:
        return ""
    return f"; between embedding and output head a token meets {model.num_active_parameters / 1e6:,.1f} M"


def _in_use(device: torch.device) -> list[Row]:
    """Return what a GPU's context and other programs hold, which is no part of the budget."""
    if device.type != "cuda":
        return []
    free, total = torch.cuda.mem_get_info(device)
    return [("in use before", format_bytes(total - free), f"of {format_bytes(total)}, by CUDA and other programs")]
