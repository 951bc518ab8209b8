"""The table alone chooses: whatever kernel it names for an operation is launched, and a layer looks it up once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from teachllm.layers import embedding, moe
from teachllm.layers.attention_backends import triton
from teachllm.layers.attention_backends.triton import TritonBackend
from teachllm.layers.embedding import Embedding
from teachllm.layers.linear import Linear
from teachllm.layers.moe import Experts
from teachllm.layers.norm import RMSNorm
from teachllm.layers.weights import base, cpu_scaled_weight, dense_weight, gpu_grouped_weight, gpu_scaled_weight
from teachllm.layers.weights.cpu_scaled_weight import CPUScaledWeight
from teachllm.layers.weights.dense_weight import DenseWeight
from teachllm.layers.weights.gpu_grouped_weight import GPUGroupedWeight
from teachllm.layers.weights.gpu_scaled_weight import GPUScaledWeight
from teachllm.layers.weights.quantized_weights import Activations, GroupedWeight, ScaledWeight
from teachllm_kernels import selection
from teachllm_kernels.kernel_list import KERNELS
from teachllm_kernels.selection import AS_PRODUCT, CASES, MANY, Case, Form, Op, anything, case_of, replaced_table
from tests.layers.attention_backends.attention_cases import FULL, Batch

NUM_IN, NUM_OUT, DTYPE = 256, 64, torch.bfloat16
NOWHERE = torch.device("meta")
# What a kernel is called where weights launch it; the others have the name of the table, with or without `_triton`.
FUNCTIONS = {
    "library": ("linear_reference",),
    "library_added": ("addmm_",),
    "onednn": ("packed_linear",),
    "grouped_gemm": ("grouped_gated_triton", "grouped_down_triton"),
}


def functions(kernel: str, form: Form) -> list[str]:
    """What is called, in this order, where the table says `kernel`."""
    if form == "fp8_weight_only":
        return ["weight_only_triton"]
    if form == "experts" and kernel == "library":
        return ["grouped_gated_reference", "grouped_down_reference"]
    found: list[str] = []
    for name in kernel.split(" + "):
        found += FUNCTIONS.get(name, (name if name.startswith("hopper") or name == "scaled_mm" else f"{name}_triton",))
    return found


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that were launched; none computes anything."""
    found: list[str] = []

    def spy(name: str) -> Callable[..., Any]:
        def launch(*given: Any, **how: Any) -> Any:
            found.append(name)
            if name == "dequantize_triton":
                return torch.empty(NUM_OUT, NUM_IN, dtype=DTYPE, device=NOWHERE)
            return torch.empty(5, NUM_OUT, dtype=DTYPE, device=NOWHERE)

        return launch

    for module in (dense_weight, gpu_grouped_weight, gpu_scaled_weight, embedding, cpu_scaled_weight, moe, base):
        for name in set(vars(module)):
            if name.endswith(("_triton", "_reference")) or name.startswith(("hopper_", "scaled_mm", "packed_linear")):
                monkeypatch.setattr(module, name, spy(name))
    for kernel, function in dense_weight.PRODUCTS.items():
        monkeypatch.setitem(dense_weight.PRODUCTS, kernel, spy(function.__name__))  # type: ignore[arg-type]
    monkeypatch.setattr(base, "silu_and_mul", spy("silu_and_mul"))
    monkeypatch.setattr(torch.Tensor, "addmm_", spy("addmm_"))
    monkeypatch.setattr(gpu_scaled_weight, "quantize_rows", lambda x, *how: gpu_scaled_weight.QuantizedRows(x, x))
    monkeypatch.setattr(gpu_scaled_weight, "capability", lambda device: (9, 0))
    return found


def made(form: Form) -> Any:
    """A weight of this form, or a layer that stands for one."""
    values = torch.empty(NUM_OUT, NUM_IN, dtype=torch.uint8, device=NOWHERE)
    scales = torch.empty(NUM_OUT, 1, dtype=DTYPE, device=NOWHERE)
    if form == "dense":
        weight = DenseWeight(torch.empty(NUM_OUT, NUM_IN, dtype=DTYPE, device=NOWHERE))
        weight.packed = torch.empty(0)  # for the launch that reads it
        return weight
    if form == "packed":
        return GPUGroupedWeight(GroupedWeight(values, scales, None, 8), DTYPE)
    if form == "experts":
        with NOWHERE:
            return Experts(NUM_IN, range(2), NUM_OUT)
    how = Activations.UNQUANTIZED if form == "fp8_weight_only" else Activations.BY_TOKEN
    return GPUScaledWeight(ScaledWeight(values.view(torch.float8_e4m3fn), scales.float(), how), DTYPE)


