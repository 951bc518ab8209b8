"""Random weights replace a checkpoint's (`load_format="dummy"`); they keep activations at unit size.

Several ranks make the same model as one rank. A tensor's values are drawn some rows at a time, each time from a seed
made of the tensor's name and the position of the rows: a rank draws the rows that hold its part and keeps that part. It
draws all of a quantized projection, just as it would read all of it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable

import torch
from torch import nn

from teachllm.layers.checkpoint_tensors import Destination, TensorDestination
from teachllm.layers.linear import Linear
from teachllm.layers.weights.quantized_weight_loader import Slot

_AT_ONCE = 1 << 22  # values


def fill_randomly(model: nn.Module, seed: int) -> None:
    """Fill all parameters of a model of transformers' code; equal seeds on equal devices give equal weights."""
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
    """Fill the tensors that a checkpoint would fill, whole or a rank's part of them.

    Equal seeds on equal devices give equal weights.

    Args:
        destinations: where each tensor goes, by the names of the checkpoint's tensors.
    """
    for name, place in destinations:  # one at a time: unpacked quantized weights are freed once they are merged
        if isinstance(place, Slot):
            part = place.part
            if part is not None and not part.is_read:
                part.fill_randomly(_seeded(seed, part.name, part.device))
        elif place.constant is not None:
            place.target.fill_(place.constant)
        else:
            _fill(name, place, seed)


def _seeded(seed: int, name: str, device: torch.device) -> torch.Generator:
    """Return the generator of one of the model's random tensors, or of one part of it."""
    return torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def _fill(name: str, place: TensorDestination, seed: int) -> None:
    own, *columns = place.ranges or tuple(slice(0, size) for size in place.shape)
    at_once = max(_AT_ONCE // math.prod(place.shape[1:]), 1)
    for first in range(own.start // at_once * at_once, own.stop, at_once):
        size = (min(at_once, place.shape[0] - first), *place.shape[1:])
        generator = _seeded(seed, f"{name} {first}", place.target.device)
        values = torch.randn(size, dtype=place.target.dtype, device=place.target.device, generator=generator)
        start, stop = max(first, own.start), min(first + at_once, own.stop)
        drawn = values[(slice(start - first, stop - first), *columns)]
        copies = (slice(None),) * (place.target.dim() - len(place.shape))
        place.target[(*copies, slice(start - own.start, stop - own.start))] = drawn * place.shape[-1] ** -0.5


def _fill_with_constant(name: str, tensor: torch.Tensor) -> bool:
    """Fill a norm's weight or a bias of transformers' code with its constant; return False for other tensors."""
    if "norm" in name or (tensor.dim() == 1 and name.endswith("weight")):
        tensor.fill_(1.0)
    elif name.endswith("bias"):
        tensor.zero_()
    else:
        return False
    return True
