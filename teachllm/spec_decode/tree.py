"""Trees of drafts: several guesses for a token, and guesses after each, all verified in one pass.

A chain ends at its first wrong guess. A tree has a second guess beside it, and goes on there:

    newest ─┬─ 0 ─┬─ 2 ── 4        nodes in order of depth; each token sees the known ones and its own ancestors
            │     └─ 3             `sees`, as bits: the newest token is bit 0, node i is bit i + 1
            └─ 1

Verification walks down from the newest token: where the token that a position samples is one of its children, that
child holds. What holds is a path, whose K and V lie between those of other nodes and are moved together afterwards.
A chain is a tree without siblings.

Sources: Miao et al., "SpecInfer", ASPLOS 2024; Cai et al., "Medusa", ICML 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from teachllm.speculative_config import SpeculativeConfig


@dataclass(frozen=True)
class DraftTree:
    """The shape of a tree.

    Attributes:
        parents: of each node, in order of depth; -1 is the newest token. Siblings are neighbours, the likeliest first.
    """

    parents: tuple[int, ...]

    @staticmethod
    def of(paths: Sequence[Sequence[int]]) -> DraftTree:
        """Build the tree from the paths of `SpeculativeConfig.tree`."""
        order = {tuple(path): node for node, path in enumerate(paths)}
        return DraftTree(tuple(order.get(tuple(path[:-1]), -1) for path in paths))

    @staticmethod
    def of_config(speculation: SpeculativeConfig) -> DraftTree:
        paths = speculation.tree
        return DraftTree.chain(speculation.max_drafts) if paths is None else DraftTree.of(paths)

    @staticmethod
    def chain(length: int) -> DraftTree:
        return DraftTree(tuple(range(-1, length - 1)))

    @cached_property
    def is_chain(self) -> bool:
        return self == DraftTree.chain(len(self.parents))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Return the depth of each node, 1 for nodes after the newest token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return tuple(depths)

    @cached_property
    def sees(self) -> tuple[int, ...]:
        """Return what the newest token sees of newest token and nodes, and each node: bits."""
        found = [1]
        for node, parent in enumerate(self.parents):
            found.append(found[parent + 1] | 1 << (node + 1))
        return tuple(found)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Return the children of the newest token, and of each node."""
        found: list[list[int]] = [[] for _ in range(len(self.parents) + 1)]
        for node, parent in enumerate(self.parents):
            found[parent + 1].append(node)
        return tuple(map(tuple, found))

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Return the nodes of each depth."""
        most = max(self.depths, default=0)
        return tuple(tuple(n for n, depth in enumerate(self.depths) if depth == level) for level in range(1, most + 1))

    @cached_property
    def most_siblings(self) -> int:
        return max(map(len, self.children))

    def num_levels(self, num_nodes: int) -> int:
        """Return how deep its first nodes reach."""
        return self.depths[num_nodes - 1] if num_nodes else 0

    def walk(self, sampled: Sequence[int], drafts: Sequence[int]) -> list[int]:
        """Return the nodes that hold.

        Args:
            sampled: the token of the newest token's position, and of each node's.
            drafts: of the first nodes.
        """
        path: list[int] = []
        at = 0  # 1 + the node reached
        while True:
            held = [node for node in self.children[at] if node < len(drafts) and drafts[node] == sampled[at]]
            if not held:
                return path
            path.append(held[0])
            at = held[0] + 1

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """Return the places that have children."""
        return tuple(place for place, children in enumerate(self.children) if children)

    def tensors(self, device: torch.device) -> TreeTensors:
        """Return the same tree as tensors for kernels."""

        def ints(values: Sequence[object], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        num_levels = len(self.levels)
        paths: list[list[int]] = [[]]
        for node, parent in enumerate(self.parents):
            paths.append([*paths[parent + 1], node])
        as_signed = [bits - (bits >> 63 << 64) for bits in self.sees]
        return TreeTensors(
            sees=ints(as_signed, torch.int64),
            depths=ints((0, *self.depths)),
            parents=ints([parent + 1 for parent in self.parents]),
            children=ints([[*nodes, *[-1] * (self.most_siblings - len(nodes))] for nodes in self.children]),
            kept=ints([self.inner.index(place) if place in self.inner else -1 for place in range(len(paths))]),
            paths=ints([[*path, *[-1] * (num_levels - len(path))] for path in paths]),
        )


@dataclass(frozen=True, slots=True)
class TreeTensors:
    """A tree of N nodes on a device. Place 0 is the newest token, place i + 1 node i.

    Attributes:
        sees: [N + 1] int64, bit j of place i: it sees place j.
        depths: [N + 1] int32, 0 for the newest token.
        parents: [N] int32, the place before each node.
        children: [N + 1, M] int32, the nodes after each place, in order; then -1.
        kept: [N + 1] int32, numbers the places that have children; -1 for the others.
        paths: [N + 1, num_levels] int32, the nodes on the way to each place, and the node there; then -1.
    """

    sees: torch.Tensor
    depths: torch.Tensor
    parents: torch.Tensor
    children: torch.Tensor
    kept: torch.Tensor
    paths: torch.Tensor
