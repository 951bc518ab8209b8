"""Define schemes (lesson 11): what a format stores of a projection, and how that becomes a quantized weight.

A scheme is one projection's: in a checkpoint some layers have 4 bits, some 8, some none. It names the tensors that a
file holds (`stored`), turns them into a quantized weight (`read`), and can quantize a float weight itself (`quantize`),
which is how an unquantized checkpoint is quantized while it is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from teachllm.checkpoint.json_values import JsonObject
from teachllm.errors import ModelError
from teachllm.quantization.quantized_weights import Quantized, part_of

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WEIGHT_FLOATS = (*FLOATS, torch.float64)  # of what is not quantized: it gets the model's dtype as it is read
INTS = (torch.int32,)  # words that quantized values are packed into
ALL_OF_IT = slice(None)
NOT_THIS_FILE = (
    "config.json is not this file's: correct its quantization_config (quant_method, bits, group_size) or its sizes, or "
    "download both again"
)
NOT_READ = (
    "quantized weights without their scales, or not those of quantization_config in config.json: take a complete "
    "checkpoint, or correct it"
)


def matches(pattern: str, name: str, values: JsonObject, key: str, anywhere: bool = False) -> bool:
    """Return whether a projection's name matches a regular expression, from its beginning on.

    Args:
        values, key: where it was found.
        anywhere: it may match at any place of the name.

    Raises:
        ModelError: it is none.
    """
    try:
        return (re.search if anywhere else re.match)(pattern, name) is not None
    except re.error as error:
        raise values.refusal(key, f"under a regular expression, and {pattern!r} is none ({error})") from error


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


class Slot:
    """Receive a tensor of a quantized projection.

    Attributes:
        part: the quantized weight that it is a part of; None: of none.
        format: of that, for errors.
    """

    part: QuantizedWeightLoader | None = None
    format = ""

    def __init__(self, part: QuantizedWeightLoader, name: str, stored: Stored) -> None:
        self.part, self._name, self.stored = part, name, stored
        self.format = str(part.scheme)

    def put(self, tensor: torch.Tensor) -> None:
        """Take the tensor that was read.

        Raises:
            ValueError: its shape or dtype is not what the format has there.
        """
        stored = self.stored
        shapes = (stored.shape, *stored.others)
        if not any(_fits(tuple(tensor.shape), shape) for shape in shapes):
            shape = list(tensor.shape)
            raise ValueError(f"has shape {shape}, and {list(stored.shape)} in {self.format}: {NOT_THIS_FILE}")
        if tensor.dtype not in stored.dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in stored.dtypes)
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"is of {dtype}, and {names} in {self.format}: {NOT_THIS_FILE}")
        assert self.part is not None
        self.part.put(self._name, tensor)


def formats_of(destinations: Mapping[str, object]) -> dict[str, str]:
    """Return the format of each module's weight, by the module's name; "" if it is not quantized.

    Args:
        destinations: of a checkpoint's tensors, by their names.
    """
    formats = {}
    for name, place in destinations.items():
        module, _, part = name.rpartition(".")
        if isinstance(place, Slot) and place.format:
            formats[module] = place.format
        elif part == "weight":
            formats[module] = ""
    return formats


def why_unknown(name: str, formats: Mapping[str, str]) -> str:
    """Say in an error what a tensor without a destination is: next to a known weight, a part of it."""
    module, _, part = name.rpartition(".")
    if module not in formats or part == "bias":
        return "which the model of its config.json does not have"
    return f"which {formats[module]} does not have: {NOT_THIS_FILE}" if formats[module] else NOT_READ


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(w in (-1, s) for s, w in zip(shape, wanted, strict=True))


class QuantizedWeightLoader:
    """Hold a projection's quantized weight while it is loaded.

    Args:
        name: the projection's, for errors.
        out_features, in_features: of the whole projection.
        like: of the model's dtype, on its device.
        when_read: called when nothing more can come.
        rows, columns: which outputs and inputs are kept. All of the projection is read, since what is packed and scaled
            together is not cut where ranks are.
    """

    def __init__(
        self,
        scheme: Scheme,
        name: str,
        out_features: int,
        in_features: int,
        like: torch.Tensor,
        when_read: Callable[[], None] | None = None,
        rows: slice = ALL_OF_IT,
        columns: slice = ALL_OF_IT,
    ) -> None:
        self.scheme, self.name = scheme, name
        self._shape, self._cut = (out_features, in_features), (rows, columns)
        num_out, self.in_features = (len(range(size)[each]) for size, each in zip(self._shape, self._cut, strict=True))
        self._own_shape, self._like, self._when_read = (num_out, self.in_features), like, when_read
        self._tensors: dict[str, torch.Tensor] = {}
        self._quantized: Quantized | None = None
        try:
            self._stored = scheme.stored(*self._shape)
        except ValueError as error:
            raise ModelError(f"{name} [{out_features}, {in_features}]: {error}") from None

    @property
    def slots(self) -> dict[str, Slot]:
        """Return the slot of each tensor that a file may hold, by the last part of its name."""
        return {key: Slot(self, key, each) for key, each in self._stored.items()}

    @property
    def device(self) -> torch.device:
        """Return the device of its tensors."""
        return self._like.device

    @property
    def is_begun(self) -> bool:
        """Return whether anything was read."""
        return bool(self._tensors) or self.is_read

    @property
    def is_read(self) -> bool:
        """Return whether the quantized weight is complete."""
        return self._quantized is not None

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor that was read. The last one completes the quantized weight."""
        self._tensors[name] = tensor.to(self._like.device)
        if len(self._tensors) == len(self._stored):
            self.quantized_weight()
            if self._when_read is not None:
                self._when_read()

    @property
    def num_parameters(self) -> int:
        """Return the number of weights in this rank's part."""
        return self._own_shape[0] * self._own_shape[1]

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the quantized weight takes on a GPU."""
        return self.scheme.num_bytes(*self._own_shape)

    def fill_randomly(self, generator: torch.Generator | None) -> None:
        """Quantize random weights instead of reading a file; products keep the size of their input. As with a file, the
        whole projection is made and this part of it kept.

        Raises:
            ModelError: the scheme cannot.
        """
        weight = torch.randn(self._shape, dtype=self._like.dtype, device=self.device, generator=generator)
        try:
            self._quantized = self._own(self.scheme.quantize(weight * self._shape[1] ** -0.5))
        except ValueError as error:
            raise ModelError(f"{self.name}: {error}") from None
        if self._when_read is not None:
            self._when_read()

    def quantized_weight(self) -> Quantized:
        """Return the weight that was read.

        Raises:
            ModelError: it contradicts itself.
        """
        if self._quantized is None:
            try:
                self._quantized = self.scheme.read(self._tensors, *self._shape)
                if not bool(self._quantized.scales.isfinite().all()):
                    raise ValueError("a scale is infinite or NaN: the file is broken, download it again")
                self._quantized = self._own(self._quantized)
            except ValueError as error:
                raise ModelError(f"{self.name}: {error}") from None
            self._tensors.clear()
        return self._quantized

    def _own(self, quantized: Quantized) -> Quantized:
        """Return the part of a whole projection that is kept."""
        return quantized if self._own_shape == self._shape else part_of(quantized, *self._cut)


@dataclass(frozen=True)
class OnTheFly:
    """Quantize an unquantized checkpoint as it is loaded.

    Attributes:
        of_size: a projection's scheme, by its inputs.
    """

    of_size: Callable[[int], Scheme]

    def __str__(self) -> str:
        return "unquantized weights"

    def stored(self, out_features: int, in_features: int) -> dict[str, Stored]:
        """Implement `Scheme.stored`."""
        try:
            self.of_size(in_features).stored(out_features, in_features)  # refuses sizes that it cannot take
        except ValueError as error:
            what = str(error).partition(":")[0]
            raise ValueError(f"{what}: set quantization='int8', which takes any size") from None
        return {"weight": Stored((out_features, in_features), WEIGHT_FLOATS)}

    def read(self, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int) -> Quantized:
        """Implement `Scheme.read`."""
        return self.quantize(tensors["weight"])

    def quantize(self, weight: torch.Tensor) -> Quantized:
        """Implement `Scheme.quantize`."""
        return self.of_size(weight.shape[1]).quantize(weight)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Implement `Scheme.num_bytes`."""
        return self.of_size(in_features).num_bytes(out_features, in_features)
