"""Random weights in place of a checkpoint's (`load_format="dummy"`), which keep activations at unit size.

Several ranks make the same model as one does. A tensor's numbers are drawn some rows at a time, each time from a seed
made of its name and the place of the rows: a rank draws the rows that hold its part, and keeps that. Of a projection
that is quantized it draws all, as it would read all.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable

import torch
from torch import nn

from teachllm.distributed.shards import ShardDestination
from teachllm.layers.linear import Destination, Linear
from teachllm.quantization.formats.scheme import Slot

_AT_ONCE = 1 << 22  # numbers


def fill_randomly(model: nn.Module, seed: int) -> None:
    """All parameters of any model; equal for equal seeds on equal devices."""
    parameters = dict(model.named_parameters())
    generator = torch.Generator(next(iter(parameters.values())).device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if not _fill_with_constant(name, parameter):
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        for module in model.modules():
            if isinstance(module, Linear):
                module.fill_randomly(generator)


def fill_parts_randomly(destinations: Iterable[tuple[str, Destination]], seed: int) -> None:
    """What a checkpoint would fill, whole or a rank's part; equal for equal seeds on equal devices.

    Args:
        destinations: by the names of the checkpoint's tensors.
    """
    for name, place in destinations:  # one at a time: codes that are merged need not stay as they were made
        if isinstance(place, Slot):
            part = place.part
            if part is not None and not part.is_read:
                part.fill_randomly(_seeded(seed, part.name, part.device))
        elif isinstance(place, ShardDestination):
            _fill(name, place, seed)
        elif not _fill_with_constant(name, place):
            _fill(
                name, ShardDestination(place, tuple(slice(0, size) for size in place.shape), tuple(place.shape)), seed
            )


def _seeded(seed: int, name: str, device: torch.device) -> torch.Generator:
    """What draws the numbers of one thing among many."""
    return torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def _fill_with_constant(name: str, tensor: torch.Tensor) -> bool:
    """Whether it is a norm's weight or a bias, which are not drawn."""
    if "norm" in name or (tensor.dim() == 1 and name.endswith("weight")):
        tensor.fill_(1.0)
    elif name.endswith("bias"):
        tensor.zero_()
    else:
        return False
    return True


def _fill(name: str, part: ShardDestination, seed: int) -> None:
    if _fill_with_constant(name, part.target):
        return
    own, *columns = part.ranges
    at_once = max(_AT_ONCE // math.prod(part.shape[1:]), 1)
    for first in range(own.start // at_once * at_once, own.stop, at_once):
        size = (min(at_once, part.shape[0] - first), *part.shape[1:])
        generator = _seeded(seed, f"{name} {first}", part.target.device)
        numbers = torch.randn(size, dtype=part.target.dtype, device=part.target.device, generator=generator)
        start, stop = max(first, own.start), min(first + at_once, own.stop)
        drawn = numbers[(slice(start - first, stop - first), *columns)]
        part.target[start - own.start : stop - own.start] = drawn * part.shape[-1] ** -0.5
