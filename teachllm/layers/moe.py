"""The experts of a mixture: many small MLPs, of which a router picks a few for every token.

A token pays for the experts that it meets, memory for all of them. Their weights lie stacked, so that one launch on a
GPU multiplies the tokens of all experts; a CPU goes from one expert to the next.

Source: Fedus et al., "Switch Transformers", 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from teachllm.layers.bound_module import BoundModule
from teachllm_kernels.moe.grouped_gemm import (
    grouped_down_reference,
    grouped_down_triton,
    grouped_gated_reference,
    grouped_gated_triton,
)
from teachllm_kernels.moe.moe_routing import (
    Routes,
    combine_reference,
    combine_triton,
    group_reference,
    group_triton,
    route_reference,
    route_triton,
)
from teachllm_kernels.selection import Operands, at, bound, card_of


def route(logits: torch.Tensor, top_k: int, renormalizes: bool) -> Routes:
    """Return the experts of each token and their weights, as `route_reference` does, by the device's fastest kernel."""
    return (route_reference if logits.is_cpu else route_triton)(logits, top_k, renormalizes)


class Experts(BoundModule):
    """Some of a layer's experts, each down(silu(gate(x)) * up(x)), or a slice of the width of each.

    What it returns is a sum over the experts and the width that are held: the parts of several holders add up to what
    one holder of all would have returned.

    Args:
        held: the experts that are here, by their numbers.
        width: of the intermediate activations, as much of it as is here.

    Attributes:
        gate_up: [num_held, 2 * width, hidden_size], of each expert gate above up.
        down: [num_held, hidden_size, width].
    """

    def __init__(self, hidden_size: int, held: range, width: int) -> None:
        super().__init__()
        self.held = held
        self.gate_up = nn.Parameter(torch.empty(len(held), 2 * width, hidden_size), requires_grad=False)
        self.down = nn.Parameter(torch.empty(len(held), hidden_size, width), requires_grad=False)
        self.bind()

    def bind(self) -> None:
        """Look up the kernels that compute these experts."""
        self.operands = Operands(
            form="experts", card=card_of(self.down.device), dtype=self.down.dtype, is_fixed=self.is_fixed
        )
        self._compute = bound("experts", self.operands, _EXPERTS)

    def forward(self, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Return the weighted sum of each token's experts: [num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        if not len(x):
            return torch.empty_like(x)
        return at(self._compute, len(x))(self, x, routes)

    def parts(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (gate, up, down) of `held[index]`, for a checkpoint to fill: [width, hidden_size], down transposed."""
        gate, up = self.gate_up.data[index].chunk(2)
        return gate, up, self.down.data[index]


def _in_one_launch(experts: Experts, x: torch.Tensor, routes: Routes) -> torch.Tensor:
    groups = group_triton(routes.experts, experts.held)
    h = grouped_gated_triton(x, experts.gate_up, groups, experts.is_fixed)
    y = grouped_down_triton(h, experts.down, groups, routes, experts.is_fixed)
    del h
    return combine_triton(y, routes.experts, experts.held)


def _one_after_the_other(experts: Experts, x: torch.Tensor, routes: Routes) -> torch.Tensor:
    groups = group_reference(routes.experts, experts.held)
    h = grouped_gated_reference(x, experts.gate_up, groups)
    return combine_reference(grouped_down_reference(h, experts.down, groups, routes), routes.experts, experts.held)


# By the names of `selection.CASES`.
_EXPERTS: Mapping[str, Callable[[Experts, torch.Tensor, Routes], torch.Tensor]] = {
    "grouped_gemm": _in_one_launch,
    "library": _one_after_the_other,
}
