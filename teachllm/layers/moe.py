"""The experts of a mixture: many small MLPs, of which a router picks a few for every token.

A token pays for the experts that it meets, memory for all of them. Their weights lie stacked, so that one launch on a
GPU multiplies the tokens of all experts; a CPU goes from one expert to the next.

Source: Fedus et al., "Switch Transformers", 2022.
"""

from __future__ import annotations

import torch
from torch import nn

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


def route(logits: torch.Tensor, top_k: int, renormalizes: bool) -> Routes:
    """The experts of each token, and how much each counts, by the device's best way. As `route_reference`."""
    return (route_triton if logits.is_cuda else route_reference)(logits, top_k, renormalizes)


class Experts(nn.Module):
    """Some of a layer's experts, each down(silu(gate(x)) * up(x)), or a slice of the width of each.

    What it returns is a sum over the experts and the width that are held: the parts of several holders add up to what
    one holder of all would have returned.

    Args:
        held: the experts that are here, by their numbers.
        width: of the intermediate activations, as much of it as is here.

    Attributes:
        gate_up: [num_held, 2 * width, hidden_size], of each expert gate above up.
        down: [num_held, hidden_size, width].
        is_fixed: a row does not depend, by one bit, on how many others there are; on a GPU only.
    """

    def __init__(self, hidden_size: int, held: range, width: int) -> None:
        super().__init__()
        self.held = held
        self.gate_up = nn.Parameter(torch.empty(len(held), 2 * width, hidden_size), requires_grad=False)
        self.down = nn.Parameter(torch.empty(len(held), hidden_size, width), requires_grad=False)
        self.is_fixed = False

    def forward(self, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size], weighted as the router says."""
        if not len(x):
            return torch.empty_like(x)
        is_cuda = x.is_cuda
        groups = (group_triton if is_cuda else group_reference)(routes.experts, self.held)
        if not is_cuda:
            h = grouped_gated_reference(x, self.gate_up, groups)
            return combine_reference(grouped_down_reference(h, self.down, groups, routes), routes.experts, self.held)
        h = grouped_gated_triton(x, self.gate_up, groups, self.is_fixed)
        y = grouped_down_triton(h, self.down, groups, routes, self.is_fixed)
        del h
        return combine_triton(y, routes.experts, self.held)

    def parts(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(gate, up, down) of `held[index]`, for a checkpoint to fill: [width, hidden_size], the last one turned."""
        gate, up = self.gate_up.data[index].chunk(2)
        return gate, up, self.down.data[index]
