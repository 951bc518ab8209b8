"""Choose kernels: one table says which kernel computes an operation, for how many rows, and why.

A table of cases is read from top to bottom, and the first case that matches is taken: one of its operations, the form
of the weight, the card, the dtype, a predicate on everything else, and the number of rows. All but the last are known
when a layer is finished. So a layer asks once (`bound`) and keeps, for each operation, a short list of launches by the
most rows that each is for; a call compares its number of rows with that list (`at`) and nothing else.

To answer "which kernel multiplies 64 rows by an fp8 weight on an H100": the form is "scaled", and the first case for
"product" whose rows hold 64 names `hopper_scaled_linear`, with its reason. docs/kernels.md is this table as a page.

Layers of one kind share one search of the table: `spans_of` remembers what it found. `replaced_table` puts other cases
in place for a while, for a test or an experiment.

Where nothing is to choose, the table has no case: the page says what computes then.

What is said to be measured was measured on an H200, see benchmarks/NOTES.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from sys import maxsize as MANY
from typing import Literal, NamedTuple, TypeVar

import torch

from teachllm_kernels._hopper import has_hopper
from teachllm_kernels.attention.hopper_decode import takes_decode_heads
from teachllm_kernels.attention.hopper_prefill import takes_prefill_heads
from teachllm_kernels.linear.packed.hopper_packed_linear import takes_groups
from teachllm_kernels.linear.scaled.scaled_mm import library_multiplies

Op = Literal[
    "product",  # x W^T + b
    "add_to_residual",  # the same, added to the residual stream now or by the next norm
    "gated",  # silu(gate) * up of a weight with gate above up
    "one_row",  # one row, with the norm before it and the residual after it
    "logits",  # of rows that are sampled, in the model's dtype
    "float32_logits",  # of rows whose log-probabilities are returned
    "experts",  # rows of a mixture, each with the weights of its experts
    "decode",  # attention of a step of decodes alone, as many as there are rows
    "prefill",  # attention of prompts with so many tokens together
    "short_prefill",  # the same, launched one by one, of sequences of at most `SHORT` tokens
]
Form = Literal["dense", "packed", "scaled", "fp8_weight_only", "experts", "heads"]
Card = Literal["any", "cpu", "gpu", "hopper"]  # in a case "gpu" is any, Hopper included
T = TypeVar("T")

PRODUCT: tuple[Op, ...] = ("product",)
GATED: tuple[Op, ...] = ("gated",)
ADDED: tuple[Op, ...] = ("add_to_residual",)
ONE_ROW: tuple[Op, ...] = ("one_row",)
LOGITS: tuple[Op, ...] = ("logits", "float32_logits")
PREFILLS: tuple[Op, ...] = ("prefill", "short_prefill")
AS_PRODUCT = "(as the product)"  # no kernel's name: `PRODUCT` is computed, and SiLU, or the addition, by another kernel
ANY_NUMBER = (1, MANY)
SHORT = 2048  # tokens


class Operands(NamedTuple):
    """Describe all that a choice depends on except for the number of rows; sizes that do not apply are 0.

    Attributes:
        form: how the weight is stored; "heads": there is none, attention computes.
        card: what computes, see `card_of`.
        capability: the card's compute capability; None: no case for this form asks for it, or there is no card.
        dtype: of x and of the result.
        num_in, num_out: columns and rows of the weight.
        has_bias: a bias is added.
        is_fixed: a row of the result may not depend, by one bit, on the number of other rows.
        is_prepacked: on a CPU, the weight is laid out for oneDNN.
        group_size: inputs that share a scale, in a packed weight with several groups; 0: all inputs do.
        scale_bytes: of such a scale.
        is_e2m1: packed values are 4-bit floats.
        in_turns: gate and up of a packed weight lie in turns.
        is_e4m3: scaled values are 8-bit floats.
        has_blocks: scaled values have a scale for each block of 128 x 128.
        head_size, group, block_size: size of a head, query heads per KV head, tokens per KV block.
        has_soft_cap: scores are capped.
    """

    form: Form
    card: Card
    dtype: torch.dtype
    capability: tuple[int, int] | None = None
    num_in: int = 0
    num_out: int = 0
    has_bias: bool = False
    is_fixed: bool = False
    is_prepacked: bool = False
    group_size: int = 0
    scale_bytes: int = 0
    is_e2m1: bool = False
    in_turns: bool = False
    is_e4m3: bool = False
    has_blocks: bool = False
    head_size: int = 0
    group: int = 0
    block_size: int = 0
    has_soft_cap: bool = False


def card_of(device: torch.device) -> Card:
    """Return the card by which cases are told apart; whatever is no CPU takes a GPU's kernels, on meta tensors too."""
    return "cpu" if device.type == "cpu" else "hopper" if has_hopper(device) else "gpu"


