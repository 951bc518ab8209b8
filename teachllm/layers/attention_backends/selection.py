"""Which backend computes attention: what is asked for by name, or the fastest that suits."""

from __future__ import annotations

import warnings

import torch

from teachllm.layers.attention_backends.base import AttentionBackend, AttentionNeeds
from teachllm.layers.attention_backends.flash_attn import FlashAttnBackend
from teachllm.layers.attention_backends.flashinfer import FlashInferBackend
from teachllm.layers.attention_backends.invariant import InvariantBackend
from teachllm.layers.attention_backends.reference import REFERENCE
from teachllm.layers.attention_backends.sdpa import SDPABackend
from teachllm.layers.attention_backends.triton import TritonBackend, heads_of
from teachllm.layers.dtypes import torch_dtype
from teachllm_kernels.selection import MANY, case_of

_ON_A_GPU: dict[str, type[AttentionBackend]] = {
    "triton": TritonBackend,
    "sdpa": SDPABackend,
    "flash_attn": FlashAttnBackend,
    "flashinfer": FlashInferBackend,
}


def is_recordable(name: str | None) -> bool:
    """Return whether CUDA graphs can hold the launches of this backend; None chooses among backends where they can."""
    return name not in _ON_A_GPU or _ON_A_GPU[name].in_graphs


def workspace_bytes(name: str | None) -> int:
    """Return the bytes that the backend of this name keeps on a GPU; None chooses among backends that keep nothing."""
    return _ON_A_GPU[name].workspace_bytes if name in _ON_A_GPU else 0


def select_backend(
    name: str | None, needs: AttentionNeeds, device: torch.device, batch_invariant: bool = False
) -> AttentionBackend:
    """The backend for a model.

    Args:
        name: as `EngineConfig.attention_backend`; None takes `triton` on a Hopper GPU whose kernels take the model's
            heads, elsewhere `sdpa` where it suits, else `triton`, and on a CPU `reference`.

    Raises:
        ValueError: it cannot compute what the model asks for, or not on this device; one line says what would work.
    """
    if device.type == "cpu":
        if name not in (None, REFERENCE.name):
            raise ValueError(f"attention_backend={name!r} needs a GPU: use attention_backend=reference on a CPU")
        return REFERENCE
    if name == REFERENCE.name:
        raise ValueError("attention_backend='reference' computes on a CPU: use attention_backend=triton, or device=cpu")
    if batch_invariant:
        InvariantBackend.check(needs)
        return InvariantBackend()
    if name is None:
        TritonBackend.check(needs)
        group = needs.num_heads // needs.num_kv_heads
        heads = heads_of(device, torch_dtype(needs.dtype), needs.head_size, group, needs.block_size)
        if "hopper_prefill" in case_of("prefill", heads, MANY).kernel:
            return TritonBackend()
        try:
            SDPABackend.check(needs)
        except ValueError:
            return TritonBackend()
        return SDPABackend()
    chosen = _ON_A_GPU[name]
    chosen.check(needs)
    if not chosen.in_graphs:
        warnings.warn(
            f"attention_backend={name!r} needs the host in every step: running without CUDA graphs", stacklevel=2
        )
    return chosen()
