"""Gluon kernels without a Hopper: their Python is run as it stands, over PyTorch's tensors, a thread for each role.

What is checked is what a kernel computes, and that its roles wait for each other rightly: barriers count arrivals and
bytes, copies arrive piece by piece, a product reads its operands from shared memory as late as it may, and what was
never written is NaN. What is not: layouts (the compiler checks them), fences, and what the threads of one role owe each
other.
"""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from teachllm_kernels import _hopper
from teachllm_kernels._triton import gl
from teachllm_kernels._triton import hopper as real_hopper
from teachllm_kernels.attention import (
    hopper_decode,
    hopper_decode_quantized,
    hopper_kv_dequantize,
    hopper_new_token,
    hopper_prefill,
    hopper_prefill_quantized,
    hopper_tasks,
)
from teachllm_kernels.attention.kv_quantization import as_bytes
from teachllm_kernels.linear import hopper_linear, hopper_sums
from teachllm_kernels.linear.scaled import hopper_blocks, hopper_scaled_mm
from tests.kernels.gluon_values import (
    DTYPES,
    Barrier,
    Barriers,
    Descriptor,
    Pointer,
    Shared,
    Value,
    bare,
    barrier_at,
)
from tests.waiting import HANG_SECONDS

MODULES = [
    *(_hopper, hopper_kv_dequantize, hopper_decode, hopper_decode_quantized, hopper_new_token),
    *(hopper_prefill, hopper_prefill_quantized, hopper_tasks),
    *(hopper_blocks, hopper_linear, hopper_scaled_mm, hopper_sums),
]
# The program under way: `id` and `num` along each axis, the `barriers` that it has made, a role's `num_threads`.
_now = threading.local()


OPERANDS = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8)


class _Product:
    """Under way: it reads shared memory when it is waited for."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self._compute = compute
        self.result: Value | None = None

    def done(self) -> Value:
        if self.result is None:
            self.result = Value(self._compute())
        return self.result


def _number(x: Any) -> torch.Tensor:
    return x.done().data if isinstance(x, _Product) else x.data


def _product(a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    assert a.data.dtype == b.data.dtype and a.data.dtype in OPERANDS
    sums = torch.int32 if a.data.dtype == torch.int8 else torch.float32

    def compute() -> torch.Tensor:
        found = a.data.to(sums) @ b.data.to(sums)
        return found + _number(acc) if use_acc else found

    return _Product(compute)


def _wait_for_products(num_left: int, products: Sequence[Any]) -> Any:
    done = tuple(each.done() if isinstance(each, _Product) else each for each in products)
    return done if len(done) > 1 else done[0]


def _load(pointer: Pointer, mask: Any = None, other: Any = 0.0, **_: Any) -> Value:
    at, kept = pointer.places(mask)
    safe = torch.where(kept, at, 0)
    found = as_bytes(pointer.tensor)[safe].clone().view(pointer.tensor.dtype)
    if not kept.all():
        found = torch.where(kept, found, torch.tensor(bare(other)).to(found.dtype))
    return Value(found)


def _store(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
    at, kept = pointer.places(mask)
    flat, data = as_bytes(pointer.tensor), as_bytes(torch.as_tensor(bare(value)))
    at, kept, data = torch.broadcast_tensors(at, kept, data.to(flat.dtype))
    flat[at[kept]] = data[kept]


def _atomic_add(pointer: Pointer, value: int, **_: Any) -> Value:
    before = _load(pointer)
    _store(pointer, before + value)
    return before


def _specialize(roles: Sequence[tuple[Any, Sequence[Any]]], num_warps: Sequence[int], *_: Any) -> Any:
    """Run the first role here, the others in threads with so many warps each; return the first one's result."""
    failed: list[BaseException] = []
    here = (_now.id, _now.num)

    def run(function: Any, arguments: Sequence[Any], warps: int) -> None:
        _now.id, _now.num, _now.num_threads = *here, 32 * warps
        try:
            function(*arguments)
        except BaseException as error:
            failed.append(error)

    workers = zip(roles[1:], num_warps, strict=True)
    threads = [threading.Thread(target=run, args=(*role, warps), daemon=True) for role, warps in workers]
    for thread in threads:
        thread.start()
    result = roles[0][0](*roles[0][1])
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()
    if failed:
        raise failed[0]
    return result