# -- what a case may ask for: the docstrings are a column of docs/kernels.md ----------------------------------


def anything(it: Operands) -> bool:
    """always"""
    return True


def batch_invariant(it: Operands) -> bool:
    """with `batch_invariant`"""
    return it.is_fixed


def prepacked(it: Operands) -> bool:
    """the weight has 65,536 elements or more, and the CPU multiplies its dtype"""
    return it.is_prepacked


def in_tiles(it: Operands) -> bool:
    """inputs are a multiple of 8, outputs of 16"""
    return it.num_in % 8 == 0 and it.num_out % 16 == 0


def without_bias(it: Operands) -> bool:
    """no bias"""
    return not it.has_bias


def in_tiles_without_bias(it: Operands) -> bool:
    """inputs are a multiple of 8, outputs of 16; no bias"""
    return in_tiles(it) and not it.has_bias


def in_groups(it: Operands) -> bool:
    """inputs are a multiple of 8, outputs of 16; scales have 16 bits; groups are a multiple of 128 inputs, one per row,
    or, in bfloat16, 16, 32 or 64"""
    return not it.in_turns and _takes_groups(it)


def in_groups_in_turns(it: Operands) -> bool:
    """the same, and gate and up lie in turns"""
    return it.in_turns and _takes_groups(it)


def _takes_groups(it: Operands) -> bool:
    return in_tiles(it) and takes_groups(it.dtype, it.group_size, it.scale_bytes, it.is_e2m1)


def in_words(it: Operands) -> bool:
    """inputs and outputs are multiples of 16; blocks are of e4m3"""
    return it.num_in % 16 == 0 and it.num_out % 16 == 0 and (it.is_e4m3 or not it.has_blocks)


def row_in_words(it: Operands) -> bool:
    """inputs are a multiple of 16"""
    return it.num_in % 16 == 0


def in_library(it: Operands) -> bool:
    """inputs and outputs are multiples of 16; no blocks, except for those of e4m3 on a Hopper"""
    if it.capability is None:
        raise ValueError(f"what the library multiplies depends on the card's compute capability: {it}")
    return library_multiplies(it.capability, it.num_in, it.num_out, it.is_e4m3, it.has_blocks)


def decode_heads(it: Operands) -> bool:
    """heads of 64 or 128, at most 16 per KV head; KV blocks of a multiple of 16 tokens"""
    return takes_decode_heads(it.head_size, it.group, it.block_size)


def prefill_heads(it: Operands) -> bool:
    """heads of 64 or 128; 1, 2, 4, ... 64 per KV head; KV blocks of a multiple of 16 tokens; no soft cap"""
    return takes_prefill_heads(it.head_size, it.group, it.block_size) and not it.has_soft_cap


# -- the table ------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One line of the table: where all of it matches, `kernel` computes.

    Attributes:
        ops: the operations that it is for.
        rows: (fewest, most) of x.
        dtype: "16 bits": bfloat16 or float16.
        form, card: as in `Operands`; the card may be "any".
        fits: what else must hold.
        kernel: by a name of `KERNELS`, or several joined by " + "; or `AS_PRODUCT`.
        reason: why this one.
    """

    ops: tuple[Op, ...]
    rows: tuple[int, int]
    dtype: Literal["any", "16 bits"]
    form: Form
    card: Card
    fits: Callable[[Operands], bool]
    kernel: str
    reason: str

    @property
    def has_kernel(self) -> bool:
        """Return whether one kernel computes the operation; otherwise the product's does, and others do the rest."""
        return self.kernel != AS_PRODUCT

    def matches(self, op: Op, operands: Operands) -> bool:
        """Return whether this case applies, for some number of rows."""
        is_here = self.card in ("any", operands.card) or (self.card == "gpu" and operands.card == "hopper")
        is_here = is_here and op in self.ops and self.form == operands.form
        return is_here and (self.dtype == "any" or operands.dtype.itemsize == 2) and self.fits(operands)


