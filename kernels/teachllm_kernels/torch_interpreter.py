"""Triton's language on torch tensors, for machines without Triton: attention kernels run there, slowly, to be read.

Triton runs on Linux only. Its programs are Python, so an interpreter needs no compiler: a tile is a tensor, a
pointer is a tensor's memory and one offset per element, and the programs of a grid run one after the other. This one
knows the operations that the attention kernels of lesson 08 use, and stands in for `triton` and `triton.language` with
TRITON_INTERPRET=1; without that a launch raises, as it should where an engine would rather use torch itself.

Source: the interface is that of Triton's own interpreter, `triton/runtime/interpreter.py`.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

MISSING = "this needs Triton, which is not installed: pip install 'teachllm[gpu]'"


class Tile(torch.Tensor):
    """A tensor whose `to` takes the type that a pointer points to."""

    def to(self, dtype: Any, **_: Any) -> Tile:  # type: ignore[override]
        return super().to(dtype.torch if isinstance(dtype, ElementType) else dtype)  # type: ignore[return-value]


@dataclass(frozen=True)
class ElementType:
    """What a pointer points to."""

    torch: torch.dtype

    @property
    def primitive_bitwidth(self) -> int:
        return 8 * self.torch.itemsize


@dataclass(frozen=True)
class Pointer:
    """The memory of a tensor, and an offset per element of a tile.

    Attributes:
        memory: the whole storage, flat.
        offsets: int64 of any shape.
    """

    memory: torch.Tensor
    offsets: torch.Tensor

    def __add__(self, offsets: Any) -> Pointer:
        return Pointer(self.memory, self.offsets + offsets)

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=ElementType(self.memory.dtype))

    def load(self, mask: Any = None, other: float = 0) -> Tile:
        """Return what lies at the offsets, and `other` where the mask is false: nothing is read there."""
        if mask is None:
            return _tile(self.memory[self.offsets].clone())  # one element would be a view
        mask, offsets = torch.broadcast_tensors(torch.as_tensor(mask), self.offsets)
        loaded = self.memory[torch.where(mask, offsets, 0)]
        return _tile(torch.where(mask, loaded, torch.tensor(other, dtype=loaded.dtype)))

    def store(self, value: Any, mask: Any = None) -> None:
        """Write where the mask is true."""
        shape = torch.broadcast_shapes(self.offsets.shape, () if mask is None else torch.as_tensor(mask).shape)
        is_written = torch.as_tensor(True if mask is None else mask).expand(shape)
        value = torch.as_tensor(value).to(self.memory.dtype).expand(shape)
        self.memory[self.offsets.expand(shape)[is_written]] = value[is_written]

    def atomic_add(self, value: Any) -> Tile:
        """Add to memory and return what was there before; one program runs at a time, so nothing comes between."""
        before = self.load()
        self.store(before + value)
        return before


class Kernel:
    """A function of Triton's language: called by another one, or launched as `kernel[grid](...)`."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        functools.update_wrapper(self, fn)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.fn(*arguments, **named)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        if not is_interpreting():
            raise RuntimeError(MISSING)

        def launch(*arguments: Any, **named: Any) -> None:
            known = set(self.fn.__code__.co_varnames[: self.fn.__code__.co_argcount])
            told = {name: _argument(value) for name, value in named.items() if name in known}  # not num_warps
            for place in itertools.product(*map(range, grid)):
                _program[:] = [*place, 0, 0][:3]
                self.fn(*map(_argument, arguments), **told)

        return launch


_program = [0, 0, 0]  # the place in the grid of the program that runs


def is_interpreting() -> bool:
    """Return whether launches run here."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _argument(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    memory = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
    return Pointer(memory, torch.tensor(value.storage_offset()).as_subclass(Tile))


def _range(*bounds: Any, **_: Any) -> Iterator[int]:
    return iter(range(*map(int, bounds)))


def _tile(made: torch.Tensor) -> Tile:
    return made.as_subclass(Tile)


def _both(pick: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Any, Any], Tile]:
    return lambda a, b: _tile(pick(torch.as_tensor(a), torch.as_tensor(b)))


def _dot(a: torch.Tensor, b: torch.Tensor, acc: Any = None, **_: Any) -> Tile:
    product = _tile(a.float() @ b.float())
    return product if acc is None else _tile(acc + product)


class _Named:
    """Names that are known; any other raises, so that a kernel that needs more says what it is."""

    def __init__(self, **known: Any) -> None:
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{MISSING} (the interpreter that stands in for it does not know {name!r})")


def _jit(function: Any = None, **_: Any) -> Any:
    return _jit if function is None else Kernel(function)


tl: Any = _Named(
    constexpr=lambda value: value,
    program_id=lambda axis: _tile(torch.tensor(_program[axis])),
    arange=lambda first, end: _tile(torch.arange(first, end)),
    zeros=lambda shape, dtype: _tile(torch.zeros(tuple(shape), dtype=dtype)),
    full=lambda shape, value, dtype: _tile(torch.full(tuple(shape), value, dtype=dtype)),
    load=lambda pointer, mask=None, other=0, **_: pointer.load(mask, other),
    store=lambda pointer, value, mask=None, **_: pointer.store(value, mask),
    atomic_add=lambda pointer, value, **_: pointer.atomic_add(value),
    debug_barrier=lambda: None,
    where=lambda condition, a, b: _tile(torch.where(torch.as_tensor(condition), a, b)),
    maximum=_both(torch.maximum),
    minimum=_both(torch.minimum),
    max=lambda tile, axis=None: _tile(tile.amax() if axis is None else tile.amax(dim=axis)),
    min=lambda tile, axis=None: _tile(tile.amin() if axis is None else tile.amin(dim=axis)),
    sum=lambda tile, axis=None: _tile(tile.sum() if axis is None else tile.sum(dim=axis)),
    cumsum=lambda tile, axis: _tile(tile.cumsum(dim=axis)),
    sort=lambda tile, descending=False: _tile(tile.sort(descending=descending).values),
    cdiv=lambda count, size: -(-count // size),
    exp2=torch.exp2,
    exp=torch.exp,
    log2=torch.log2,
    sigmoid=torch.sigmoid,
    sqrt=torch.sqrt,
    rsqrt=torch.rsqrt,
    dot=_dot,
    trans=lambda tile: tile.T,
    range=_range,
    static_range=_range,
    **{name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")},
    **{name: getattr(torch, name) for name in ("int64", "int32", "int16", "int8", "uint8")},
    int1=torch.bool,
)
triton: Any = _Named(
    jit=_jit,
    language=tl,
    cdiv=lambda count, size: -(-count // size),
    knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=True)),
    next_power_of_2=lambda count: 1 << max(count - 1, 0).bit_length(),
)
