"""Compiles a Triton or Gluon kernel where it would be launched, for the arguments of the launch, without a GPU."""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}  # bytes that a program may have, by architecture
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
}
compiled: dict[str, int] = {}
ONE_EACH = "--one-each" in sys.argv
architectures = [86, 90]  # what differs from 80 to 86 is the room for tiles, see `compile_large_tiles`


def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Compile a kernel in place of a launch."""
    if ONE_EACH and self.__name__ in compiled:
        return
    values = dict(zip(self.arg_names, args, strict=False)) | kwargs
    constants = {p.name: values[p.name] for p in self.params if p.is_constexpr or values[p.name] is None}
    signature = {p.name: "constexpr" if p.name in constants else type_of(values[p.name]) for p in self.params}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, p in enumerate(self.params)
        if isinstance(values[p.name], torch.Tensor) or (type(values[p.name]) is int and values[p.name] % 16 == 0)
    }
    aligned = {at: value for at, value in aligned.items() if self.params[at[0]].name not in constants}
    options = {name: value for name, value in kwargs.items() if name not in self.arg_names or name == "num_warps"}
    for architecture in (90,) if self.is_gluon() else architectures:  # Gluon's are Hopper's alone
        if ONE_EACH and architecture != 90:
            continue
        if "PDL" in constants:  # Hopper's own variant for Hopper
            constants["PDL"] = architecture >= 90
        source = (GluonASTSource if self.is_gluon() else ASTSource)(self, signature, constants, aligned)
        target = GPUTarget("cuda", architecture, 32)
        if ONE_EACH:
            translate(source, target, options)
        else:
            done = triton.compile(source, target=target, options=options)
            assert done.asm["cubin"]
            assert done.metadata.shared <= SHARED_MEMORY[architecture], (self.__name__, done.metadata.shared)
        compiled[self.__name__] = compiled.get(self.__name__, 0) + 1


def translate(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> None:
    """Translate a kernel to Triton's first dialect, or Gluon's, and have that verified."""
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(options | source.parse_options())
    source.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
    return {bool: "i1", int: "i32", float: "fp32"}[type(value)]
