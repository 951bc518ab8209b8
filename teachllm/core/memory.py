"""Plan the memory (lesson 01): bytes of KV per token and per block, how many blocks fit, and a table of it all.

    bytes per token = sum over layers of 2 (K and V) * num_kv_heads * head_size * dtype_bytes

The KV cache gets what everything else leaves of the budget, and its size is how many tokens can be in the air at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Describe what one layer keeps per token; `window` is how many tokens back it looks, None for all."""

    num_kv_heads: int
    head_size: int
    dtype_bytes: int
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_size * self.dtype_bytes


class NotEnoughMemoryError(ValueError):
    """The memory is too small: one line says what does not fit and what would; `table` shows where the memory goes."""

    def __init__(self, message: str, table: str) -> None:
        super().__init__(f"{message}\n{table}")
        self.table = table


def format_bytes(num_bytes: int) -> str:
    """Return a number of bytes for people: 1.5 GiB, 12.0 KiB, 7 B."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.1f} {unit}" if unit != "B" else f"{num_bytes} B"
        value /= 1024
    return f"{value:.2f} GiB"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Divide a budget of bytes.

    Attributes:
        budget: bytes the engine may use in all.
        weights, activations: bytes taken before the KV cache; buffers, graphs, libraries: the same, on a GPU.
        specs: one for each layer.
        block_size: tokens per block.
        max_model_len: the longest sequence, which must fit alone.
    """

    budget: int
    weights: int
    activations: int
    specs: Sequence[KVCacheSpec]
    block_size: int
    max_model_len: int
    buffers: int = 0
    graphs: int = 0
    libraries: int = 0

    @property
    def taken(self) -> int:
        """Return the bytes that are not KV cache."""
        return self.weights + self.activations + self.buffers + self.graphs + self.libraries

    @property
    def bytes_per_token(self) -> int:
        return sum(spec.bytes_per_token for spec in self.specs)

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    @property
    def num_blocks(self) -> int:
        """Return how many blocks fit in what is left."""
        return max(self.budget - self.taken, 0) // self.bytes_per_block

    def of_blocks(self, num_blocks: int) -> MemoryPlan:
        """Return the same plan with a budget for exactly `num_blocks` blocks."""
        return replace(self, budget=self.taken + num_blocks * self.bytes_per_block)

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the table: what, how much, why."""
        spec = self.specs[0]
        layers = len(self.specs)
        size = f"{spec.dtype_bytes} bytes" if spec.dtype_bytes > 1 else "1 byte"
        formula = f"2 x {layers} layers x {spec.num_kv_heads} KV heads x {spec.head_size} x {size}"
        if any(other.bytes_per_token != spec.bytes_per_token for other in self.specs):
            formula = f"summed over {layers} layers of different shapes"
        longest = self.max_model_len
        kv_bytes = self.num_blocks * self.bytes_per_block
        on_gpu = [
            ("step buffers", self.buffers, "rows, block tables, attention's partial results"),
            ("CUDA graphs", self.graphs, "kept free for what recordings hold"),
            ("libraries", self.libraries, "their workspaces, and compiled kernels"),
        ]
        return [
            ("budget", format_bytes(self.budget), "what the engine may use"),
            ("weights", format_bytes(self.weights), "read once per step"),
            ("activations", format_bytes(self.activations), "the largest step's, kept free"),
            *((what, format_bytes(amount), why) for what, amount, why in on_gpu if amount),
            ("KV per token", format_bytes(self.bytes_per_token), formula),
            ("KV per block", format_bytes(self.bytes_per_block), f"{self.block_size} tokens"),
            ("KV per sequence", format_bytes(self.bytes_per_token * longest), f"of max_model_len={longest} tokens"),
            ("KV cache", format_bytes(kv_bytes), f"{self.num_blocks} blocks, {self.num_tokens} tokens"),
            ("concurrency", f"{self.num_tokens / longest:.1f}x", "sequences of max_model_len that fit at once"),
        ]
