"""Measure how near products with 4-bit and 8-bit weights come to the read ceiling, beside those of bfloat16.

    python3 benchmarks/kernels/packed_linear.py [--rows N ...] [--kinds KIND ...] [--try-tilings] [--output FILE]

The products of a layer of Qwen3-8B. Each figure is the median of replays of a CUDA graph that holds a product many
times over, each time with another weight, as a model does: what one leaves in the second-level cache the next must not
find. The fraction is of the time that the bytes take, or the arithmetic of bfloat16, whichever is longer. The error is
that of 128 outputs against float64.

Then the products and norms of whole layers, one behind the other: what launches and ends cost where kernels overlap.
With `--try-tilings` other divisions of the work than the kernels' own are timed as well, the fastest first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "kernels")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from decode_attention import CALLS, seconds  # noqa: E402
from h200 import provenance, script_parser  # noqa: E402

from teachllm.bench.ceilings import measure_ceilings  # noqa: E402
from teachllm.engine.observability.ceilings import at_best  # noqa: E402
from teachllm.roofline import Ceilings  # noqa: E402
from teachllm_kernels._triton import triton  # noqa: E402
from teachllm_kernels.linear import dense_gemm  # noqa: E402
from teachllm_kernels.linear.gemv import gemv_reference, gemv_triton  # noqa: E402
from teachllm_kernels.linear.hopper_gated_linear import hopper_gated_linear  # noqa: E402
from teachllm_kernels.linear.hopper_linear import MAX_ROWS, hopper_linear  # noqa: E402
from teachllm_kernels.linear.packed import dequantize, packed_gemv, packed_linear  # noqa: E402
from teachllm_kernels.linear.packed.dequantize import dequantize_triton  # noqa: E402
from teachllm_kernels.linear.packed.hopper_packed_linear import hopper_packed_linear  # noqa: E402
from teachllm_kernels.linear.packed.packed_gemv import packed_gemv_triton  # noqa: E402
from teachllm_kernels.linear.packed.packed_linear import packed_linear_triton  # noqa: E402
from teachllm_kernels.linear.packed.packed_weight import PackedWeight, cost, dequantize_reference  # noqa: E402
from teachllm_kernels.rms_norm import rms_norm_triton  # noqa: E402
from teachllm_kernels.selection import Op, Operands, card_of, case_of  # noqa: E402
from teachllm_kernels.silu_and_mul import silu_and_mul_triton  # noqa: E402

ROWS = (1, 2, 8, 16, 32, 64, 128, 256, 2048)
FEW_ROWS = (1, 64)  # of the kinds that are not the first
LAYERS, HIDDEN, HEADS = 36, 4096, 4096
OTHER_WEIGHTS = 300 << 20  # bytes that come between two uses of a weight
CHECKED = 128  # outputs, whole blocks
KINDS = ("4 bits", "4 bits, zeros", "4 bits, groups of 32", "8 bits", "e2m1")


class PackedGemm(NamedTuple):
    """One of a layer's: inputs, weight's outputs, whether SiLU-and-multiply follows, whether a norm comes first."""

    num_in: int
    num_out: int
    gated: bool = False
    has_norm: bool = False

    @property
    def adds_to_residual(self) -> bool:
        """Return whether the residual is added, and parts of the result may be left to the next norm."""
        return not self.has_norm


PRODUCTS = {
    "qkv": PackedGemm(4096, 6144, has_norm=True),
    "o": PackedGemm(4096, 4096),
    "gate, up": PackedGemm(4096, 24576, gated=True, has_norm=True),
    "down": PackedGemm(12288, 4096),
}


def weight_of(shape: PackedGemm, kind: str) -> PackedWeight:
    """Random words, and scales that leave rows about as large as they were."""
    bits, is_e2m1 = 8 if kind == "8 bits" else 4, kind == "e2m1"
    group_size = 16 if is_e2m1 else 32 if "32" in kind else 128
    blocks, num_groups = shape.num_out // 16, shape.num_in // group_size
    sizes = (blocks, shape.num_in * bits // 256, 32, 4)
    qweight = torch.randint(-(1 << 31), 1 << 31, sizes, dtype=torch.int32, device="cuda")
    of_groups = (blocks, num_groups, 8, 2)
    scales = (0.5 + torch.rand(of_groups, device="cuda")) * 4 / (1 << bits) * shape.num_in**-0.5
    zeros = torch.randint(16, of_groups, device="cuda").to(torch.uint8) if "zeros" in kind else None
    scales = scales.to(torch.bfloat16 if is_e2m1 else torch.float16)
    return PackedWeight(qweight, scales, zeros, bits, group_size, shape.num_in, shape.num_out, is_e2m1, shape.gated)


def copies(num_bytes: int) -> int:
    """Weights of a size, to be used in turns."""
    return max(min(OTHER_WEIGHTS // num_bytes, CALLS), 2)


def weights_of(shape: PackedGemm, kind: str) -> list[PackedWeight]:
    first = weight_of(shape, kind)
    return [first, *(weight_of(shape, kind) for _ in range(copies(first.num_bytes) - 1))]


def dense_of(shape: PackedGemm) -> list[torch.Tensor]:
    size = (shape.num_out, shape.num_in)
    count = copies(2 * shape.num_out * shape.num_in)
    return [torch.randn(size, device="cuda").bfloat16() * shape.num_in**-0.5 for _ in range(count)]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def before_and_after(shape: PackedGemm) -> tuple[tuple[torch.Tensor, float] | None, torch.Tensor | None]:
    """(norm, residual) of one row, as the model has them."""
    norm = (torch.ones(shape.num_in, device="cuda").bfloat16(), 1e-6) if shape.has_norm else None
    return norm, randn(1, shape.num_out) if shape.adds_to_residual else None


def dense_call(shape: PackedGemm, num_rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return how bfloat16 is multiplied."""
    x, (norm, residual) = randn(num_rows, shape.num_in), before_and_after(shape)
    if num_rows == 1:
        return lambda w: gemv_triton(x, w, None, norm, residual, shape.gated)
    size = {"num_in": shape.num_in, "num_out": shape.num_out}
    op: Op = "gated" if shape.gated else "add_to_residual" if shape.adds_to_residual else "product"
    kernel = case_of(op, Operands("dense", card_of(x.device), x.dtype, **size), num_rows).kernel
    if kernel == "hopper_linear":
        return lambda w: hopper_linear(x, w, gated=shape.gated, parts=shape.adds_to_residual)
    if kernel == "hopper_gated_linear":
        return lambda w: hopper_gated_linear(x, w)
    return lambda w: library(x, w, shape.gated)


