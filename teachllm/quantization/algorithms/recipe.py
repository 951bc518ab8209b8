"""Describe what to make of a model: a method and its settings, checked before anything is read.

| method | dtype | calibrated | written as |
|---|---|---|---|
| int8 | 8-bit integers, activations too | no; with `smoothquant` | compressed-tensors int-quantized |
| fp8 | e4m3, activations too | no | compressed-tensors float-quantized |
| rtn | 4 or 8 bits by group | no | compressed-tensors pack-quantized |
| gptq | 4 or 8 bits by group | yes | GPTQ, version 1; if not symmetric, 2 |
| awq | 4 bits by group | yes | AWQ, gemm |
| autoround | 4 or 8 bits by group | yes | AutoRound, packed as GPTQ or, if not symmetric, as AWQ |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from teachllm.layers.weights.scheme import Scheme
from teachllm.quantization.algorithms.grid import Grid
from teachllm.quantization.algorithms.texts import CALIBRATION_TEXT
from teachllm.quantization.formats.awq import Awq
from teachllm.quantization.formats.compressed_tensors import Packed
from teachllm.quantization.formats.gptq import Gptq

EIGHT_BIT = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_OF_GRID = ("bits", "group_size", "is_symmetric")
_OF_TEXT = ("calibration", "num_samples", "seq_len")
SETTINGS = {
    "int8": ("smoothquant",),  # and with it those of a text
    "fp8": (),
    "rtn": _OF_GRID,
    "gptq": (*_OF_GRID, "desc_act", *_OF_TEXT),
    "awq": (*_OF_GRID, *_OF_TEXT),
    "autoround": (*_OF_GRID, "num_iters", *_OF_TEXT),
}
METHODS = tuple(SETTINGS)
_BITS = (4, 8)
_NOT_SYMMETRIC = ("awq",)  # unless asked
_GROUP_SIZES = (128, 64, 32, 16)


@dataclass(frozen=True)
class Recipe:
    """A method and its settings; None: what is usual for it.

    Attributes:
        method: of `METHODS`.
        bits: bits per weight.
        group_size: inputs that share a scale; -1: all; None: what `fitted` finds. Not of int8 and fp8, which have one
            for each output.
        is_symmetric: 0.0 is the middle of the range; otherwise each group has its own zero.
        desc_act: gptq rounds the inputs with the largest activations first.
        smoothquant: int8 moves outliers of activations to weights.
        calibration: a text.
        num_samples, seq_len: rows of that text, and tokens in one.
        num_iters: steps of autoround for each block.

    Raises:
        ValueError: a setting that the method does not have, or does not allow.
    """

    method: str
    bits: int | None = None
    group_size: int | None = None
    is_symmetric: bool | None = None
    desc_act: bool = False
    smoothquant: bool = False
    calibration: Path = CALIBRATION_TEXT
    num_samples: int = 128
    seq_len: int = 256
    num_iters: int = 200

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"--method {self.method}: choose among {', '.join(METHODS)}")
        own = _settings_of(self.method, self.smoothquant)
        for name in _changed({field.name: getattr(self, field.name) for field in fields(self)[1:]}):
            if name not in own:
                raise ValueError(f"{_flag(name, getattr(self, name))} has no effect with {self.method}: drop it")
        bits = _bits_of(self.method, self.is_symmetric)
        if self.bits is not None and self.bits not in bits:
            what = f"{self.method} --asymmetric" if self.method == "autoround" and len(bits) == 1 else self.method
            fix = f"has only {bits[0]}: drop it" if len(bits) == 1 else f"has {' or '.join(map(str, bits))}: choose one"
            raise ValueError(f"--bits {self.bits}: {what} {fix}")
        for name in ("num_samples", "seq_len", "num_iters"):
            if getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} {getattr(self, name)}: must be at least 1")
        if self.group_size is not None and self.group_size != -1 and self.group_size < 1:
            raise ValueError(f"--group-size {self.group_size}: must be positive, or -1 for all inputs of an output")

    @property
    def needs_text(self) -> bool:
        """Return whether it looks at a calibration text."""
        return _OF_TEXT[0] in _settings_of(self.method, self.smoothquant)

    @property
    def scales_inputs(self) -> bool:
        """Return whether it divides inputs of layers where they come from."""
        return self.method == "awq" or self.smoothquant

    @property
    def grid(self) -> Grid:
        """Return the grid of methods with groups."""
        is_symmetric = self.method not in _NOT_SYMMETRIC if self.is_symmetric is None else self.is_symmetric
        return Grid(self.bits or _BITS[0], self.group_size or _GROUP_SIZES[0], is_symmetric)

    @property
    def kind(self) -> str:
        """Name the kind without bits and groups, as in a table whose rows share these: "gptq asym"."""
        words = [self.method]
        if self.method not in EIGHT_BIT and self.grid.is_symmetric == (self.method in _NOT_SYMMETRIC):
            words.append("sym" if self.grid.is_symmetric else "asym")
        words += [word for word, is_on in (("desc-act", self.desc_act), ("smoothquant", self.smoothquant)) if is_on]
        return " ".join(words)

    @property
    def name(self) -> str:
        """Return the name of its folder, "gptq-4bit-g128-asym", without the calibration's settings."""
        method, *others = self.kind.split()
        if self.method in EIGHT_BIT:
            return "-".join((method, *others))
        size = self.grid.group_size
        return "-".join((method, f"{self.grid.bits}bit", "row" if size == -1 else f"g{size}", *others))

    def fitted(self, layers: Iterable[tuple[str, int, int]]) -> Recipe:
        """Return it with the largest usual group size, if it has none, that divides the inputs of every layer.

        Args:
            layers: name, number of outputs and of inputs of each.
        """
        if self.method in EIGHT_BIT or self.group_size is not None:
            return self
        common = math.gcd(*(num_in for _, _, num_in in layers))
        return replace(self, group_size=next((size for size in _GROUP_SIZES if common % size == 0), None))

    def check_layer(self, name: str, num_out: int, num_in: int) -> None:
        """Refuse a layer that the format cannot hold.

        Raises:
            ValueError: names the layer, and what would do.
        """
        if self.method in EIGHT_BIT:
            return
        grid = self.grid
        if grid.group_size != -1 and num_in % grid.group_size:
            fits = next((size for size in _GROUP_SIZES if num_in % size == 0), -1)
            raise ValueError(
                f"{name} has {num_in} inputs, which groups of {grid.group_size} do not divide: set --group-size {fits}"
            )
        schemes: dict[str, Scheme] = {
            "rtn": Packed(grid.bits, grid.group_size, grid.is_symmetric),
            "gptq": Gptq(grid.bits, grid.group_size),
            "awq": Awq(grid.group_size),
            "autoround": Gptq(grid.bits, grid.group_size) if grid.is_symmetric else Awq(grid.group_size),
        }
        try:
            schemes[self.method].stored(num_out, num_in)
        except ValueError as error:
            what = str(error).partition(":")[0]  # the rest is for who reads a checkpoint
            fix = "use --method int8 or fp8, which take any size"
            raise ValueError(f"{name} [{num_out}, {num_in}]: {what}: {fix}") from None


