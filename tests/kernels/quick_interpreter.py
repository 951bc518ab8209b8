"""Triton's interpreter, several times as fast: what it computes is the same, what it asks before is asked once.

Each of a kernel's operations is one of NumPy's on an array that is small here. The interpreter takes a hundred times as
long to find out what to call: it lists all of Triton's functions at every launch and every call of a device function,
makes new types and shapes for every result, spreads scalars over blocks, and computes all sums of integers twice, for
an assertion that it leaves out. Here operands of like and plain types go to NumPy at once. All else is Triton's: other
types, conversions between operands, mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

_SIGNED = {"int8", "int16", "int32", "int64"}
_INTS = _SIGNED | {"uint8", "uint16", "uint32", "uint64"}
_FLOATS = {"fp16", "fp32", "fp64"}  # not bfloat16, for whose arithmetic tests have their own
_NUMBERS = _INTS | _FLOATS
_BITS = _INTS | {"int1"}
_LIMITS = {name: (int(np.iinfo(name).min), int(np.iinfo(name).max)) for name in _INTS}
_undo: list[Callable[[], None]] = []


def quicken() -> None:
    """From now on, in this process."""
    if not _undo:
        patch = pytest.MonkeyPatch()
        _undo.append(patch.undo)
        _undo.append(_patched(patch))


@contextmanager
def as_triton_has_it() -> Iterator[None]:
    """For a comparison."""
    was_quick = bool(_undo)
    while _undo:
        _undo.pop()()
    try:
        yield
    finally:
        if was_quick:
            quicken()


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of both spread to one; None where it is Triton's to say."""
    if a == b or not b:
        return a
    if not a:
        return b
    if len(a) != len(b) or any(i != j and i != 1 and j != 1 for i, j in zip(a, b, strict=True)):
        return None
    return tuple(max(i, j) for i, j in zip(a, b, strict=True))