CASES: tuple[Case, ...] = (
    # An unquantized weight.
    Case(PRODUCT + LOGITS, ANY_NUMBER, "any", "dense", "gpu", batch_invariant, "batch_invariant_gemm",
         "one tile shape for any number of rows, and no split of the inputs: every row is added up in one order"),
    Case(ADDED + GATED + ONE_ROW, ANY_NUMBER, "any", "dense", "gpu", batch_invariant, AS_PRODUCT,
         "the epilogues of the other kernels come with other orders of addition"),
    Case(PRODUCT + ADDED + GATED, (1, 256), "16 bits", "dense", "hopper", in_tiles, "hopper_linear",
         "reading the weight bounds it: weights are loaded before the previous kernel ends, results gated in the "
         "epilogue, or left in parts that the next norm adds up"),
    Case(PRODUCT + GATED, (1, 16), "any", "dense", "gpu", anything, "skinny_gemm",
         "split K and the epilogue beat the library up to 16 rows; at 32 it is a draw"),
    Case(ADDED, (1024, MANY), "any", "dense", "gpu", without_bias, "library_added",
         "adding as it writes spares the norm half of its bytes; for fewer rows the library splits K instead"),
    Case(GATED, (2048, MANY), "16 bits", "dense", "hopper", in_tiles_without_bias, "hopper_gated_linear",
         "the ungated result is never written; with fewer rows it depends on the tiles left for the last round"),
    Case(ONE_ROW, (1, 1), "any", "dense", "gpu", anything, "gemv",
         "norm, SiLU and residual are a part of the product: a layer is five kernels"),
    Case(ADDED + GATED + ONE_ROW, ANY_NUMBER, "any", "dense", "any", anything, AS_PRODUCT,
         "the library's product has no such prologue or epilogue"),
    Case(("logits",), (1, 1), "any", "dense", "gpu", anything, "gemv",
         "reading the matrix bounds it, as any product of one row"),
    Case(PRODUCT + LOGITS, ANY_NUMBER, "any", "dense", "cpu", prepacked, "onednn",
         "the weight lies in tiles that fit the inner loop: every thread reads one straight run of memory"),
    Case(PRODUCT + LOGITS, ANY_NUMBER, "any", "dense", "any", anything, "library",
         "with more rows arithmetic bounds a product, and cuBLAS is as fast as any kernel"),
    # A weight of 4 or 8 bits with scales for groups of inputs; x stays as it is.
    Case(PRODUCT + ADDED, (1, 256), "16 bits", "packed", "hopper", in_groups, "hopper_packed_linear",
         "values are dequantized on their way to the tensor cores, and the copy engine fetches them"),
    Case(GATED, (1, 256), "16 bits", "packed", "hopper", in_groups_in_turns, "hopper_packed_linear",
         "as a product; gate and up of an output meet in one thread"),
    Case(PRODUCT + GATED, (1, 256), "any", "packed", "any", anything, "packed_linear",
         "values are dequantized in registers: a quarter or half of the bytes are read"),
    Case(ADDED, (1, 256), "any", "packed", "gpu", anything, "packed_linear",
         "as a product, whose parts the next norm adds up"),
    Case(ADDED, (1024, MANY), "any", "packed", "gpu", without_bias, "dequantize + library_added",
         "as for an unquantized weight, once this one is dequantized"),
    Case(GATED, (2048, MANY), "16 bits", "packed", "hopper", in_tiles_without_bias, "dequantize + hopper_gated_linear",
         "as for an unquantized weight, once this one is dequantized"),
    Case(ONE_ROW, (1, 1), "any", "packed", "gpu", anything, "packed_gemv",
         "norm, SiLU and residual are a part of the product, as in `gemv`"),
    Case(ADDED + GATED + ONE_ROW, ANY_NUMBER, "any", "packed", "any", anything, AS_PRODUCT,
         "the library's product has no such prologue or epilogue"),
    Case(PRODUCT, ANY_NUMBER, "any", "packed", "any", anything, "dequantize + library",
         "arithmetic bounds it, so fewer bytes save nothing: the weight is dequantized once for all rows"),
    # A weight of 8 bits that tensor cores multiply; x is quantized, too.
    Case(PRODUCT + ADDED + GATED, (1, 256), "16 bits", "scaled", "hopper", in_words, "hopper_scaled_linear",
         "as `hopper_linear` with half of the bytes; the epilogue applies the scales"),
    Case(PRODUCT + GATED, (257, MANY), "16 bits", "scaled", "hopper", in_words, "hopper_scaled_mm",
         "scales and SiLU come before the result is written, which the library does in further kernels"),
    Case(ONE_ROW, (1, 1), "16 bits", "scaled", "hopper", in_words, AS_PRODUCT,
         "quantizing the row in every program takes longer than `hopper_scaled_linear` after a norm that quantizes"),
    Case(ONE_ROW, (1, 1), "any", "scaled", "gpu", row_in_words, "scaled_gemv",
         "norm, quantization, SiLU and residual are a part of the product"),
    Case(PRODUCT + GATED, (257, MANY), "any", "scaled", "gpu", in_library, "scaled_mm",
         "arithmetic bounds it, and the library has such a product"),
    Case(ADDED + ONE_ROW, ANY_NUMBER, "any", "scaled", "any", anything, AS_PRODUCT,
         "no kernel fuses more"),
    Case(PRODUCT + GATED, ANY_NUMBER, "any", "scaled", "any", anything, "scaled_linear",
         "the portable kernel takes any number of rows, any size and any scales"),
    # A weight of e4m3 alone; x stays as it is.
    Case(PRODUCT + GATED, ANY_NUMBER, "any", "fp8_weight_only", "any", anything, "scaled_linear",
         "each tile of the weight is dequantized on its way to the tensor cores"),
    Case(ONE_ROW, (1, 1), "any", "fp8_weight_only", "any", row_in_words, "scaled_linear",
         "with the norm before it and the addition after it as kernels of their own"),
    Case(ADDED + ONE_ROW, ANY_NUMBER, "any", "fp8_weight_only", "any", anything, AS_PRODUCT,
         "no kernel fuses more"),
    # The experts of a mixture, stacked.
    Case(("experts",), ANY_NUMBER, "any", "experts", "gpu", anything, "grouped_gemm",
         "one launch multiplies the tokens of all experts, however they are spread"),
    Case(("experts",), ANY_NUMBER, "any", "experts", "any", anything, "library",
         "a CPU goes from one expert to the next"),
    # Attention.
    Case(("decode",), (1, 1), "any", "heads", "gpu", anything, "fused_paged_decode",
         "norm, rotation and KV write are a part of it, and its programs leave room for the products around it"),
    Case(("decode",), (2, MANY), "16 bits", "heads", "hopper", decode_heads, "hopper_decode",
         "the same with fewer instructions per byte: it reads at 97% of the best bandwidth that such cards have had"),
    Case(("decode",), (1, 8), "any", "heads", "gpu", anything, "fused_paged_decode",
         "norm, rotation and KV write are a part of it; with more sequences two kernels are faster"),
    Case(("decode",), ANY_NUMBER, "any", "heads", "any", anything, "rope_kv_write + paged_decode",
         "keys are cut into equal splits that fill the card in one wave"),
    Case(("short_prefill",), (1, 512), "any", "heads", "gpu", anything, "rope_kv_write + paged_prefill",
         "launching takes longer than so little attention: 31 us on the host instead of 53"),
    Case(PREFILLS, ANY_NUMBER, "16 bits", "heads", "hopper", prefill_heads, "rope_kv_write + hopper_prefill",
         "one warp fetches tiles, and of two groups of warps one multiplies while the other computes its softmax"),
    Case(PREFILLS, ANY_NUMBER, "any", "heads", "any", anything, "rope_kv_write + paged_prefill",
         "the portable kernel, for the heads that the other does not take"),
)  # fmt: skip