def _allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    if dtype == gl.int64:
        _now.barriers.append(Barriers(shape[0]))
        return _now.barriers[-1]
    theirs = DTYPES[dtype]
    if theirs.itemsize == 1:  # of e4m3 it is NaN
        return Shared(torch.full(list(shape), 0x7F, dtype=torch.uint8).view(theirs), layout)
    return Shared(torch.full(list(shape), torch.nan, dtype=theirs), layout)


def _tensor(x: Any) -> Any:
    x = bare(x)
    return torch.tensor(x) if isinstance(x, float | int | bool) else x


def _extreme(function: Any) -> Callable[[Any, Any], Value]:
    def both(a: Any, b: Any) -> Value:
        a, b = _tensor(a), _tensor(b)
        dtype = a.dtype if a.dim() or not b.dim() else b.dtype
        return Value(function(a.to(dtype), b.to(dtype)))

    return both


def _where(condition: Any, a: Any, b: Any) -> Value:
    a, b = _tensor(a), _tensor(b)
    dtype = a.dtype if a.dim() >= b.dim() else b.dtype
    return Value(torch.where(_tensor(condition), a.to(dtype), b.to(dtype)))


class _Language:
    """`gl`, on a CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(gl, name)

    load, store, atomic_add = staticmethod(_load), staticmethod(_store), staticmethod(_atomic_add)
    where, warp_specialize = staticmethod(_where), staticmethod(_specialize)
    maximum, minimum = staticmethod(_extreme(torch.maximum)), staticmethod(_extreme(torch.minimum))
    allocate_shared_memory, static_range = staticmethod(_allocate), range
    program_id = staticmethod(lambda axis: Value(torch.tensor(_now.id[axis], dtype=torch.int32)))
    num_programs = staticmethod(lambda axis: Value(torch.tensor(_now.num[axis], dtype=torch.int32)))
    arange = staticmethod(lambda start, end, layout=None: Value(torch.arange(start, end, dtype=torch.int32)))
    zeros = staticmethod(lambda shape, dtype, layout=None: Value(torch.zeros(shape, dtype=DTYPES[dtype])))
    full = staticmethod(lambda shape, x, dtype, layout=None: Value(torch.full(shape, x, dtype=DTYPES[dtype])))
    zeros_like = staticmethod(lambda x: Value(torch.zeros_like(x.data)))
    split = staticmethod(lambda x: tuple(Value(half) for half in x.data.unbind(-1)))
    join = staticmethod(lambda x, y: Value(torch.stack([x.data, y.data], -1)))
    convert_layout = staticmethod(lambda x, layout, assert_trivial=False: x)
    multiple_of = max_contiguous = staticmethod(lambda x, values: x)
    exp = staticmethod(lambda x: Value(torch.exp(_tensor(x))))
    exp2 = staticmethod(lambda x: Value(torch.exp2(_tensor(x))))
    log2 = staticmethod(lambda x: Value(torch.log2(_tensor(x))))
    rsqrt = staticmethod(lambda x: Value(torch.rsqrt(_tensor(x))))
    max = staticmethod(lambda x, axis: Value(x.data.amax(dim=axis)))
    sum = staticmethod(lambda x, axis: Value(x.data.sum(dim=axis)))
    div_rn = staticmethod(lambda x, y: x / y)
    cdiv = staticmethod(lambda x, y: (x + y - 1) // y)

    @staticmethod
    def inline_asm_elementwise(asm: Any, constraints: str, args: Sequence[Value], dtype: Any, **_: Any) -> Value:
        assert asm is hopper_kv_dequantize._INTEGERS  # integers to float16, the only ones
        return args[0].to(dtype)


class _Hopper:
    """`hopper`, on a CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(real_hopper, name)

    warpgroup_mma, warpgroup_mma_wait = staticmethod(_product), staticmethod(_wait_for_products)
    warpgroup_mma_init = staticmethod(lambda value: value)
    fence_async_shared = staticmethod(lambda: None)

    class mbarrier:
        MBarrierLayout = real_hopper.mbarrier.MBarrierLayout

        @staticmethod
        def init(at: tuple[Barriers, int], count: int) -> None:
            at[0].all[at[1]] = Barrier(count)

        @staticmethod
        def invalidate(at: tuple[Barriers, int]) -> None:
            at[0].all[at[1]] = None

        @staticmethod
        def expect(at: tuple[Barriers, int], num_bytes: int, pred: Any = True) -> None:
            if bare(pred):
                barrier_at(at).arrive(num_bytes)

        @staticmethod
        def arrive(at: tuple[Barriers, int], pred: Any = True) -> None:
            if bare(pred):
                barrier_at(at).arrive()

        @staticmethod
        def wait(at: tuple[Barriers, int], parity: Any, pred: Any = True) -> None:
            at[0].is_of_use = True
            if bare(pred):
                barrier_at(at).wait(int(bare(parity)))

    class tma:
        @staticmethod
        def async_copy_global_to_shared(
            desc: Descriptor, at: Sequence[Any], barrier: tuple[Barriers, int], to: Shared, pred: Any = True
        ) -> None:
            if bare(pred):
                desc.copy([int(bare(i)) for i in at], to.data)
                barrier_at(barrier).bring(to.data.numel() * to.data.element_size())

        @staticmethod
        def async_copy_shared_to_global(desc: Descriptor, at: Sequence[Any], source: Shared) -> None:
            desc.write([int(bare(i)) for i in at], source.data)

        store_wait = staticmethod(lambda num_left: None)

    class async_copy:
        @staticmethod
        def async_copy_global_to_shared(to: Shared, pointer: Pointer, mask: Any = None) -> None:
            to.store(_load(pointer, mask))

        @staticmethod
        def mbarrier_arrive(at: tuple[Barriers, int], increment_count: bool = True) -> None:
            assert not increment_count
            for _ in range(_now.num_threads):
                barrier_at(at).arrive()


