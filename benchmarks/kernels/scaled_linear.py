"""Find the fastest 8-bit GEMM for each number of rows, and compare it with the GPU's limits.

    python3 benchmarks/kernels/scaled_linear.py [--rows N ...] [--kinds bf16 e4m3 int8 blocks] [--output FILE]

It measures the products of a layer of Qwen3-8B, and the bfloat16 ones to compare with. Each figure is of a CUDA graph
that repeats the product many times, each time with another weight, as in a model: once after a rest, and once after 0.2
seconds of nothing else, when power limits the GPU. The fraction is the lower bound divided by the measured time. The
lower bound is the time of the bytes or of the arithmetic, whichever is longer: bandwidth and bfloat16 FLOP/s as
measured here (or the best known for such a GPU), 8-bit FLOP/s as the best that the library has shown on an H200. The
error is that of 128 outputs of some rows against float64.

Kernels that quantize rows are timed separately, beside the kernels that they replace, unless only some kinds are asked
for. All of it takes more than ten minutes; most of that time is compilation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "kernels")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from decode_attention import CALLS  # noqa: E402
from h200 import provenance, script_parser  # noqa: E402
from prefill_attention import seconds  # noqa: E402

from teachllm.bench.ceilings import measure_ceilings  # noqa: E402
from teachllm.engine.observability.ceilings import at_best  # noqa: E402
from teachllm.roofline import Ceilings  # noqa: E402
from teachllm_kernels.linear import dense_gemm, hopper_linear  # noqa: E402
from teachllm_kernels.linear.gemv import gemv_triton  # noqa: E402
from teachllm_kernels.linear.hopper_gated_linear import hopper_gated_linear  # noqa: E402
from teachllm_kernels.linear.hopper_linear import hopper_scaled_linear  # noqa: E402
from teachllm_kernels.linear.scaled import scaled_reference  # noqa: E402
from teachllm_kernels.linear.scaled.hopper_scaled_mm import hopper_scaled_mm  # noqa: E402
from teachllm_kernels.linear.scaled.scaled_gemv import scaled_gemv_triton  # noqa: E402
from teachllm_kernels.linear.scaled.scaled_linear import scaled_linear_triton, weight_only_triton  # noqa: E402
from teachllm_kernels.linear.scaled.scaled_mm import scaled_mm  # noqa: E402
from teachllm_kernels.quantize_rows import GROUP, QuantizedRows, quantize_rows_triton  # noqa: E402
from teachllm_kernels.rms_norm import rms_norm_quantized_triton, rms_norm_triton  # noqa: E402
from teachllm_kernels.selection import Op, Operands, card_of, case_of  # noqa: E402
from teachllm_kernels.silu_and_mul import (  # noqa: E402
    silu_and_mul,
    silu_and_mul_quantized_triton,
    silu_and_mul_triton,
)

HIDDEN = 4096
ROWS = (1, 2, 8, 16, 64, 256, 2048, 16384)
KINDS = ("bf16", "e4m3", "int8", "blocks")
LAYERS = 36
E4M3_FLOPS = 1297e12  # products of 8,192 x 8,192 x 8,192, `torch._scaled_mm`
OTHER_WEIGHTS = 300 << 20  # bytes that come between two uses of a weight
CHECKED = 128  # outputs
FEW, MANY = 16, 2048  # rows up to which the portable kernel, and from which every kind of sums is tried
NO_SILU = "library, one scale, no SiLU"


class ScaledGemm(NamedTuple):
    """One of a layer's: inputs, outputs, whether SiLU-and-multiply follows, whether it may be left in parts."""

    num_in: int
    num_out: int
    gated: bool = False
    adds_to_residual: bool = False

    @property
    def num_weight_rows(self) -> int:
        return self.num_out * (2 if self.gated else 1)


PRODUCTS = {
    "qkv": ScaledGemm(4096, 6144),
    "o": ScaledGemm(4096, 4096, adds_to_residual=True),
    "gate, up": ScaledGemm(4096, 12288, gated=True),
    "down": ScaledGemm(12288, 4096, adds_to_residual=True),
}


class BenchmarkWeight(NamedTuple):
    """Holds quantized values, and a scale per output or per block."""

    qweight: torch.Tensor
    scales: torch.Tensor


