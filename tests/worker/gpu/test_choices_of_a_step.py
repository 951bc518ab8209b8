"""What is fixed before a step is asked, not found out again: what its graph holds, and which kernel attends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from teachllm.layers.attention_backends import triton
from teachllm.layers.attention_backends.base import AttentionNeeds
from teachllm.layers.attention_backends.triton import TritonBackend
from teachllm.worker.gpu.attention_inputs import GPUAttention
from teachllm.worker.gpu.cuda_graphs import FullKey
from teachllm_kernels import selection
from teachllm_kernels.selection import CASES, MANY, Card, Case, anything

NEEDS = AttentionNeeds(16, 8, 128, "bfloat16", 16, frozenset({None}))


def test_a_graph_says_whether_it_samples_and_whether_its_drafter_is_done() -> None:
    decodes = FullKey(num_seqs=2, num_tokens=2, decode_len=1, variant=(False, False), num_drafts=2)
    assert decodes.samples and decodes.settles_drafts
    assert decodes._replace(num_drafts=None).settles_drafts  # it asks for none
    prompts = decodes._replace(decode_len=0, num_drafts=None)
    assert prompts.samples and not prompts.settles_drafts
    with_logits = decodes._replace(variant=None)
    assert not with_logits.samples and not with_logits.settles_drafts


def attention() -> GPUAttention:
    batch: Any = SimpleNamespace(device=torch.device("meta"), num_known=torch.zeros(4), tree=None)
    return GPUAttention(NEEDS, TritonBackend(), batch, decode_len=1)


@pytest.mark.parametrize(("card", "fused", "apart"), [("gpu", (1, 8), (9, 64)), ("hopper", (1, 2, 8, 9, 64), ())])
def test_decodes_are_fused_with_what_is_before_them_where_that_is_faster(
    card: Card, fused: tuple[int, ...], apart: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "card_of", lambda device: card)
    made = attention()
    assert all(made._fuses(count) for count in fused) and not any(made._fuses(count) for count in apart)
    assert made.plans[None].on_hopper == (card == "hopper")


@pytest.mark.parametrize("kernel", ["fused_paged_decode", "hopper_decode", "rope_kv_write + paged_decode"])
def test_the_table_decides_how_decodes_are_attended_to(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(("decode",), (1, MANY), "any", "heads", "any", anything, kernel, "a test says so")
    monkeypatch.setattr(selection, "CASES", (case, *CASES))
    made = attention()
    assert made._fuses(3) == (kernel in ("fused_paged_decode", "hopper_decode"))
    assert made.plans[None].on_hopper == (kernel == "hopper_decode")
