"""Shards: which part of a tensor a rank holds.

Tensor parallelism cuts every weight into equal parts along one dimension: of a projection that widens, outputs, so that
each rank has some heads or some of the MLP's width; of the one that follows, the inputs that these make. Only the
vocabulary may leave less for the last ranks. Of an unquantized checkpoint a rank reads only its part.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from teachllm.errors import ModelError


@dataclass(frozen=True, slots=True)
class Shard:
    """The `index`-th of `count` equal parts of a dimension."""

    index: int = 0
    count: int = 1

    def of(self, size: int) -> slice:
        """Return the part of a dimension of `size`. Errors as in `equal`."""
        width = self.equal(size)
        return slice(self.index * width, (self.index + 1) * width)

    def equal(self, size: int) -> int:
        """Return the width of each part of a dimension of `size`.

        Raises:
            ModelError: `count` does not divide it.
        """
        if size % self.count:
            raise ModelError(f"{self.count} ranks cannot share a size of {size} equally")
        return size // self.count

    def of_any(self, size: int) -> slice:
        """Return the part of a dimension of any size: parts are rounded up, so the last ones have less, or nothing."""
        width = self.width(size)
        return slice(min(self.index * width, size), min((self.index + 1) * width, size))

    def width(self, size: int) -> int:
        """Return the width of the largest part of such a dimension."""
        return -(-size // self.count)


ALL = Shard()


def spread(size: int, count: int) -> list[range]:
    """Divide `size` things into `count` runs, as equal as possible."""
    ends = [size * i // count for i in range(count + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def of_kv_heads(tensor_rank: int, num_ranks: int, num_kv_heads: int) -> Shard:
    """Return a rank's KV heads: an equal share, or, with fewer heads than ranks, one that several ranks have."""
    if num_ranks <= num_kv_heads:
        return Shard(tensor_rank, num_ranks)
    return Shard(tensor_rank * num_kv_heads // num_ranks, num_kv_heads)