def _patched(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Returns what restores the language."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    Tensor, Handle, constexpr = tl.tensor, interpreter.TensorHandle, tl.constexpr
    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    np_dtypes = {name: np.dtype(name) for name in _INTS} | {"int1": np.dtype(bool), "bf16": np.dtype(np.uint16)}
    np_dtypes |= {f"fp{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)}
    np_dtypes |= {name: np.dtype(np.uint8) for name in ("fp8e5", "fp8e5b16", "fp8e4nv", "fp8e4b8", "fp8e4b15")}

    # Types and shapes, made once.

    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def shape_of(type_: Any) -> tuple[int, ...]:
        found = type_.__dict__.get("_ints")
        if found is None:
            found = type_._ints = tuple(type_.shape.values) if type_.is_block() else ()
        return found

    def like(type_: Any, shape: tuple[int, ...], scalar: Any = None) -> Any:
        """A type of these shape and elements; `type_`'s own where it has them."""
        own = type_.scalar
        scalar = own if scalar is None else scalar
        if scalar is own and shape_of(type_) == shape:
            return type_
        if not shape:
            return scalar
        blocks = scalar.__dict__.setdefault("_blocks", {})
        if shape not in blocks:
            blocks[shape] = tl.block_type(scalar, list(shape))
        return blocks[shape]

    def init(self: Any, handle: Any, type_: Any) -> None:
        ints = shape_of(type_) if isinstance(type_, tl.dtype) else ()
        if ints not in shapes:
            shapes[ints] = (constexpr(int(np.prod(ints, dtype=np.int64))), tl.tuple([constexpr(i) for i in ints]))
        self.handle, self.type, self.dtype = handle, type_, type_.scalar
        self.numel, self.shape = shapes[ints]

    def made(data: Any, of_handle: Any, type_: Any) -> Any:
        handle, tensor = object.__new__(Handle), object.__new__(Tensor)
        handle.data, handle.dtype, handle.attr = data, of_handle, {}
        init(tensor, handle, type_)
        return tensor

    def np_dtype(type_: Any) -> Any:
        scalar = type_.scalar
        return np.dtype(np.uint64) if scalar.is_ptr() else np_dtypes[scalar.name]

    # Constants, made once, but for those whose bits a shift turns to a signed number's.

    constants: dict[tuple[str, type, Any], Any] = {}
    constant_of = TritonSemantic.scalar_constant

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        if type(value) not in (int, float, bool) or dtype.name not in _SIGNED | {"fp16", "fp32", "int1"}:
            return constant_of(self, value, dtype)
        key = dtype.name, type(value), value
        if key not in constants:
            constants[key] = constant_of(self, value, dtype)
        return constants[key]

    def operand(value: Any, other: Any, names: set[str]) -> Any:
        """A tensor whose elements are of the same type as `other`'s; None where Triton has to decide."""
        if type(value) is constexpr:
            value = value.value
        dtype = other.type.scalar
        if type(value) is Tensor:
            return value if value.type.scalar is dtype and dtype.name in names else None
        if dtype.name in names:
            if type(value) is int and (dtype.name in _FLOATS or in_limits(value, dtype.name)):
                return constant(semantic, value, dtype)
            if type(value) is float and dtype.name in _FLOATS:
                return constant(semantic, value, dtype)
        return None

    def in_limits(value: int, name: str) -> bool:
        low, high = _LIMITS.get(name, (1, 0))
        return low <= value <= high

    def pair(x: Any, y: Any, names: set[str]) -> tuple[Any, Any, Any] | None:
        """Two operands and the shape of the result."""
        if type(x) is Tensor:
            y = operand(y, x, names)
        elif type(y) is Tensor:
            x = operand(x, y, names)
        else:
            return None
        if x is None or y is None:
            return None
        shape = _common(shape_of(x.type), shape_of(y.type))
        return None if shape is None else (x, y, shape)

    # Operations on two.

    def binary(name: str, op: Any, names: set[str], is_question: bool = False, floats: Any = None) -> None:
        """`floats`: for them, another one."""
        theirs = getattr(TritonSemantic, name)

        def run(self: Any, x: Any, y: Any, *more: Any, **by_name: Any) -> Any:
            found = pair(x, y, names)
            if found is None:
                return theirs(self, x, y, *more, **by_name)
            x, y, shape = found
            data = op(x.handle.data, y.handle.data)
            dtype = x.handle.dtype.scalar
            if not is_question and data.dtype is not x.handle.data.dtype and data.dtype != np_dtype(dtype):
                return theirs(self, x, y, *more, **by_name)
            return made(data, dtype, like(x.type, shape, tl.int1 if is_question else None))

        patch.setattr(TritonSemantic, name, run)

    def divided(x: Any, y: Any) -> Any:
        return (x - np.fmod(x, y)) // y

    binary("sub", np.subtract, _NUMBERS)
    binary("mul", np.multiply, _NUMBERS)
    binary("truediv", np.divide, {"fp32", "fp64"})
    binary("floordiv", divided, _INTS)
    binary("mod", np.fmod, _INTS | {"fp32"})
    binary("minimum", np.minimum, _NUMBERS)
    binary("maximum", np.maximum, _NUMBERS)
    for name, op in (("and_", np.bitwise_and), ("or_", np.bitwise_or), ("xor_", np.bitwise_xor)):
        binary(name, op, _BITS)
    binary("shl", np.left_shift, _INTS)
    binary("ashr", np.right_shift, _SIGNED)
    binary("lshr", np.right_shift, _INTS - _SIGNED)
    for name, op in (
        *(("less_than", np.less), ("less_equal", np.less_equal), ("equal", np.equal)),
        *(("greater_than", np.greater), ("greater_equal", np.greater_equal), ("not_equal", np.not_equal)),
    ):
        binary(name, op, _NUMBERS, is_question=True)
    binary("add", np.add, _NUMBERS)
    add_numbers = TritonSemantic.add

    def add(self: Any, x: Any, y: Any, *more: Any, **by_name: Any) -> Any:
        if type(x) is Tensor and x.type.scalar.is_ptr():
            offset = constant(semantic, y, tl.int32) if type(y) is int and in_limits(y, "int32") else y
            if type(offset) is Tensor and offset.type.scalar.name in _SIGNED | {"uint64"}:
                shape = _common(shape_of(x.type), shape_of(offset.type))
                if shape is not None:
                    size = max(1, x.type.scalar.element_ty.primitive_bitwidth // 8)
                    data = x.handle.data + size * offset.handle.data.astype(np.uint64)
                    return made(data, x.handle.dtype.scalar, like(x.type, shape))
        return add_numbers(self, x, y, *more, **by_name)

    patch.setattr(TritonSemantic, "add", add)

    # Choices, conversions, memory.

    where_of, cast_of, load_of, store_of = (getattr(TritonSemantic, n) for n in ("where", "cast", "load", "store"))
    to_tensor_of = TritonSemantic.to_tensor

    def where(self: Any, condition: Any, x: Any, y: Any) -> Any:
        found = pair(x, y, _NUMBERS | {"int1"}) if condition.type.scalar.name == "int1" else None
        shape = None if found is None else _common(found[2], shape_of(condition.type))
        if found is None or shape is None:
            return where_of(self, condition, x, y)
        x, y, _ = found
        data = np.where(condition.handle.data, x.handle.data, y.handle.data)
        if data.dtype != np_dtype(y.handle.dtype):
            return where_of(self, condition, x, y)
        return made(data, y.handle.dtype.scalar, like(x.type, shape))

    def cast(self: Any, x: Any, to: Any, *rounding: Any) -> Any:
        source, target = x.type.scalar, to.scalar
        if source is target:
            return x
        plain = source.name in _BITS | {"fp32"} and target.name in _INTS | {"fp32"}
        if plain or {source.name, target.name} == {"fp16", "fp32"}:
            type_ = like(x.type, shape_of(x.type), target)
            if not rounding or rounding == (None,):
                return made(builder.cast_impl(x.handle, type_).data, target, type_)
        return cast_of(self, x, to, *rounding)

    def to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is Tensor else to_tensor_of(self, x, check_type)

    def spread(x: Any, shape: tuple[int, ...]) -> Any:
        """Its handle, with an array of this shape; one number's is (1,)."""
        shape = shape or (1,)
        if x.handle.data.shape == shape:
            return x.handle
        return Handle(np.broadcast_to(x.handle.data, shape), x.handle.dtype)

    def kept(mask: Any, shape: tuple[int, ...]) -> Any:
        return Handle(np.ones(shape or (1,), dtype=bool), tl.int1) if mask is None else spread(mask, shape)

    def together(*tensors: Any) -> tuple[int, ...] | None:
        shape: tuple[int, ...] | None = ()
        for each in tensors:
            shape = None if shape is None or each is None else _common(shape, shape_of(each.type))
        return shape

    def is_plain(pointer: Any) -> bool:
        scalar = pointer.type.scalar
        return scalar.is_ptr() and scalar.element_ty.name in np_dtypes and scalar.element_ty.name != "int1"

    def load(
        self: Any,
        pointer: Any,
        mask: Any,
        other: Any,
        boundary: Any,
        padding: Any,
        cache: Any,
        eviction: Any,
        *more: Any,
    ) -> Any:
        if not boundary and not padding and is_plain(pointer) and (mask is not None or other is None):
            shape = together(pointer, *(each for each in (mask, other) if each is not None))
            if shape is not None and (shape == shape_of(pointer.type) or shape_of(pointer.type)):
                element = pointer.type.scalar.element_ty
                at = spread(pointer, shape or (1,))
                kept = (
                    Handle(np.ones(shape or (1,), dtype=bool), tl.int1) if mask is None else spread(mask, shape or (1,))
                )
                rest = None if other is None else spread(self.cast(other, element), shape or (1,))
                loaded = builder.create_masked_load(at, kept, rest, None, None, False)
                return made(loaded.data, loaded.dtype, like(pointer.type, shape, element))
        return load_of(self, pointer, mask, other, boundary, padding, *more)

    def store(self: Any, pointer: Any, value: Any, mask: Any, boundary: Any, *more: Any) -> Any:
        if not boundary and is_plain(pointer) and not pointer.type.scalar.is_const() and type(value) is Tensor:
            shape = shape_of(pointer.type)
            if together(pointer, value, *([] if mask is None else [mask])) == shape:
                value = self.cast(value, pointer.type.scalar.element_ty)
                kept = (
                    Handle(np.ones(shape or (1,), dtype=bool), tl.int1) if mask is None else spread(mask, shape or (1,))
                )
                builder.create_masked_store(
                    spread(pointer, shape or (1,)), spread(value, shape or (1,)), kept, None, None
                )
                return None
        return store_of(self, pointer, value, mask, boundary, *more)

    for name, function in {
        **{"where": where, "cast": cast, "load": load, "store": store},
        **{"to_tensor": to_tensor, "scalar_constant": constant},
    }.items():
        patch.setattr(TritonSemantic, name, function)
    patch.setattr(Tensor, "__init__", init)
    patch.setattr(interpreter, "_get_np_dtype", np_dtype)
    options = interpreter.InterpreterOptions(sanitize_overflow=False)  # what it asserts, it asserts in `debug` alone
    patch.setattr(builder, "options", options)

    # The language: patched once, and its operators go straight to what they mean.

    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    patch.setattr(interpreter, "_patch_lang", lambda function: interpreter._LangPatchScope())

    def operator(method: str, name: str, *more: Any, turned: bool = False, converts: bool = False) -> None:
        def run(self: Any, other: Any) -> Any:
            if type(other) is constexpr:
                other = other.value
            if converts:
                other = semantic.to_tensor(other)
            operation = getattr(semantic, name)
            return operation(other, self, *more) if turned else operation(self, other, *more)

        scope.set_attr(Tensor, method, run)

    for name in ("add", "sub", "mul"):
        operator(f"__{name}__", name, True)
        operator(f"__r{name}__", name, True, turned=True)
    for name in ("truediv", "floordiv", "mod"):
        operator(f"__{name}__", name)
    for name in ("and", "or", "xor"):
        operator(f"__{name}__", f"{name}_")
    for method, name in (
        *(("lt", "less_than"), ("le", "less_equal"), ("eq", "equal")),
        *(("gt", "greater_than"), ("ge", "greater_equal"), ("ne", "not_equal")),
    ):
        operator(f"__{method}__", name, converts=True)

    item = Tensor.__getitem__

    def getitem(self: Any, index: Any) -> Any:
        whole = slice(None)
        indices = index if type(index) is tuple else (index,)
        if not shape_of(self.type) or any(i is not None and i != whole for i in indices):
            return item(self, index)
        data, shape = self.handle.data, list(shape_of(self.type))
        for axis, i in enumerate(indices):
            if i is None:
                data = np.expand_dims(data, axis)
                shape.insert(axis, 1)
        return made(data, self.handle.dtype.scalar, like(self.type, tuple(shape)))

    scope.set_attr(Tensor, "__getitem__", getitem)
    return scope.restore
