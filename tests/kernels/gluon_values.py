"""The values of an interpreted Gluon kernel: tensors, pointers, shared memory, barriers, tensor maps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from teachllm_kernels._triton import gl, tl
from teachllm_kernels.attention.kv_quantization import as_bytes
from tests.waiting import HANG_SECONDS

DTYPES = {
    gl.float32: torch.float32,
    gl.float16: torch.float16,
    gl.bfloat16: torch.bfloat16,
    gl.float8e4nv: torch.float8_e4m3fn,
    gl.int8: torch.int8,
    gl.int32: torch.int32,
    gl.int64: torch.int64,
    gl.int1: torch.bool,
}
NAMES = {theirs: ours for ours, theirs in DTYPES.items()}


def bare(x: Any) -> Any:
    """Return a tensor or a number, without its wrapper."""
    if isinstance(x, tl.constexpr):
        return x.value
    return x.data if isinstance(x, Value) else x


class Value:
    """A tensor, or a number, of a kernel."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    dtype = property(lambda self: NAMES[self.data.dtype])
    shape = property(lambda self: list(self.data.shape))
    type = property(lambda self: SimpleNamespace(layout=None))

    def to(self, dtype: Any) -> Value:
        wanted, data = DTYPES[dtype], self.data
        if wanted == torch.float8_e4m3fn and data.dtype != torch.float32:
            data = data.float()
        return Value(data.to(wanted))

    def reshape(self, shape: Sequence[int]) -> Value:
        return Value(self.data.reshape([bare(n) for n in shape]))

    def permute(self, order: Sequence[int]) -> Value:
        return Value(self.data.permute(order))

    def __getitem__(self, key: Any) -> Value:
        return Value(self.data[key])

    def __neg__(self) -> Value:
        return Value(-self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)


def _binary(name: str) -> Callable[[Any, Any], Any]:
    def method(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        other = bare(other)
        both = [x for x in (self.data, other) if isinstance(x, torch.Tensor)]
        if len(both) == 2 and any(x.dtype == torch.bool for x in both) and name not in ("__and__", "__or__"):
            other = other.to(self.data.dtype)
        return Value(getattr(self.data, name)(other))

    return method


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "mod", "rmod", "and", "rand", "or", "ror"),
    *("eq", "ne", "lt", "le", "gt", "ge", "floordiv", "rfloordiv"),
):
    setattr(Value, f"__{_name}__", _binary(f"__{_name}__"))


class Pointer:
    """Addresses in a tensor."""

    def __init__(self, tensor: torch.Tensor, at: torch.Tensor | int = 0) -> None:
        self.tensor, self.at = tensor, at

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=NAMES[self.tensor.dtype])

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.at + bare(offset))

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.tensor, torch.as_tensor(self.at)[key])

    def places(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each number's index, and whether it counts; all that count lie in the tensor."""
        at = torch.as_tensor(self.at, dtype=torch.int64)
        at, kept = torch.broadcast_tensors(at, torch.as_tensor(True if mask is None else bare(mask)))
        chosen = at[kept]
        assert ((chosen >= 0) & (chosen < self.tensor.numel())).all(), "outside of a tensor"
        return at, kept


class Shared:
    """Shared memory."""

    def __init__(self, data: torch.Tensor, layout: Any) -> None:
        self.data, self.layout = data, layout

    dtype = property(lambda self: NAMES[self.data.dtype])
    shape = property(lambda self: list(self.data.shape))

    def index(self, i: Any) -> Any:
        found = self.data[int(bare(i))]
        return Shared(found, self.layout)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, bare(start), bare(length)), self.layout)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(order), self.layout)

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.data.view(shape), self.layout)

    def load(self, layout: Any) -> Value:
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        assert value.data.dtype == self.data.dtype and value.data.shape == self.data.shape
        self.data.copy_(value.data)


class Barrier:
    def __init__(self, count: int) -> None:
        self.count = count
        self.phase = self.arrived = self.num_bytes = 0
        self.changed = threading.Condition()

    def arrive(self, num_bytes: int = 0) -> None:
        """Count one arrival, after which so many bytes are still to come."""
        with self.changed:
            self.arrived += 1
            self.num_bytes += num_bytes
            assert self.arrived <= self.count, "more arrivals than the barrier counts"
            self._turn()

    def bring(self, num_bytes: int) -> None:
        with self.changed:
            self.num_bytes -= num_bytes
            self._turn()

    def _turn(self) -> None:
        if self.arrived == self.count and self.num_bytes == 0:
            self.phase, self.arrived = self.phase + 1, 0
            self.changed.notify_all()

    def wait(self, parity: int) -> None:
        """Wait until a phase of this parity is over: the one before the present one, or the present one."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase & 1 != parity, HANG_SECONDS), "no role completes a barrier"


class Barriers:
    """Several barriers.

    Attributes:
        is_of_use: whether any role has waited for them.
    """

    def __init__(self, num: int) -> None:
        self.all: list[Barrier | None] = [None] * num
        self.is_of_use = False

    def index(self, i: Any) -> tuple[Barriers, int]:
        return self, int(bare(i))


def barrier_at(at: tuple[Barriers, int]) -> Barrier:
    found = at[0].all[at[1]]
    assert found is not None
    return found


class Descriptor:
    def __init__(self, given: Any) -> None:
        self.base, self.sizes, self.strides = given.base, given.shape, given.strides
        self.block_shape, self.layout, self.dtype = list(given.block_shape), given.layout, NAMES[given.base.dtype]

    def _inside(self, at: Sequence[int]) -> torch.Tensor:
        """Return the part of a box that lies inside."""
        whole = self.base.as_strided(self.sizes, self.strides)
        inside = [slice(min(i, n), min(i + box, n)) for i, n, box in zip(at, self.sizes, self.block_shape, strict=True)]
        return whole[tuple(inside)]

    def write(self, at: Sequence[int], box: torch.Tensor) -> None:
        """Write a box, except for what lies outside."""
        there = self._inside(at)
        assert list(box.shape) == self.block_shape and box.dtype == there.dtype
        there.copy_(box[tuple(slice(n) for n in there.shape)])

    def copy(self, at: Sequence[int], to: torch.Tensor) -> None:
        """Copy a box, with zeros where it lies outside."""
        found = self._inside(at)
        assert list(to.shape) == self.block_shape
        as_bytes(to).zero_()
        to[tuple(slice(n) for n in found.shape)] = found