# -- how it is read -------------------------------------------------------------------------------------------

_table = CASES  # what is read, see `replaced_table`


@contextmanager
def replaced_table(cases: tuple[Case, ...]) -> Iterator[None]:
    """Inside, kernels are chosen by other cases; what was bound before keeps its kernels."""
    global _table
    before, _table = _table, cases
    spans_of.cache_clear()
    try:
        yield
    finally:
        _table = before
        spans_of.cache_clear()


@cache
def spans_of(op: Op, operands: Operands) -> tuple[tuple[int, Case], ...]:
    """Return ((the most rows, the case that is taken up to them), ...), fewest rows first, for every number of rows.

    Raises:
        LookupError: some number of rows has no case.
    """
    cases = [case for case in _table if case.matches(op, operands)]
    spans: list[tuple[int, Case]] = []
    row, last = 1, 1 if op == "one_row" else MANY
    while row <= last:
        most = last
        for case in cases:
            first, end = case.rows
            if first <= row <= end:
                spans.append((min(most, end), case))
                break
            if row < first:
                most = min(most, first - 1)  # from there on, this case comes first
        else:
            raise LookupError(f"no kernel for {op} of {row} rows: {operands}")
        row = spans[-1][0] + 1
    return tuple(spans)


def case_of(op: Op, operands: Operands, num_rows: int) -> Case:
    """Return the case that is taken for a number of rows.

    Raises:
        LookupError: there is none.
    """
    return at(spans_of(op, operands), num_rows)


def bound(op: Op, operands: Operands, launches: Mapping[str, T]) -> tuple[tuple[int, T], ...]:
    """Return what a layer keeps: `spans_of`, with what launches each kernel in place of its case.

    Args:
        launches: by a case's `kernel`.

    Raises:
        LookupError: some number of rows has no case, or the layer cannot launch the kernel of one.
    """
    return tuple((most, launches[case.kernel]) for most, case in spans_of(op, operands))


def at(spans: tuple[tuple[int, T], ...], num_rows: int) -> T:
    """Return what is taken for a number of rows.

    Raises:
        LookupError: it is taken for fewer only.
    """
    for most, taken in spans:
        if num_rows <= most:
            return taken
    raise LookupError(f"{num_rows} rows, where at most {spans[-1][0]} are computed")