def run(weight: Any, op: Op, num_rows: int) -> None:
    x = torch.empty(num_rows, NUM_IN, dtype=DTYPE, device=NOWHERE)
    if op == "one_row":
        weight.one_row(x, None)
    elif op == "add_to_residual":
        weight.add_to_residual(x.new_empty(num_rows, NUM_OUT), x, None)
    elif op == "experts":
        weight(x, moe.Routes(torch.zeros(0), torch.zeros(0)))
    elif op in ("logits", "float32_logits"):
        with NOWHERE:
            head = Embedding(NUM_OUT, NUM_IN)
        head.packed = torch.empty(0)
        head.logits(x, in_float32=op == "float32_logits")
    else:
        getattr(weight, op)(x, None)


PRODUCTS = [
    (op, form, kernel)
    for op, form, kernel in sorted({(op, case.form, case.kernel) for case in CASES for op in case.ops})
    if form != "heads"
]


@pytest.mark.parametrize(("op", "form", "kernel"), PRODUCTS)
def test_a_layer_launches_what_the_table_names(op: Op, form: Form, kernel: str, launched: list[str]) -> None:
    case = Case((op,), (1, MANY), "any", form, "any", anything, kernel, "a test says so")
    with replaced_table((case, *CASES)):
        run(made(form), op, 1 if op == "one_row" else 5)
    if kernel == AS_PRODUCT:
        product = functions(case_of("product", made(form).operands, 1).kernel, form)
        assert launched == [*product, *(["silu_and_mul"] if op == "gated" else [])]
    else:
        routing = ["group_triton", "combine_triton", "group_reference", "combine_reference"]
        assert [name for name in launched if name not in routing] == functions(kernel, form)


def test_every_kernel_of_the_table_is_launched_by_some_layer() -> None:
    tried = {name for _, _, kernel in PRODUCTS if kernel != AS_PRODUCT for name in kernel.split(" + ")}
    assert {name for name, kernel in KERNELS.items() if kernel.group != "attention"} - tried == {"rope_kv_write"}


def test_a_finished_weight_does_not_read_the_table_again(launched: list[str]) -> None:
    layer = Linear(NUM_IN, {"gate": NUM_OUT}).to("meta", DTYPE)
    with replaced_table(()):
        for num_rows, kernel in ((16, "skinny_gemm_triton"), (17, "linear_reference")):
            launched.clear()
            layer(torch.empty(num_rows, NUM_IN, dtype=DTYPE, device=NOWHERE))
            assert launched == [kernel]
        with pytest.raises(LookupError, match="no kernel for product of 1 rows"):
            layer.finish()


def test_what_is_set_before_or_after_a_weight_is_finished_counts(launched: list[str]) -> None:
    layer = Linear(NUM_IN, {"o_proj": NUM_OUT}).to("meta", DTYPE)
    x = torch.empty(5, NUM_IN, dtype=DTYPE, device=NOWHERE)
    for is_fixed, kernel in ((True, "batch_invariant_gemm_triton"), (False, "skinny_gemm_triton")):
        layer.weight.is_fixed = is_fixed  # type: ignore[assignment]
        for _ in range(2):
            launched.clear()
            layer(x)
            assert launched == [kernel] and layer.fuses_one_row != is_fixed
            layer.finish()


