"""Write docs/kernels.md: the table of `teachllm_kernels/selection.py` as a page.

    PYTHONPATH=kernels python docs/make_kernel_page.py

`tests/kernels/test_selection.py` compares the page with the table.
"""

from __future__ import annotations

from pathlib import Path

from teachllm_kernels.kernel_list import KERNELS
from teachllm_kernels.selection import CASES, MANY, Case, Form, Op, anything

PAGE = Path(__file__).with_name("kernels.md")
_INTRO = """\
# Which kernel runs

This page is the table of [`selection.py`](../kernels/teachllm_kernels/selection.py), written by
`docs/make_kernel_page.py`. A case is taken if all of it matches and no case above it in its section does. A weight
looks its cases up once, when it is finished, and attention once per step; a call then compares its number of rows, the
tokens of the step, with a short list. So what multiplies 64 rows by an fp8 weight on an H100 is in the first line of
"8 bits, of weight and input" that has "product" and 64 rows in it.

Cards are "Hopper" (H100, H200), "any GPU" (Hopper included) and "CPU". What is measured was measured on an H200, see
[benchmarks/NOTES.md](../benchmarks/NOTES.md); what runs elsewhere is tested, but was not timed on such a card.
"""
_END = """\

Which backend computes attention is a setting, see [gpu.md](gpu.md#attention-backends): the last section is the backend
`triton`. `sdpa` leaves whole prompts of 4,096, 5,120, 6,144, ... tokens to cuDNN. A model that runs through
transformers has its decodes unfused.

The table has no case where nothing is to choose:

- Decodes beside prompts, or of several tokens each, are computed by
  [`paged_decode`](../kernels/teachllm_kernels/attention/paged_decode.py), after `rope_kv_write`.
- A layer that caps its scores computes decodes that were planned for `hopper_decode` by `fused_paged_decode`: layers
  with and without a cap share a plan.
- With `batch_invariant` the backend is `invariant`: it gives every token to
  [`paged_prefill`](../kernels/teachllm_kernels/attention/paged_prefill.py), which takes the keys from the first on in
  tiles of one size.
- On a CPU the backend is `reference`: [`paged_attention`](../kernels/teachllm_kernels/attention/paged_attention.py)
  computes rectangles of the batch as PyTorch's matrix products.
"""
_SECTIONS: dict[Form, str] = {
    "dense": "Unquantized weights",
    "packed": "4 or 8 bits with scales of groups, weight only (int4, FP4, GPTQ, AWQ)",
    "scaled": "8 bits, of weight and input (int8, fp8)",
    "fp8_weight_only": "8 bits, weight only (fp8)",
    "experts": "Experts of a mixture",
    "heads": "Attention, with its KV write",
}
_OPS: dict[Op, str] = {
    "product": "product",
    "add_to_residual": "added to the residual",
    "gated": "gate and up",
    "one_row": "a layer's one row",
    "logits": "logits to sample from",
    "float32_logits": "logits to return",
    "experts": "gate, up and down",
    "decode": "decodes alone",
    "prefill": "prompts in a graph, or with a sequence of more than 2,048 tokens",
    "short_prefill": "other prompts",
}
_CARDS = {"any": "any", "cpu": "CPU", "gpu": "any GPU", "hopper": "Hopper"}
_AFTER: dict[Op, str] = {
    "add_to_residual": "the product's; the next norm adds",
    "gated": "the product's, then `silu_and_mul`",
    "one_row": "norm, then the product's",
}


def page() -> str:
    """Return the page."""
    parts = [_INTRO]
    for form, title in _SECTIONS.items():
        unit = "sequences or prompt tokens" if form == "heads" else "rows"
        parts.append(f"\n## {title}\n\n| | {unit} | card | if | kernel | why |\n|---|---|---|---|---|---|\n")
        parts += [_line(case) for case in CASES if case.form == form]
    return "".join([*parts, _END])


def _line(case: Case) -> str:
    condition = [] if case.fits is anything else [" ".join((case.fits.__doc__ or "").split())]
    if case.dtype != "any":
        condition.insert(0, "bfloat16 or float16")
    ops = "; ".join(_OPS[op] for op in case.ops)
    cells = (ops, _rows(case.rows), _CARDS[case.card], "; ".join(condition), _kernel(case), case.reason)
    return f"| {' | '.join(cells)} |\n"


def _rows(rows: tuple[int, int]) -> str:
    first, last = rows
    if last == MANY:
        return "any" if first == 1 else f"{first:,} and more"
    return str(first) if first == last else f"{first:,} to {last:,}"


def _kernel(case: Case) -> str:
    if not case.has_kernel:
        return "; or ".join(_AFTER[op] for op in case.ops)
    names = case.kernel.split(" + ")
    files = {name: KERNELS[name].file for name in names}
    return " + ".join(
        f"`{name}`" if file is None else f"[`{name}`](../kernels/teachllm_kernels/{file})"
        for name, file in files.items()
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
