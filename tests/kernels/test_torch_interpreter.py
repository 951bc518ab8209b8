"""Without Triton the attention kernels are interpreted on torch tensors, with the same results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from teachllm_kernels.torch_interpreter import MISSING, Kernel, tl
from tests.programs import run_program

COMPARE = """
import os, torch
from teachllm_kernels._triton import triton
from teachllm_kernels.attention.decode_plan import DecodePlan, plan_decode
from teachllm_kernels.attention.paged_attention import paged_attention_reference
from teachllm_kernels.attention.paged_decode import paged_decode_triton
assert triton.__class__.__module__ == "teachllm_kernels.torch_interpreter"
torch.manual_seed(0)
for lens, head_size, heads, kv_heads in (([60], 16, 4, 2), ([200, 33, 1], 16, 4, 2), ([300, 100], 32, 8, 4)):
    count = len(lens)
    q, (k, v) = torch.randn(count, heads, head_size), torch.randn(2, 40, 16, kv_heads, head_size)
    tables = torch.stack([torch.randperm(40) for _ in lens]).int()
    starts = torch.arange(count + 1, dtype=torch.int32)
    plan = DecodePlan.allocate(count, heads, kv_heads, head_size, q.device)
    plan_decode(plan, torch.tensor(lens, dtype=torch.int32), starts, starts[:-1], kv_heads)
    out = paged_decode_triton(q, k, v, tables, starts, plan, 0.2)
    exact = paged_attention_reference(q, k, v, tables, [1] * count, lens, 0.2)
    torch.testing.assert_close(out, exact, atol=1e-5, rtol=0)
    print(len(lens), "sequences in", int(plan.spans[:count, 1].sum()), "splits")
os.environ["TRITON_INTERPRET"] = "0"
try:
    paged_decode_triton(q, k, v, tables, starts, plan, 0.2)
except RuntimeError as error:
    print(error)
"""


def test_the_decode_kernel_computes_what_its_reference_does(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('there is none here')\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{COMPARE}"
    ran = run_program("-c", program, environment={"TRITON_INTERPRET": "1"})
    assert ran.returncode == 0, ran.stderr
    *compared, refused = ran.stdout.splitlines()
    assert compared[0] == "1 sequences in 1 splits" and len(compared) == 3
    assert int(compared[1].split()[3]) > 3  # so some are merged
    assert refused == MISSING  # without TRITON_INTERPRET


def ones(out_ptr, values_ptr, COUNT):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out_ptr + at, tl.load(values_ptr + at, mask=at < 5, other=7.0) + 1, mask=at < 6)


def test_loads_and_stores_heed_their_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    out = torch.zeros(8)
    Kernel(ones)[(2,)](out_ptr=out, values_ptr=torch.arange(5.0), COUNT=4, num_warps=4)
    assert out.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 8.0, 0.0, 0.0]


def test_an_operation_that_it_does_not_know_is_named() -> None:
    with pytest.raises(RuntimeError, match="does not know 'histogram'"):
        tl.histogram(0)
