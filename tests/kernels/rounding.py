"""Triton's interpreter with the roundings of a GPU, and the one instruction that kernels ask for by name.

Its own cast to an 8-bit float carries nothing into the exponent and cuts off what is too small for one, its cast to
bfloat16 cuts off, too, and its fused multiply-add rounds twice. Here PyTorch casts, to the nearest, ties to even, and
beyond the largest 8-bit float to that one (`cvt.rn.satfinite`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch


def round_as_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Round so until `patch` is undone."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    cast, cast_8_bits = builder.cast_impl, builder.create_fp_to_fp
    stored = {tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8), tl.bfloat16: (torch.bfloat16, torch.int16)}

    def narrowed(source: Any, dtype: Any) -> Any:
        to, bits = stored[dtype]
        wide = torch.from_numpy(np.ascontiguousarray(source.data, dtype=np.float32))
        narrow = (wide.clamp(-448, 448) if to == torch.float8_e4m3fn else wide).to(to)
        return interpreter.TensorHandle(narrow.view(bits).numpy().view(interpreter._get_np_dtype(dtype)), dtype)

    def exact_cast(self: Any, source: Any, to: Any) -> Any:
        is_narrowed = source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16
        return narrowed(source, tl.bfloat16) if is_narrowed else cast(self, source, to)

    def exact_cast_8_bits(self: Any, source: Any, to: Any, rounding: Any) -> Any:
        is_narrowed = source.dtype.scalar == tl.float32 and to.scalar == tl.float8e4nv
        return narrowed(source, tl.float8e4nv) if is_narrowed else cast_8_bits(self, source, to, rounding)

    def fused(self: Any, a: Any, b: Any, c: Any) -> Any:
        total = a.data.astype(np.float64) * b.data + c.data
        return interpreter.TensorHandle(total.astype(a.data.dtype), a.dtype.scalar)

    def dp4a(self: Any, asm: str, constraints: str, values: Any, types: Any, is_pure: bool, pack: int) -> Any:
        assert asm == "dp4a.s32.s32 $0, $1, $2, 0;"
        a, b = (np.ascontiguousarray(value.data, np.int32)[..., None].view(np.int8) for value in values)
        products = (a.astype(np.int32) * b).sum(-1, dtype=np.int32)
        result = interpreter.TensorHandle(products, tl.int32)
        return SimpleNamespace(get_result=lambda index: result)

    patch.setattr(builder, "create_inline_asm", dp4a)
    patch.setattr(builder, "cast_impl", exact_cast)
    patch.setattr(builder, "create_fp_to_fp", exact_cast_8_bits)
    patch.setattr(builder, "create_fma", fused)
