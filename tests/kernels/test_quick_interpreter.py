"""What the quick interpreter computes is what Triton's own does, bit for bit, and mistakes are mistakes for both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime.errors import InterpreterError

from teachllm_kernels._triton import tl, triton
from tests.kernels.quick_interpreter import as_triton_has_it

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is not in use")
NUM = 16
TYPES = {  # the interpreter has no correct bfloat16
    name: getattr(torch, name) for name in ("int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64")
}


def both(kernel: Any, *tensors: torch.Tensor, **more: Any) -> list[list[torch.Tensor]]:
    """What a kernel leaves of its tensors, by either."""
    quick, plain = ([tensor.clone() for tensor in tensors] for _ in range(2))
    kernel[(2,)](*quick, **more)
    with as_triton_has_it():
        kernel[(2,)](*plain, **more)
    return [quick, plain]


def assert_equal(kernel: Any, *tensors: torch.Tensor, **more: Any) -> None:
    for quick, plain in zip(*both(kernel, *tensors, **more), strict=True):
        assert torch.equal(quick.view(torch.uint8), plain.view(torch.uint8))


@triton.jit
def _numbers(a_ptr, b_ptr, out_ptr, questions_ptr, NUM: tl.constexpr, IS_INT: tl.constexpr, IS_WIDE: tl.constexpr):
    program = tl.program_id(0)
    at = program * NUM + tl.arange(0, NUM)
    x, y = tl.load(a_ptr + at), tl.load(b_ptr + at, mask=at < 2 * NUM - 3, other=1)
    out_ptr += 16 * NUM * program + tl.arange(0, NUM)
    tl.store(out_ptr, x + y)
    tl.store(out_ptr + NUM, x - 1)
    tl.store(out_ptr + 2 * NUM, (3 - y) * x)
    tl.store(out_ptr + 3 * NUM, tl.where(x < y, x, 2))
    tl.store(out_ptr + 4 * NUM, tl.minimum(x, y) + tl.maximum(x, 4))
    tl.store(out_ptr + 5 * NUM, tl.where(program == 1, y, x), mask=(x > 0) | (y == 2))
    if IS_WIDE:
        tl.store(out_ptr + 6 * NUM, tl.sum(x[:, None] * y[None, :], axis=1))
        tl.store(out_ptr + 7 * NUM, x * tl.max(y, axis=0) - tl.sum(x, axis=0))
    if IS_INT:
        tl.store(out_ptr + 8 * NUM, x // (y | 1) + x % (y | 1))
        tl.store(out_ptr + 9 * NUM, ((x & 6) ^ y) << 1)
        tl.store(out_ptr + 10 * NUM, (x >> 1) + -y)
        tl.store(out_ptr + 11 * NUM, tl.cdiv(x, (y & 3) + 1), mask=(x != y) & (at < 9 + program))
    else:
        tl.store(out_ptr + 12 * NUM, (x / (y * y + 1)).to(tl.float32))
        tl.store(out_ptr + 13 * NUM, x * 0.3 + program)
    questions_ptr += 4 * NUM * program + tl.arange(0, NUM)
    tl.store(questions_ptr, (x <= y).to(tl.int32))
    tl.store(questions_ptr + NUM, (x >= 1).to(tl.int32) + (x != y))
    tl.store(questions_ptr + 2 * NUM, (x * 1.5).to(tl.int32), mask=~(x == 3))
    tl.store(questions_ptr + 3 * NUM, tl.cumsum((x > y).to(tl.int32), 0) + tl.load(questions_ptr))


@pytest.mark.parametrize("dtype", TYPES)
def test_of_every_type_numbers_are_the_same(dtype: str) -> None:
    torch.manual_seed(0)
    is_int = not TYPES[dtype].is_floating_point
    a, b = (torch.randint(0, 7, (2, 2 * NUM)) if is_int else 3 * torch.randn(2, 2 * NUM)).to(TYPES[dtype])
    out, questions = torch.zeros(2, 16, NUM, dtype=TYPES[dtype]), torch.zeros(2, 4, NUM, dtype=torch.int32)
    is_wide = dtype not in ("int8", "int16", "uint8")
    assert_equal(_numbers, a, b, out, questions, NUM=NUM, IS_INT=is_int, IS_WIDE=is_wide)


@triton.jit
def _mixed(a_ptr, b_ptr, c_ptr, out_ptr, NUM: tl.constexpr):
    at = tl.arange(0, NUM) + tl.program_id(0) * 0
    x, y, z = tl.load(a_ptr + at), tl.load(b_ptr + at), tl.load(c_ptr + at)
    count = NUM
    count += 1
    tl.store(out_ptr + at, x + y)
    tl.store(out_ptr + NUM + at, x * z + 3)
    tl.store(out_ptr + 2 * NUM + at, (y - z) / 2)
    tl.store(out_ptr + 3 * NUM + at, (x.to(tl.uint32) >> 2) * count)
    tl.store(out_ptr + 4 * NUM + at[None, :], (tl.load(a_ptr) + y[None, :]) * 1.0)
    tl.store(out_ptr + 5 * NUM, tl.load(b_ptr + 1).to(tl.float32) + 2**31)
    rows, columns = at[:, None], at[None, :]
    square = tl.load(c_ptr + (rows + columns) % NUM, mask=columns <= rows, other=-1.0)
    tl.store(out_ptr + 6 * NUM + at, tl.sum(tl.dot(square, square.to(tl.float32), input_precision="ieee"), axis=0))
    tl.store(out_ptr + 7 * NUM + at, tl.sort(z))
    while count > NUM - 2:
        tl.store(out_ptr + 8 * NUM + count, tl.randint(count, count + 5).to(tl.float32), mask=count < NUM)
        count -= 1


def test_operands_of_several_types_and_shapes_are_what_triton_makes_of_them() -> None:
    torch.manual_seed(1)
    a, b = torch.randint(-9, 9, (NUM,), dtype=torch.int32), torch.randint(-9, 9, (NUM,))
    assert_equal(_mixed, a, b, torch.randn(NUM), torch.zeros(12, NUM), NUM=NUM)


@triton.jit
def _mistaken(a_ptr, WHICH: tl.constexpr):
    at = tl.arange(0, 4)
    if WHICH == 0:
        tl.store(a_ptr + at, at + tl.arange(0, 8))
    elif WHICH == 1:
        tl.store(a_ptr + at, at & 0.5)
    elif WHICH == 2:
        tl.store(a_ptr + at, (at.to(tl.uint8)) + -1)
    else:
        tl.store(a_ptr, at)


@pytest.mark.parametrize("which", range(4))
def test_a_mistake_is_one_for_both(which: int) -> None:
    said = []
    for plain in (False, True):
        with pytest.raises(InterpreterError) as caught:
            if plain:
                with as_triton_has_it():
                    _mistaken[(1,)](a_ptr=torch.zeros(8), WHICH=which)
            else:
                _mistaken[(1,)](a_ptr=torch.zeros(8), WHICH=which)
        said.append(str(caught.value))
    assert said[0] == said[1]