def test_a_weight_on_a_cpu_multiplies_as_the_table_says_of_floats(
    launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values, scales = torch.zeros(NUM_OUT, NUM_IN, dtype=torch.int8), torch.ones(NUM_OUT, 1)
    for is_packed, kernel in ((True, "packed_linear"), (False, "linear_reference")):
        monkeypatch.setattr(cpu_scaled_weight, "pays_to_pack", lambda weight, is_packed=is_packed: is_packed)
        monkeypatch.setattr(CPUScaledWeight, "_rows", lambda *_: gpu_scaled_weight.QuantizedRows(values[:5], scales))
        weight = CPUScaledWeight(ScaledWeight(values, scales), torch.float32)
        launched.clear()
        with pytest.raises(RuntimeError):  # of what the spy returned
            weight.product(torch.empty(5, NUM_IN), None)
        assert launched == [kernel]


@pytest.mark.parametrize("op", selection.PREFILLS)
@pytest.mark.parametrize("kernel", ["rope_kv_write + hopper_prefill", "rope_kv_write + paged_prefill"])
def test_prompts_are_attended_to_as_the_table_says(op: Op, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((op,), (1, MANY), "any", "heads", "any", anything, kernel, "")
    used: list[str] = []
    monkeypatch.setattr(triton, "plan_prefill", lambda *where: "plan")
    monkeypatch.setattr(triton, "hopper_prefill", lambda *where: used.append("rope_kv_write + hopper_prefill"))
    monkeypatch.setattr(
        triton, "paged_prefill_triton", lambda *where, **how: used.append("rope_kv_write + paged_prefill")
    )
    batch = Batch([(9, 0)])
    if op == "prefill":  # in a graph
        batch.metadata.query_lens = batch.metadata.kv_lens = []
    with replaced_table((case,)):
        TritonBackend().attend(batch.q, batch.k, batch.v, batch.kv_cache, batch.metadata, FULL)
    assert used == [kernel]


def test_a_kernel_that_prompts_cannot_take_is_refused() -> None:
    batch = Batch([(9, 0)])
    case = Case(("short_prefill",), (1, MANY), "any", "heads", "any", anything, "hopper_decode", "")
    with replaced_table((case,)), pytest.raises(LookupError, match="hopper_decode"):
        TritonBackend().attend(batch.q, batch.k, batch.v, batch.kv_cache, batch.metadata, FULL)


def test_one_row_takes_the_norm_along_only_where_a_kernel_does(launched: list[str]) -> None:
    weight = made("packed")
    norm = RMSNorm(NUM_IN, eps=1e-6).to("meta")
    weight.one_row(torch.empty(1, NUM_IN, device=NOWHERE), None, norm)
    assert launched == ["packed_gemv_triton"] and weight.fuses_one_row


def test_a_layer_fuses_one_row_where_the_table_names_a_kernel_even_if_it_launches_the_same() -> None:
    assert made("fp8_weight_only").fuses_one_row
    case = Case(("one_row",), (1, 1), "any", "fp8_weight_only", "any", anything, AS_PRODUCT, "a test says so")
    with replaced_table((case, *CASES)):
        assert not made("fp8_weight_only").fuses_one_row


def test_what_has_moved_to_another_device_takes_the_kernels_of_that_device() -> None:
    for layer in (DenseWeight(torch.zeros(NUM_OUT, NUM_IN)), Embedding(NUM_OUT, NUM_IN), Experts(8, range(2), 8)):
        assert layer.operands.card == "cpu"
        layer.to("meta", DTYPE)
        assert (layer.operands.card, layer.operands.dtype) == ("gpu", DTYPE)


@pytest.mark.parametrize("make", [lambda: Linear(NUM_IN, {"o_proj": NUM_OUT}), lambda: Embedding(NUM_OUT, NUM_IN)])
def test_what_is_loaded_by_assignment_takes_the_kernels_of_its_new_device(make: Callable[[], nn.Module]) -> None:
    with NOWHERE:
        layer = make()
    bound = layer.weight if isinstance(layer, Linear) else layer
    assert bound.operands.card == "gpu"  # type: ignore[union-attr]
    layer.load_state_dict({name: torch.zeros(x.shape) for name, x in layer.state_dict().items()}, assign=True)
    assert bound.operands.card == "cpu"  # type: ignore[union-attr]


def test_no_row_is_fused_on_a_cpu() -> None:
    large, small = (DenseWeight(torch.ones(size, 256)) for size in (256, 16))
    for weight in (large, small):
        weight.finish()
        assert not weight.fuses_one_row
        assert torch.equal(weight.one_row(torch.ones(1, 256), None), torch.full((1, weight.num_out), 256.0))
    assert large.packed is not None and small.packed is None


def test_what_is_finished_says_that_it_has_no_tensors_of_a_checkpoint_any_more() -> None:
    layer = Linear(256, {"o_proj": 256})
    assert [name for name, _ in layer.checkpoint_tensors("attn.o_proj")] == ["attn.o_proj.weight"]
    layer.finish()
    with pytest.raises(RuntimeError, match=r"^attn\.o_proj is finished: "):
        list(layer.checkpoint_tensors("attn.o_proj"))
