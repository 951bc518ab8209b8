"""What is fixed before a step is asked, not found out again: what its graph holds, and which kernel attends."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from teachllm.layers.attention_backends import triton
from teachllm.layers.attention_backends.base import AttentionNeeds, AttentionSettings
from teachllm.layers.attention_backends.triton import TritonBackend
from teachllm.worker.gpu.attention_inputs import FlatBatch, GPUAttention
from teachllm.worker.gpu.cuda_graphs import FullKey
from teachllm_kernels.attention import decode_plan, hopper_decode, paged_decode
from teachllm_kernels.selection import CASES, MANY, Card, Case, anything, replaced_table

NEEDS = AttentionNeeds(16, 8, 128, "bfloat16", 16, frozenset({None}))


def test_a_graph_says_whether_it_samples() -> None:
    decodes = FullKey(num_seqs=2, num_tokens=2, decode_len=1, variant=(False, False), num_drafts=2)
    assert decodes.samples and not decodes._replace(variant=None).samples


def attention() -> GPUAttention:
    batch: Any = SimpleNamespace(device=torch.device("meta"), num_known=torch.zeros(4), tree=None)
    return GPUAttention(NEEDS, TritonBackend(), batch, decode_len=1)


@pytest.mark.parametrize(("card", "fused", "apart"), [("gpu", (1, 8), (9, 64)), ("hopper", (1, 2, 8, 9, 64), ())])
def test_decodes_are_fused_with_what_is_before_them_where_that_is_faster(
    card: Card, fused: tuple[int, ...], apart: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "card_of", lambda device: card)
    made = attention()
    assert all(made.kernel_of(count) != "paged_decode" for count in fused)
    assert all(made.kernel_of(count) == "paged_decode" for count in apart)
    assert made.kernel_of(1) == "fused_paged_decode"
    assert made.kernel_of(2) == ("hopper_decode" if card == "hopper" else "fused_paged_decode")


class Spy:
    """Stands for a kernel: a launch leaves its name."""

    def __init__(self, name: str, launched: list[str]) -> None:
        self.name, self.launched = name, launched

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda **arguments: self.launched.append(self.name)


@pytest.mark.parametrize("num_seqs", [1, 3])
@pytest.mark.parametrize("kernel", ["fused_paged_decode", "hopper_decode", "rope_kv_write + paged_decode"])
def test_the_table_decides_how_decodes_are_planned_and_attended_to(
    kernel: str, num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(("decode",), (1, MANY), "any", "heads", "any", anything, kernel, "a test says so")
    with replaced_table((case, *CASES)):
        made = attention()
    launched: list[str] = []
    for name in ("_plan_decode", "_paged_decode", "_hopper_decode"):
        module = {"_plan_decode": decode_plan, "_paged_decode": paged_decode, "_hopper_decode": hopper_decode}[name]
        monkeypatch.setattr(module, name, Spy(name, launched))
    monkeypatch.setattr(hopper_decode, "tile_map", lambda *_: None)
    monkeypatch.setattr(paged_decode, "shared_memory", lambda device: 227 << 10)
    monkeypatch.setattr(paged_decode, "launch_options", lambda device, maxnreg: {})
    with torch.device("meta"):
        of_seqs = torch.zeros(num_seqs, dtype=torch.int32)
        starts, ids = torch.zeros(num_seqs + 1, dtype=torch.int32), torch.zeros(num_seqs, dtype=torch.int64)
        cache = torch.zeros(2, 4, 16, 8, 128, dtype=torch.bfloat16)
        made._batch.block_tables = torch.zeros(num_seqs, 4, dtype=torch.int32)
        qkv, angles = torch.zeros(num_seqs, 32, 128, dtype=torch.bfloat16), torch.zeros(2, num_seqs, 1, 128)
    metadata = made.metadata(FlatBatch(ids, ids, ids, of_seqs, starts, of_seqs, num_decodes=num_seqs))
    assert metadata.is_fused == (kernel != "rope_kv_write + paged_decode")
    settings = AttentionSettings(scale=1.0)
    if metadata.is_fused:
        where = (*cache, metadata.block_tables, metadata.decode_plans[None], 1.0)
        paged_decode.fused_paged_decode(qkv, *angles, None, 1e-6, *where)
    else:
        triton.attend_decodes(qkv[:, :16], (cache[0], cache[1]), metadata, settings, torch.empty_like(qkv[:, :16]))
    assert launched == ["_plan_decode", "_hopper_decode" if kernel == "hopper_decode" else "_paged_decode"]


def test_an_unknown_kernel_for_decodes_is_refused() -> None:
    case = Case(("decode",), (1, MANY), "any", "heads", "any", anything, "hopper_prefill", "a test says so")
    with replaced_table((case, *CASES)), pytest.raises(LookupError, match="hopper_prefill"):
        attention()