class ScaledCall(NamedTuple):
    """A product of some rows with a weight, and the rows, if what comes out can be checked by them."""

    name: str
    call: Callable[[BenchmarkWeight], torch.Tensor]
    rows: QuantizedRows | None


def weights_of(product: ScaledGemm, quantized_dtype: torch.dtype, by_block: bool = False) -> list[BenchmarkWeight]:
    """Return as many quantized weights as a product uses in turn."""
    shape = (product.num_weight_rows, product.num_in)
    made = []
    for _ in range(max(min(OTHER_WEIGHTS // (shape[0] * shape[1]), CALLS), 2)):
        unquantized = torch.randn(shape, device="cuda").bfloat16()
        rows = quantize_rows_triton(unquantized, quantized_dtype)
        scales = rows.scales.contiguous() * product.num_in**-0.5
        if by_block:
            scales = scales[::GROUP].expand(-1, product.num_in // GROUP).contiguous()
        made.append(BenchmarkWeight(rows.values, scales))
    return made


def dense_ways(product: ScaledGemm, num_rows: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the bfloat16 product that the engine uses for so many rows, by name."""
    x = torch.randn(num_rows, product.num_in, device="cuda").bfloat16()
    shape = (product.num_weight_rows, product.num_in)
    count = max(min(OTHER_WEIGHTS // (2 * shape[0] * shape[1]), CALLS), 2)
    weights = cycle([torch.randn(shape, device="cuda").bfloat16() * product.num_in**-0.5 for _ in range(count)])
    op: Op = "gated" if product.gated else "add_to_residual" if product.adds_to_residual else "product"
    operands = Operands("dense", card_of(x.device), x.dtype, num_in=shape[1], num_out=shape[0])
    kernel = case_of(op, operands, num_rows).kernel
    if num_rows == 1:
        yield "bf16", lambda: gemv_triton(x, next(weights), gated=product.gated)
    elif kernel == "hopper_linear":
        yield (
            "bf16",
            lambda: hopper_linear.hopper_linear(x, next(weights), gated=product.gated, parts=product.adds_to_residual),
        )
    elif kernel == "hopper_gated_linear":
        yield "bf16", lambda: hopper_gated_linear(x, next(weights))
    elif product.gated:
        yield "bf16", lambda: silu_and_mul(F.linear(x, next(weights)))
    else:
        yield "bf16", lambda: F.linear(x, next(weights))


def ways(product: ScaledGemm, num_rows: int, quantized_dtype: torch.dtype) -> Iterator[ScaledCall]:
    """Yield the products of quantized values with a scale per row and a scale per output."""
    x = torch.randn(num_rows, product.num_in, device="cuda").bfloat16()
    rows = quantize_rows_triton(x, quantized_dtype)
    gated, adds_to_residual = product.gated, product.adds_to_residual
    if num_rows == 1:
        norm = None if adds_to_residual else (torch.ones(product.num_in, device="cuda").bfloat16(), 1e-6)
        yield ScaledCall("gemv that quantizes", lambda w: scaled_gemv_triton(x, *w, norm=norm, gated=gated), None)
        yield ScaledCall("gemv", lambda w: scaled_gemv_triton(rows, *w, gated=gated, dtype=torch.bfloat16), rows)
    if num_rows <= hopper_linear.MAX_ROWS:
        yield ScaledCall(
            "hopper_linear", lambda w: hopper_scaled_linear(rows, *w, gated=gated, parts=adds_to_residual), rows
        )
    if num_rows <= FEW or num_rows == 64:
        yield ScaledCall("scaled_linear", lambda w: scaled_linear_triton(rows, *w, gated=gated), rows)
    if num_rows > FEW:
        yield ScaledCall("hopper_scaled_mm", lambda w: hopper_scaled_mm(rows, *w, gated=gated), rows)
        yield ScaledCall("library", lambda w: scaled_mm(rows, *w, gated=gated), rows)
    if quantized_dtype == torch.int8:
        return
    if num_rows >= MANY:
        yield ScaledCall("hopper_scaled_mm, 128", lambda w: hopper_scaled_mm(rows, *w, gated=gated, level=128), rows)
        yield ScaledCall("hopper_scaled_mm, 512", lambda w: hopper_scaled_mm(rows, *w, gated=gated, level=512), rows)
        yield ScaledCall("library, exact", lambda w: scaled_mm(rows, *w, gated=gated, fast=False), rows)
        one, kinds = torch.ones((), device="cuda"), {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        yield ScaledCall(NO_SILU, lambda w: torch._scaled_mm(rows.values, w.qweight.t(), one, one, **kinds), None)
    if num_rows in (2, 16, 64, 256):
        yield ScaledCall("weight only", lambda w: weight_only_triton(x, *w, gated=gated), None)


def ways_by_block(product: ScaledGemm, num_rows: int) -> Iterator[ScaledCall]:
    """Yield the products of 8-bit floats with a scale per group of x and a scale per block of the weight."""
    x = torch.randn(num_rows, product.num_in, device="cuda").bfloat16()
    rows = quantize_rows_triton(x, torch.float8_e4m3fn, grouped=True)
    gated, adds_to_residual = product.gated, product.adds_to_residual
    if num_rows == 1:
        yield ScaledCall("gemv", lambda w: scaled_gemv_triton(rows, *w, gated=gated, dtype=torch.bfloat16), rows)
    if num_rows <= hopper_linear.MAX_ROWS:
        yield ScaledCall(
            "hopper_linear", lambda w: hopper_scaled_linear(rows, *w, gated=gated, parts=adds_to_residual), rows
        )
    if num_rows <= 64:
        yield ScaledCall("scaled_linear", lambda w: scaled_linear_triton(rows, *w, gated=gated), rows)
    if num_rows > 64:
        yield ScaledCall("hopper_scaled_mm", lambda w: hopper_scaled_mm(rows, *w, gated=gated), rows)
        yield ScaledCall("library", lambda w: scaled_mm(rows, *w, gated=gated), rows)


def error_of(way: ScaledCall, weight: BenchmarkWeight, product: ScaledGemm) -> float | None:
    """Return the error of `CHECKED` outputs of some rows, relative to their length."""
    if way.rows is None:
        return None
    y = way.call(weight)
    y = y.sum(0) if y.dim() == 3 else y
    chosen = slice(0, 512)
    by_block = weight.scales.shape[1] > 1
    starts = [0, product.num_out] if product.gated else [0]
    some = [weight.qweight[start : start + CHECKED] for start in starts]
    scales = [weight.scales[start // GROUP :][:1] if by_block else weight.scales[start:][:CHECKED] for start in starts]
    few = QuantizedRows(way.rows.values[chosen], way.rows.scales[chosen])
    expected = scaled_reference.scaled_linear_reference(few, torch.cat(some), torch.cat(scales), gated=product.gated)
    return float((y[chosen, :CHECKED].double() - expected).norm() / expected.norm())


def timed(name: str, num_rows: int, way: str, call: Callable[[], Any], floor_s: float, error: float | None) -> dict:
    """One entry; prints it."""
    rest, hot = seconds(call)
    text = f"{num_rows:6} rows  {name:<16} {way:<34} {rest * 1e6:9.1f} us, {hot * 1e6:9.1f} hot  {floor_s / hot:6.1%}"
    print(text if error is None else f"{text}  error {error:.1e}", flush=True)
    figures = {"us": hot * 1e6, "rest_us": rest * 1e6, "of_ceiling": floor_s / hot, "error": error}
    return {"rows": num_rows, "what": name, "way": way} | figures


def measure_products(ceilings: Ceilings, num_rows: int, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every way of these kinds to every product of a layer."""
    for name, product in PRODUCTS.items():
        size = (num_rows, product.num_in, product.num_out)
        num_bytes, flops = dense_gemm.cost(*size, gated=product.gated)
        floor = max(num_bytes / ceilings.read_bandwidth, flops / ceilings.gemm_flops)
        for way, call in dense_ways(product, num_rows) if "bf16" in kinds else ():
            yield timed(name, num_rows, way, call, floor, None)
        num_bytes, flops = scaled_reference.cost(*size, gated=product.gated)
        floor = max(num_bytes / ceilings.read_bandwidth, flops / E4M3_FLOPS)
        for kind in [kind for kind in kinds if kind != "bf16"]:
            quantized_dtype, by_block = torch.int8 if kind == "int8" else torch.float8_e4m3fn, kind == "blocks"
            weights = weights_of(product, quantized_dtype, by_block)
            found = ways_by_block(product, num_rows) if by_block else ways(product, num_rows, quantized_dtype)
            for way in found:
                try:
                    error = error_of(way, weights[0], product)
                    yield timed(name, num_rows, f"{kind} {way.name}", in_turns(way, weights), floor, error)
                except (RuntimeError, ValueError) as problem:  # the library has no such product
                    reason = str(problem).partition("\n")[0]
                    print(f"{num_rows:6} rows  {name:<16} {kind} {way.name}: {reason}", flush=True)
            torch.cuda.empty_cache()


def in_turns(way: ScaledCall, weights: list[BenchmarkWeight]) -> Callable[[], torch.Tensor]:
    """A product with one of the weights after the other."""
    turns = cycle(weights)
    return lambda: way.call(next(turns))


def row_calls(num_rows: int, size: int) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Yield the kernels that quantize rows, and the kernels that they replace: (name, bytes moved, call)."""
    many = max(min(OTHER_WEIGHTS // (4 * num_rows * size), CALLS), 2)
    x = cycle([torch.randn(num_rows, size, device="cuda").bfloat16() for _ in range(many)])
    quantized_dtype, num_values = torch.float8_e4m3fn, num_rows * size
    yield "quantize", 3 * num_values, lambda: quantize_rows_triton(next(x), quantized_dtype)
    yield "quantize groups", 3 * num_values, lambda: quantize_rows_triton(next(x), quantized_dtype, grouped=True)
    if size == HIDDEN:
        norm = (torch.ones(size, device="cuda").bfloat16(), 1e-6)
        yield "norm", 8 * num_values, lambda: rms_norm_triton(next(x), next(x), *norm)
        yield (
            "norm, quantized",
            7 * num_values,
            lambda: rms_norm_quantized_triton(next(x), next(x), *norm, quantized_dtype),
        )
        return
    gate_up = cycle([torch.randn(num_rows, 2 * size, device="cuda").bfloat16() for _ in range(many)])
    yield "SiLU", 6 * num_values, lambda: silu_and_mul_triton(next(gate_up))
    yield "SiLU, quantized", 5 * num_values, lambda: silu_and_mul_quantized_triton(next(gate_up), quantized_dtype)


def measure_rows(ceilings: Ceilings, num_rows: int) -> Iterator[dict[str, Any]]:
    """Time the kernels that quantize rows."""
    for size in (HIDDEN, 12288):
        for way, num_bytes, call in row_calls(num_rows, size):
            yield timed(f"rows of {size:,}", num_rows, way, call, num_bytes / ceilings.read_bandwidth, None)
        torch.cuda.empty_cache()


def summarize(found: list[dict[str, Any]], num_rows: int) -> None:
    """Milliseconds of all layers' products by each kind's best ways."""
    for kind in KINDS:
        best = []
        for name in PRODUCTS:
            these = [each for each in found if each["rows"] == num_rows and each["what"] == name]
            fitting = [each for each in these if each["way"].startswith(kind) and NO_SILU not in each["way"]]
            if fitting:
                best.append(min(fitting, key=lambda each: each["us"]))
        if best:
            total = sum(each["us"] for each in best) * LAYERS / 1e3
            names = "; ".join(f"{each['what']}: {each['way'].removeprefix(kind).strip() or kind}" for each in best)
            print(f"{num_rows:6} rows  {kind:<8} {total:9.2f} ms of {LAYERS} layers  ({names})", flush=True)


def measure(ceilings: Ceilings, all_rows: Sequence[int], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """One entry for each product, number of rows, and way; prints them as they come."""
    bandwidth, flops = ceilings.read_bandwidth / 1e12, E4M3_FLOPS / 1e12
    print(f"{ceilings.device}: reads {bandwidth:.2f} TB/s, 8-bit products {flops:.0f} TFLOP/s")
    found: list[dict[str, Any]] = []
    for num_rows in all_rows:
        found += measure_products(ceilings, num_rows, kinds)
        if len(kinds) == len(KINDS):
            found += measure_rows(ceilings, num_rows)
        summarize(found, num_rows)
    return found


def main() -> None:
    """Reads the command line and writes what was found, if told where."""
    parser = script_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of x; default: %(default)s")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of weights; default: all")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and torch sees none")
    ceilings = at_best(measure_ceilings("cuda", "bfloat16"))
    found = measure(ceilings, args.rows, args.kinds)
    if args.output:
        record = provenance("kernels/scaled_linear.py", None, ceilings.device, args.commit)
        args.output.write_text(json.dumps(record | {"ceilings": asdict(ceilings), "results": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