class _Launcher:
    def __init__(self, function: Callable[..., None], launches: list[list[bool]]) -> None:
        self._function, self._launches = function, launches
        parameters = inspect.signature(function).parameters.values()
        self._runtime = {p.name for p in parameters if "constexpr" not in str(p.annotation)}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            given = [_argument(each) for each in args]
            named = {
                name: _argument(value) if name in self._runtime else value
                for name, value in options.items()
                if name not in ("maxnreg", "launch_pdl")
            }
            _now.num = grid
            barriers = []
            for _now.id in itertools.product(*map(range, grid)):
                _now.barriers = []
                self._function(*given, **named)
                barriers.append([each.is_of_use for each in _now.barriers])
            self._launches.append([any(each) for each in zip(*barriers, strict=True)])

        return launch


def _argument(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        in_memory = given if given.is_contiguous() else given.t()  # scales of groups lie column by column
        assert in_memory.is_contiguous()
        return Pointer(in_memory.view(-1))
    if hasattr(given, "block_shape"):
        return Descriptor(given)
    if isinstance(given, bool) or not isinstance(given, int | float):
        return given
    return Value(torch.tensor(given, dtype=torch.float32 if isinstance(given, float) else torch.int32))


@contextmanager
def interpreted(*kernels: str) -> Iterator[list[list[bool]]]:
    """Run launches of these kernels here, over tensors of a CPU.

    Yields:
        For every launch and each of the kernel's barriers, whether any program has waited for it.
    """
    launches: list[list[bool]] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            _replace(patch, module, kernels, launches)
        yield launches


def _replace(patch: pytest.MonkeyPatch, module: ModuleType, kernels: Sequence[str], launches: list[list[bool]]) -> None:
    for name, found in list(vars(module).items()):
        is_gluon = getattr(found, "is_gluon", None)
        if callable(is_gluon) and is_gluon():
            patch.setattr(module, name, _Launcher(found.fn, launches) if name in kernels else found.fn)
    for name, stand_in in (("gl", _Language()), ("hopper", _Hopper())):
        if hasattr(module, name):
            patch.setattr(module, name, stand_in)
    for name in ("gdc_wait", "gdc_launch_dependents", "barrier"):
        if hasattr(module, name):
            patch.setattr(module, name, lambda: None)
