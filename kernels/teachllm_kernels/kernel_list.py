"""List all kernels: the file of each kernel that `selection.py` names, and the names that a profiler prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["KERNELS", "UNCHOSEN", "ListedKernel"]

PRODUCTS, ATTENTION, OTHER = "matrix products", "attention", "norms and the rest"
EXCHANGES, ROUTING, DRAFTS, SAMPLING = "exchanges of ranks", "routing to experts", "drafts", "sampling"


class ListedKernel(NamedTuple):
    """Say where a kernel is written and what a profiler calls it.

    Attributes:
        file: below `teachllm_kernels`; None: a library's.
        names: of its launches.
        group: what `teachllm bench latency --profile` counts it among.
    """

    file: str | None
    names: tuple[str, ...] = ()
    group: str = PRODUCTS


KERNELS: Mapping[str, ListedKernel] = {
    "batch_invariant_gemm": ListedKernel("linear/batch_invariant_gemm.py", ("_batch_invariant_gemm",)),
    "dequantize": ListedKernel("linear/packed/dequantize.py", ("_dequantize",), OTHER),
    "fused_paged_decode": ListedKernel("attention/paged_decode.py", ("_paged_decode",), ATTENTION),
    "gemv": ListedKernel("linear/gemv.py", ("_gemv",)),
    "grouped_gemm": ListedKernel("moe/grouped_gemm.py", ("_grouped_gemm",)),
    "hopper_decode": ListedKernel("attention/hopper_decode.py", ("_hopper_decode",), ATTENTION),
    "hopper_gated_linear": ListedKernel("linear/hopper_gated_linear.py", ("_hopper_gated_linear",)),
    "hopper_linear": ListedKernel("linear/hopper_linear.py", ("_hopper_linear",)),
    "hopper_packed_linear": ListedKernel("linear/packed/hopper_packed_linear.py", ("_hopper_packed_linear",)),
    "hopper_prefill": ListedKernel("attention/hopper_prefill.py", ("_hopper_prefill",), ATTENTION),
    "hopper_scaled_linear": ListedKernel("linear/hopper_linear.py", ("_hopper_linear",)),
    "hopper_scaled_mm": ListedKernel("linear/scaled/hopper_scaled_mm.py", ("_hopper_scaled_mm",)),
    "library": ListedKernel(None),
    "library_added": ListedKernel(None),
    "onednn": ListedKernel(None),
    "packed_gemv": ListedKernel("linear/packed/packed_gemv.py", ("_packed_gemv",)),
    "packed_linear": ListedKernel("linear/packed/packed_linear.py", ("_packed_linear",)),
    "paged_decode": ListedKernel("attention/paged_decode.py", ("_paged_decode",), ATTENTION),
    "paged_prefill": ListedKernel("attention/paged_prefill.py", ("_paged_prefill",), ATTENTION),
    "rope_kv_write": ListedKernel("attention/rope_kv_write.py", ("_rope_kv_write",), OTHER),
    "scaled_gemv": ListedKernel("linear/scaled/scaled_gemv.py", ("_scaled_gemv",)),
    "scaled_linear": ListedKernel("linear/scaled/scaled_linear.py", ("_scaled_linear",)),
    "scaled_mm": ListedKernel("linear/scaled/scaled_mm.py", ("_scale_sums",), OTHER),
    "skinny_gemm": ListedKernel("linear/skinny_gemm.py", ("_skinny_gemm",)),
}

# Launches of the kernels that no case names, since nothing is to choose, by the group that a profile counts them among.
UNCHOSEN: Mapping[str, tuple[str, ...]] = {
    ATTENTION: ("_plan_decode", "_merge_splits", "_plan_prefill"),
    EXCHANGES: ("_one_shot_all_reduce",),
    ROUTING: ("_route", "_group", "_combine"),
    DRAFTS: (
        *("_draft_inputs", "_push_drafts", "_following", "_find_matches", "_propose", "_move_kv"),
        *("_draft_proposals", "_synthetic_drafts", "_accept_drafts"),
    ),
    SAMPLING: ("_scan", "_pick", "_measure", "_cut", "_reject", "_settle", "_append_tokens"),
    OTHER: (
        *("_rms_norm", "_silu_and_mul", "_silu_and_mul_quantized", "_quantize_rows"),
        *("_kv_write", "_step_inputs", "_write_runs"),
    ),
}
