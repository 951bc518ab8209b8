"""Collect the tensors of a quantized projection as they are read, until its quantized weight is complete.

A projection's weight lies in several tensors, which come in any order. Each has a `Slot` that checks it against the
scheme; the last one completes the weight. Errors name the projection or the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from teachllm.errors import ModelError
from teachllm.layers.weights.quantized_weights import Quantized, part_of
from teachllm.layers.weights.scheme import Scheme, Stored

ALL_OF_IT = slice(None)
NOT_THIS_FILE = (
    "config.json is not this file's: correct its quantization_config (quant_method, bits, group_size) or its sizes, or "
    "download both again"
)
NOT_READ = (
    "quantized weights without their scales, or not those of quantization_config in config.json: take a complete "
    "checkpoint, or correct it"
)


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


def _fits(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return len(shape) == len(expected) and all(want in (-1, size) for size, want in zip(shape, expected, strict=True))


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
    def shape(self) -> tuple[int, int]:
        """Return (outputs, inputs) of the whole projection."""
        return self._shape

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
