"""The table that chooses kernels: every number of rows has one case, every case some rows, and all readers agree."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from teachllm.bench.step_profile import group_of
from teachllm_kernels import selection
from teachllm_kernels.kernel_list import KERNELS, OTHER, UNCHOSEN
from teachllm_kernels.linear import hopper_linear, skinny_gemm
from teachllm_kernels.linear.packed import hopper_packed_linear, packed_linear
from teachllm_kernels.selection import (
    AS_PRODUCT,
    CASES,
    MANY,
    Case,
    Op,
    Operands,
    anything,
    at,
    bound,
    case_of,
    replaced_table,
    spans_of,
)

ROOT = Path(__file__).parents[2]
OPS: tuple[Op, ...] = get_args(Op)
ROWS = (1, 2, 8, 9, 15, 16, 17, 255, 256, 257, 512, 513, 1023, 1024, 2047, 2048, 5000)
FORMS: dict[str, dict[str, tuple[Any, ...]]] = {
    "dense": {"num_in": (64, 60), "num_out": (96, 100), "has_bias": (False, True), "is_prepacked": (False, True)},
    "packed": {"num_in": (256,), "num_out": (64,), "has_bias": (False, True), "in_turns": (False, True)}
    | {"group_size": (0, 32, 128), "scale_bytes": (2, 4)},
    "scaled": {"num_in": (256, 264, 512), "num_out": (64,), "is_e4m3": (False, True), "has_blocks": (False, True)},
    "fp8_weight_only": {"num_in": (64, 72), "num_out": (64,)},
    "experts": {},
    "heads": {"head_size": (64, 80), "group": (2, 3), "block_size": (16,), "has_soft_cap": (False, True)},
}
CARDS: dict[selection.Card, tuple[int, int] | None] = {"cpu": None, "gpu": (8, 9), "hopper": (9, 0)}


def operands() -> Iterator[Operands]:
    """Every kind of weight and heads that some case tells from others, on every card."""
    for form, sizes in FORMS.items():
        for card, dtype, is_fixed in product(CARDS, (torch.bfloat16, torch.float32), (False, True)):
            for values in product(*sizes.values()):
                more = dict(zip(sizes, values, strict=True))
                if is_fixed and form not in ("dense", "experts"):  # which batch_invariant refuses
                    continue
                if more.get("is_prepacked", False) and card != "cpu":
                    continue
                yield Operands(form, card, dtype, CARDS[card], is_fixed=is_fixed, **more)  # type: ignore[arg-type]


def ops_of(form: str) -> list[Op]:
    return [op for op in OPS if any(case.form == form and op in case.ops for case in CASES)]


def first_match(op: Op, it: Operands, num_rows: int) -> Case | None:
    """What the table says, read as its docstring says it is."""
    found = (case for case in CASES if case.matches(op, it) and case.rows[0] <= num_rows <= case.rows[1])
    return next(found, None)


def test_every_number_of_rows_has_its_first_match_and_every_case_has_some_rows() -> None:
    taken: set[Case] = set()
    for it in operands():
        for op in ops_of(it.form):
            spans = spans_of(op, it)
            mosts = [most for most, _ in spans]
            assert mosts == sorted(set(mosts)) and mosts[-1] == (1 if op == "one_row" else MANY)
            for num_rows in (1,) if op == "one_row" else (*ROWS, MANY):
                found = first_match(op, it, num_rows)
                assert found is not None and case_of(op, it, num_rows) is found, (op, it, num_rows)
            taken |= {case for _, case in spans}
    assert [case for case in CASES if case not in taken] == []


@pytest.mark.parametrize(
    ("op", "num_rows", "it", "kernel"),
    [
        ("product", 64, Operands("scaled", "hopper", torch.bfloat16, (9, 0), 4096, 4096), "hopper_scaled_linear"),
        ("product", 257, Operands("scaled", "hopper", torch.bfloat16, (9, 0), 4096, 4096), "hopper_scaled_mm"),
        ("product", 64, Operands("scaled", "gpu", torch.bfloat16, (8, 9), 4096, 4096), "scaled_linear"),
        ("gated", 300, Operands("scaled", "gpu", torch.bfloat16, (8, 9), 4096, 4096), "scaled_mm"),
        ("product", 300, Operands("scaled", "gpu", torch.float16, (8, 9), 512, 64, has_blocks=True), "scaled_linear"),
        ("product", 16, Operands("dense", "gpu", torch.bfloat16, (8, 0), 4096, 4096), "skinny_gemm"),
        ("product", 17, Operands("dense", "gpu", torch.bfloat16, (8, 0), 4096, 4096), "library"),
        ("product", 256, Operands("dense", "hopper", torch.float16, (9, 0), 4096, 4096), "hopper_linear"),
        ("product", 16, Operands("dense", "hopper", torch.float32, (9, 0), 4096, 4096), "skinny_gemm"),
        ("add_to_residual", 1023, Operands("dense", "hopper", torch.bfloat16, (9, 0), 4096, 4096), AS_PRODUCT),
        ("add_to_residual", 1024, Operands("dense", "hopper", torch.bfloat16, (9, 0), 4096, 4096), "library_added"),
        ("gated", 2047, Operands("packed", "hopper", torch.bfloat16, (9, 0), 4096, 4096), AS_PRODUCT),
        ("one_row", 1, Operands("packed", "hopper", torch.bfloat16, (9, 0), 4096, 4096), "packed_gemv"),
        ("logits", 1, Operands("dense", "hopper", torch.bfloat16, (9, 0), 4096, 151936), "gemv"),
        ("float32_logits", 1, Operands("dense", "hopper", torch.bfloat16, (9, 0), 4096, 151936), "library"),
        ("logits", 1, Operands("dense", "gpu", torch.bfloat16, (8, 0), 64, 64, is_fixed=True), "batch_invariant_gemm"),
    ],
)  # fmt: skip
def test_what_was_measured_to_be_fastest_is_taken(op: Op, num_rows: int, it: Operands, kernel: str) -> None:
    assert case_of(op, it, num_rows).kernel == kernel


def test_a_number_of_rows_that_no_case_has_is_named() -> None:
    it = Operands("experts", "gpu", torch.bfloat16)
    only = Case(("experts",), (3, 9), "any", "experts", "any", anything, "library", "why")
    with replaced_table((only,)), pytest.raises(LookupError, match="no kernel for experts of 1 rows: Operands"):
        spans_of("experts", it)
    with (
        replaced_table((only._replace(rows=(1, 9)),)),
        pytest.raises(LookupError, match="no kernel for experts of 10 rows"),
    ):
        spans_of("experts", it)
    with replaced_table((only._replace(rows=(1, MANY)),)), pytest.raises(LookupError, match="library"):
        bound("experts", it, {"grouped_gemm": 1})
    with pytest.raises(LookupError, match="3 rows, where at most 2"):
        at(((2, "few"),), 3)


def test_no_kernel_is_given_more_rows_than_it_takes() -> None:
    limits = {
        "skinny_gemm": skinny_gemm.MAX_ROWS,
        "hopper_linear": hopper_linear.MAX_ROWS,
        "hopper_scaled_linear": hopper_linear.MAX_ROWS,
        "hopper_packed_linear": hopper_packed_linear.MAX_ROWS,
        "packed_linear": packed_linear.MAX_ROWS,
        "gemv": 1,
        "packed_gemv": 1,
        "scaled_gemv": 1,
    }
    assert {case.kernel for case in CASES if case.kernel in limits} == set(limits)
    assert all(case.rows[1] <= limits.get(case.kernel, MANY) for case in CASES)


def test_equal_layers_share_one_search_of_the_table_and_another_table_is_searched_anew() -> None:
    it = Operands("experts", "gpu", torch.bfloat16)
    found = spans_of("experts", it)
    assert spans_of("experts", it._replace(num_in=0)) is found
    only = Case(("experts",), (1, MANY), "any", "experts", "any", anything, "library", "why")
    with replaced_table((only,)):
        assert spans_of("experts", it) == ((MANY, only),)
    assert spans_of("experts", it) == found != ((MANY, only),)


DENSE = Operands("dense", "hopper", torch.bfloat16, num_in=64, num_out=96)
SCALED = Operands("scaled", "hopper", torch.bfloat16, (9, 0), 512, 96)


def test_a_case_that_depends_on_the_compute_capability_asks_for_it() -> None:
    with pytest.raises(ValueError, match="depends on the card's compute capability: Operands"):
        spans_of("product", SCALED._replace(card="gpu", capability=None))


def test_a_cpu_has_no_kernel_that_fuses_one_row() -> None:
    for form in ("dense", "packed", "scaled"):
        assert not case_of("one_row", SCALED._replace(form=form, card="cpu", capability=None), 1).has_kernel
        assert case_of("one_row", SCALED._replace(form=form, card="gpu"), 1).has_kernel


def test_every_kernel_is_where_the_list_says_and_launches_what_a_profiler_shows() -> None:
    named = {name for case in CASES if case.has_kernel for name in case.kernel.split(" + ")}
    assert named == set(KERNELS)
    for kernel in KERNELS.values():
        if kernel.file is not None:
            source = (ROOT / "kernels" / "teachllm_kernels" / kernel.file).read_text()
            assert all(re.search(rf"^\s+{name}\[.*\]\(", source, re.M) for name in kernel.names), kernel
    sources = [file.read_text() for file in (ROOT / "kernels").rglob("*.py")]
    launched = {name for source in sources for name in re.findall(r"^\s+(_\w+)\[.*\]\(", source, re.M)}
    of_cases = {name for kernel in KERNELS.values() for name in kernel.names}
    others = [name for names in UNCHOSEN.values() for name in names]
    assert launched == of_cases | set(others) and not of_cases & set(others)


def test_a_profile_counts_a_kernel_among_those_of_its_operation() -> None:
    for case in CASES:
        if not case.has_kernel:
            continue
        last = KERNELS[case.kernel.split(" + ")[-1]]
        among = "attention" if case.form == "heads" else "matrix products"
        assert last.group in (among, OTHER)
        assert all(group_of(name) == last.group for name in last.names)
    assert {name for name, kernel in KERNELS.items() if kernel.group == OTHER} == {
        *("dequantize", "rope_kv_write"),
        "scaled_mm",  # our part of it: it scales the library's sums
    }


def test_the_page_is_the_table() -> None:
    spec = importlib.util.spec_from_file_location("make_kernel_page", ROOT / "docs" / "make_kernel_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "kernels.md").read_text() == module.page(), "run docs/make_kernel_page.py"
