"""Define attention backends: their interface, a layer's settings, and what a model and its settings need of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from teachllm_kernels.attention.kv_quantization import KVScales

if TYPE_CHECKING:
    from teachllm.layers.attention import AttentionMetadata

KVCache = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """Hold the settings of one layer.

    Attributes:
        scale: multiplies the dot products.
        window: a token sees itself and the `window - 1` before it; None sees all.
        soft_cap: squeezes each score into (-soft_cap, soft_cap).
        kv_scales: scales of K and V, if the cache is quantized.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    kv_scales: KVScales | None = field(default=None, compare=False, repr=False)  # layers of a kind are equal


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """Describe what a model and a configuration ask of every layer's attention.

    Attributes:
        dtype: of q, and of K and V before they are written.
        windows: of all layers.
        has_soft_cap: whether a layer may have one.
        has_quantized_kv: the KV cache is quantized. Attention must read the quantized K and V, also of the step's own
            tokens: otherwise a prompt that is cut in another place would see other values.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str
    block_size: int
    windows: frozenset[int | None]
    has_soft_cap: bool = False
    has_quantized_kv: bool = False


class AttentionBackend(Protocol):
    """Computes attention over the paged cache.

    What a backend prepares once per step is a metadata class of its own, see `AttentionMetadata.prepared`.

    Attributes:
        name: as the package's docstring lists it.
        in_graphs: its launches can be recorded in a CUDA graph, as lengths stay on the device.
        splits_decodes: it computes decodes from `AttentionMetadata.decode_plans`, and may leave them to a model that
            fuses them.
        workspace_bytes: it allocates when it is used first, and keeps.
    """

    name: str
    in_graphs: bool
    splits_decodes: bool
    workspace_bytes: int

    @staticmethod
    def check(needs: AttentionNeeds) -> None:
        """Refuses what it cannot compute.

        Raises:
            ValueError: in one line, with what would work.
        """

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        settings: AttentionSettings,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute `layers.attention.paged_attention`; write to `out`, [num_tokens, num_heads, head_size], if given."""