def several(methods: Sequence[str] | None, settings: Mapping[str, Any]) -> list[Recipe]:
    """Make a recipe for each method, with the settings that apply to it.

    Round to nearest comes with and without zeros unless a setting chooses: it is the baseline for the others.

    Args:
        methods: None: all methods that can have this number of bits.

    Raises:
        ValueError: as `Recipe`; or none of the methods has a setting.
    """
    settings, used, recipes = _changed(settings), set[str](), list[Recipe]()
    for method in methods or ():
        Recipe(method)
    for method in dict.fromkeys(methods or METHODS):
        own = {name: settings[name] for name in _settings_of(method, "smoothquant" in settings) if name in settings}
        used |= own.keys()
        bits = own.get("bits")
        if methods is None and bits in _BITS and bits not in _bits_of(method, own.get("is_symmetric")):
            continue
        if method == "rtn" and "is_symmetric" not in own:
            recipes.append(Recipe(method, **own, is_symmetric=True))
            own["is_symmetric"] = False
        recipes.append(Recipe(method, **own))
    for name in settings.keys() - used:
        what = f"{_flag(name, settings[name])} has no effect with {', '.join(methods or METHODS)}"
        raise ValueError(f"{what}: drop it")
    return recipes


def _settings_of(method: str, smoothquant: bool) -> tuple[str, ...]:
    own = SETTINGS[method]
    return own + _OF_TEXT if smoothquant and "smoothquant" in own else own


def _changed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from their defaults."""
    return {name: value for name, value in settings.items() if value != getattr(Recipe, name)}


def _bits_of(method: str, is_symmetric: bool | None) -> tuple[int, ...]:
    """Check the settings of a method with groups. Asymmetric AutoRound is packed as AWQ."""
    has_packing_of_awq = method == "awq" or (method == "autoround" and is_symmetric is False)
    return (4,) if has_packing_of_awq else _BITS


def _flag(name: str, value: Any = None) -> str:
    """Return the flag of the command line."""
    if name == "is_symmetric":
        return "--symmetric" if value else "--asymmetric"
    return f"--{name.replace('_', '-')}"
