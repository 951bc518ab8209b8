"""Define schemes (lesson 11): what a format stores of a projection, and how that becomes a quantized weight.

A scheme is one projection's: in a checkpoint some layers have 4 bits, some 8, some none. It names the tensors that a
file holds (`stored`), turns them into a quantized weight (`read`), and can quantize a float weight itself (`quantize`),
which is how an unquantized checkpoint is quantized while it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from teachllm.layers.weights.quantized_weights import Quantized

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WEIGHT_FLOATS = (*FLOATS, torch.float64)  # of what is not quantized: it gets the model's dtype as it is read


class Stored(NamedTuple):
    """Describe a tensor of a projection in a file.

    Attributes:
        shape: -1 is any size.
        dtypes: it may have.
        is_optional: files without it mean something by that.
        others: other shapes of the same values in the same order.
    """

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    is_optional: bool = False
    others: tuple[tuple[int, ...], ...] = ()


class Scheme(Protocol):
    """Define how a format stores a projection [out_features, in_features]. Equal schemes read alike.

    `str` of it is for errors: the format, and those of its settings that decide on shapes.
    """

    def stored(self, out_features: int, in_features: int) -> dict[str, Stored]:
        """Return its tensors, by the last part of their names.

        Raises:
            ValueError: such a projection cannot be quantized so; "why: what would do".
        """
        ...

    def read(self, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int) -> Quantized:
        """Return the quantized weight, from the tensors in `stored`; optional ones may be missing.

        Raises:
            ValueError: the tensors contradict each other.
        """
        ...

    def quantize(self, weight: torch.Tensor) -> Quantized:
        """Quantize a float weight [out_features, in_features] by round to nearest.

        Raises:
            ValueError: the scheme cannot, or such a projection cannot.
        """
        ...

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes that the quantized weight takes in GPU memory."""
        ...


@dataclass(frozen=True)
class Schemes:
    """Describe how the projections below a module are quantized.

    Attributes:
        of: the scheme of a projection, by its whole name; None: it is not quantized.
        prefix: the module's name.
    """

    of: Callable[[str], Scheme | None]
    prefix: str = ""

    def within(self, name: str) -> Schemes:
        """Return the schemes of a submodule."""
        return Schemes(self.of, self.full_name(name))

    def full_name(self, name: str) -> str:
        """Return the full name of a projection or submodule."""
        return f"{self.prefix}.{name}" if self.prefix else name

    def __call__(self, name: str) -> Scheme | None:
        return self.of(self.full_name(name))


def unquantized(name: str) -> None:
    """Return None, the scheme of every projection of an unquantized checkpoint."""


UNQUANTIZED = Schemes(unquantized)