def library(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
    y = F.linear(x, weight)
    return silu_and_mul_triton(y) if gated else y


def few_rows(x: torch.Tensor, weight: PackedWeight, gated: bool = False, parts: bool = False) -> torch.Tensor:
    """Multiply as a model on this card does."""
    operands = Operands(
        form="packed",
        card=card_of(x.device),
        dtype=x.dtype,
        num_in=weight.num_in,
        num_out=weight.num_out,
        group_size=weight.group_size if weight.scales.shape[1] > 1 else 0,
        scale_bytes=weight.scales.element_size(),
        is_e2m1=weight.is_e2m1,
        in_turns=gated,
    )
    op: Op = "gated" if gated else "add_to_residual" if parts else "product"
    kernel = case_of(op, operands, x.shape[0]).kernel
    launch = {"hopper_packed_linear": hopper_packed_linear, "packed_linear": packed_linear_triton}[kernel]
    return launch(x, weight, None, gated, parts)


def packed_calls(shape: PackedGemm, num_rows: int) -> Iterator[tuple[str, Callable[[PackedWeight], torch.Tensor]]]:
    """Yield every way to multiply so many rows by a packed weight."""
    x, (norm, residual) = randn(num_rows, shape.num_in), before_and_after(shape)
    if num_rows == 1:
        yield "one row", lambda w: packed_gemv_triton(x, w, None, norm, residual, shape.gated)
        yield "one row, alone", lambda w: packed_gemv_triton(x, w, gated=shape.gated)
    if num_rows <= MAX_ROWS:
        yield "few rows", lambda w: few_rows(x, w, shape.gated, shape.adds_to_residual)
        yield (
            "few rows, portable",
            lambda w: packed_linear_triton(x, w, gated=shape.gated, parts=shape.adds_to_residual),
        )
    if num_rows >= MAX_ROWS:
        dequantized = torch.empty((shape.num_out, shape.num_in), dtype=torch.bfloat16, device="cuda")
        yield "dequantized", lambda w: library(x, dequantize_triton(w, torch.bfloat16, dequantized), shape.gated)


def error_of(shape: PackedGemm, kind: str, num_rows: int) -> float:
    """Return the error of `CHECKED` outputs, relative to their length."""
    weight, x = weight_of(shape, kind), randn(num_rows, shape.num_in)
    ours = packed_gemv_triton if num_rows == 1 else few_rows
    y = ours(x, weight, gated=shape.gated)
    blocks = CHECKED // (8 if shape.gated else 16)
    zeros = None if weight.zeros is None else weight.zeros[:blocks]
    some = replace(
        weight, qweight=weight.qweight[:blocks], scales=weight.scales[:blocks], zeros=zeros, num_out=blocks * 16
    )
    expected = gemv_reference(x.double(), dequantize_reference(some, torch.float64), gated=shape.gated)
    return float((y[:, :CHECKED].double() - expected).norm() / expected.norm())


def in_turns(call: Callable[[Any], torch.Tensor], weights: Sequence[Any]) -> Callable[[], torch.Tensor]:
    """A product with one of the weights after the other."""
    turns = cycle(weights)
    return lambda: call(next(turns))


def entry(num_rows: int, what: str, way: str, took: float, floor: float, error: float | None = None) -> dict[str, Any]:
    """Print and return what is recorded."""
    text = f"{num_rows:5} rows  {what:<10} {way:<36} {took * 1e6:9.1f} us  {floor / took:6.1%}"
    print(text if error is None else f"{text}  error {error:.1e}", flush=True)
    figures = {"us": took * 1e6, "of_ceiling": floor / took, "error": error}
    return {"rows": num_rows, "what": what, "way": way} | figures


def measure_products(ceilings: Ceilings, num_rows: int, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every way to every product of a layer."""
    for name, shape in PRODUCTS.items():
        num_bytes, flops = dense_gemm.cost(num_rows, shape.num_in, shape.num_out)
        arithmetic = flops / ceilings.gemm_flops
        took = seconds(in_turns(dense_call(shape, num_rows), dense_of(shape)))
        yield entry(num_rows, name, "bf16", took, max(num_bytes / ceilings.read_bandwidth, arithmetic))
        torch.cuda.empty_cache()
        for kind in kinds if num_rows in FEW_ROWS else kinds[:1]:
            weights = weights_of(shape, kind)
            floor = max(cost(num_rows, weights[0], gated=shape.gated)[0] / ceilings.read_bandwidth, arithmetic)
            error = error_of(shape, kind, num_rows) if num_rows <= MAX_ROWS else None
            for way, call in packed_calls(shape, num_rows):
                took = seconds(in_turns(call, weights))
                yield entry(num_rows, name, f"{kind}: {way}", took, floor, error)
                error = None
            torch.cuda.empty_cache()


def measure_dequantizing(ceilings: Ceilings, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    for kind in kinds:
        weights, shape = weights_of(PRODUCTS["down"], kind), PRODUCTS["down"]
        dequantized = torch.empty((shape.num_out, shape.num_in), dtype=torch.bfloat16, device="cuda")
        call = in_turns(partial(dequantize_triton, dtype=torch.bfloat16, out=dequantized), weights)
        floor = dequantize.cost(weights[0])[0] / ceilings.read_bandwidth
        yield entry(0, "dequantize", kind, seconds(call), floor)
        torch.cuda.empty_cache()


def layer_call(num_rows: int, weights: dict[str, list[Any]], is_packed: bool) -> Callable[[], torch.Tensor]:
    """The products and norms of one layer after the other's, without attention."""
    turns = {name: cycle(these) for name, these in weights.items()}
    norm = (torch.ones(HIDDEN, device="cuda").bfloat16(), 1e-6)
    residual, attended = randn(num_rows, HIDDEN), randn(num_rows, HEADS)
    one_row = packed_gemv_triton if is_packed else gemv_triton
    several_rows = few_rows if is_packed else hopper_linear

    def one() -> torch.Tensor:
        one_row(residual, next(turns["qkv"]), None, norm)
        x = one_row(attended, next(turns["o"]), None, None, residual)
        h = one_row(x, next(turns["gate, up"]), None, norm, None, True)
        return one_row(h, next(turns["down"]), None, None, x)

    def few() -> torch.Tensor:
        h, _ = rms_norm_triton(residual, None, *norm)
        several_rows(h, next(turns["qkv"]))
        h, x = rms_norm_triton(several_rows(attended, next(turns["o"]), parts=True), residual, *norm)
        h = several_rows(h, next(turns["gate, up"]), gated=True)
        return rms_norm_triton(several_rows(h, next(turns["down"]), parts=True), x, *norm)[1]

    return one if num_rows == 1 else few


def measure_layers(ceilings: Ceilings, num_rows: int, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Microseconds of a layer; 36 of them are printed as milliseconds of a step."""
    dense = {name: dense_of(shape) for name, shape in PRODUCTS.items()}
    arithmetic = sum(2 * num_rows * shape.num_in * shape.num_out for shape in PRODUCTS.values()) / ceilings.gemm_flops
    num_bytes = sum(weights[0].nbytes for weights in dense.values())
    took = seconds(layer_call(num_rows, dense, False))
    yield entry(num_rows, "layer", "bf16", took, max(num_bytes / ceilings.read_bandwidth, arithmetic))
    del dense
    torch.cuda.empty_cache()
    for kind in kinds if num_rows in FEW_ROWS else kinds[:1]:
        packed = {name: weights_of(shape, kind) for name, shape in PRODUCTS.items()}
        num_bytes = sum(weights[0].num_bytes for weights in packed.values())
        took = seconds(layer_call(num_rows, packed, True))
        yield entry(num_rows, "layer", kind, took, max(num_bytes / ceilings.read_bandwidth, arithmetic))
        print(f"{num_rows:5} rows  {LAYERS} layers, {kind}: {took * LAYERS * 1e3:.2f} ms", flush=True)
        torch.cuda.empty_cache()


def try_tilings(ceilings: Ceilings, num_rows: int, kind: str) -> Iterator[dict[str, Any]]:
    """Other divisions of the work: warps and registers of one row, tiles and parts of several."""
    for name, shape in PRODUCTS.items():
        weights, found = weights_of(shape, kind), []
        floor = cost(num_rows, weights[0], gated=shape.gated)[0] / ceilings.read_bandwidth
        way, call = list(packed_calls(shape, num_rows))[0 if num_rows == 1 else 1]
        for label, replaced in other_tilings(num_rows, weights[0]):
            with ExitStack() as stack:
                for target, attribute, value in replaced:
                    stack.enter_context(patch.object(target, attribute, value))
                try:
                    found.append((seconds(in_turns(call, weights)), label))
                except (triton.runtime.errors.OutOfResources, RuntimeError) as problem:
                    print(f"{num_rows:5} rows  {name:<10} {label}: {str(problem).splitlines()[0]}", flush=True)
        for took, label in sorted(found):
            yield entry(num_rows, name, f"{way}, {label}", took, floor)
        torch.cuda.empty_cache()


def other_tilings(num_rows: int, weight: PackedWeight) -> Iterator[tuple[str, list[tuple[Any, str, Any]]]]:
    """Yield what to replace, and what with; the kernels' own choice first."""
    yield "own", []
    if num_rows == 1:
        for (warps, registers), apart in product(((4, 128), (4, 168), (4, 0), (8, 96), (8, 128)), (False, True)):
            limits = {"maxnreg": registers} if registers else {}
            yield (
                f"{warps} warps, {registers or 'any'} registers, norm {'apart' if apart else 'inside'}",
                [
                    (packed_gemv, "_warps", lambda *_, chosen=warps: chosen),
                    (packed_gemv, "_registers", lambda *_, chosen=limits: chosen),
                    (packed_gemv, "_has_turns", lambda _, chosen=apart: chosen),
                ],
            )
        return
    own = packed_linear._tiling(num_rows, weight, torch.bfloat16, 227 << 10)
    tiles = -(-weight.num_in // own.tile_k)
    for blocks, factor, late in product((4, 8), (0.5, 1, 2), (True, False) if own.late else (False,)):
        each = -(-tiles // max(int(own.splits * factor), 1))
        tiling = replace(own, blocks=blocks, splits=-(-tiles // each), tiles=each, late=late)
        programs = -(-num_rows // own.rows) * -(-weight.qweight.shape[0] // blocks)
        if tiling.splits == 1 or programs <= packed_linear._arrivals(weight.qweight.device).numel():
            label = f"{blocks} blocks, {tiling.splits} splits, scales {'late' if late else 'first'}"
            yield label, [(packed_linear, "_tiling", lambda *_, chosen=tiling: chosen)]


def measure(ceilings: Ceilings, args: Any) -> list[dict[str, Any]]:
    """One entry for each product, number of rows, and way; prints them as they come."""
    print(f"{ceilings.device}: reads {ceilings.read_bandwidth / 1e12:.2f} TB/s, bf16 {ceilings.gemm_flops / 1e12:.0f}")
    found: list[dict[str, Any]] = []
    for num_rows in args.rows:
        if num_rows <= MAX_ROWS:
            found += measure_layers(ceilings, num_rows, args.kinds)
        found += measure_products(ceilings, num_rows, args.kinds)
        if args.try_tilings and num_rows <= MAX_ROWS:
            found += try_tilings(ceilings, num_rows, args.kinds[0])
    found += measure_dequantizing(ceilings, args.kinds)
    return found


def main() -> None:
    """Reads the command line and writes what was found, if told where."""
    parser = script_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of x; default: %(default)s")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="the first at all numbers of rows")
    parser.add_argument("--try-tilings", action="store_true", help="other divisions of the work as well")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and torch sees none")
    ceilings = at_best(measure_ceilings("cuda", "bfloat16"))
    found = measure(ceilings, args)
    if args.output:
        record = provenance("kernels/packed_linear.py", None, ceilings.device, args.commit)
        args.output.write_text(json.dumps(record | {"ceilings": asdict(ceilings), "results": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
