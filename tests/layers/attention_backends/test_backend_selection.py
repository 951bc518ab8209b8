"""Which attention backend is chosen, which kernel it launches, and what a backend cannot do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from teachllm.layers.attention_backends import triton
from teachllm.layers.attention_backends.base import AttentionSettings
from teachllm.layers.attention_backends.sdpa import SDPABackend
from teachllm.layers.attention_backends.selection import select_backend
from teachllm.layers.attention_backends.triton import TritonBackend
from teachllm_kernels.selection import Operands
from tests.kernels.cases import ON_GPU
from tests.layers.attention_backends.attention_cases import FULL, NEEDS, Batch, absent, stand_in

pytestmark = [pytest.mark.gpu] if ON_GPU else []
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def put_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose kernels as for 16-bit heads on a Hopper, wherever the tensors lie."""

    def heads_of(device: torch.device, dtype: torch.dtype, *sizes: int, has_soft_cap: bool = False) -> Operands:
        head_size, group, block_size = sizes
        shape = {"head_size": head_size, "group": group, "block_size": block_size}
        return Operands("heads", "hopper", torch.bfloat16, has_soft_cap=has_soft_cap, **shape)

    monkeypatch.setattr(triton, "heads_of", heads_of)


@pytest.mark.parametrize("odd", [{}, {"head_size": 96}, {"num_kv_heads": 5, "num_heads": 15}, {"block_size": 8}])
def test_the_fastest_that_suits_is_chosen_by_itself(odd: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "card_of", lambda device: "hopper")
    chosen = select_backend(None, replace(NEEDS, **odd), GPU)
    assert type(chosen) is (SDPABackend if odd else TritonBackend)
    monkeypatch.setattr(triton, "card_of", lambda device: "gpu")
    assert select_backend(None, NEEDS, CPU).name == "reference"
    assert select_backend(None, NEEDS, GPU).name == "sdpa"
    assert select_backend(None, replace(NEEDS, windows=frozenset({None, 100})), GPU).name == "sdpa"
    for odd in (
        {"dtype": "float32"},
        {"windows": frozenset({100})},
        {"has_soft_cap": True},
        {"has_quantized_kv": True},
    ):
        assert select_backend(None, replace(NEEDS, **odd), GPU).name == "triton"
    assert select_backend(None, NEEDS, GPU, batch_invariant=True).name == "invariant"
    assert type(select_backend("triton", NEEDS, GPU)) is TritonBackend


def test_a_package_that_is_chosen_says_that_there_are_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=lambda *_: None)
    with pytest.warns(UserWarning, match="^attention_backend='flash_attn' .* running without CUDA graphs$"):
        assert not select_backend("flash_attn", NEEDS, GPU).in_graphs


@pytest.mark.parametrize(
    ("name", "changes", "device", "says"),
    [
        ("triton", {}, "cpu", "needs a GPU: use attention_backend=reference on a CPU"),
        ("reference", {}, "cuda", "computes on a CPU: use attention_backend=triton, or device=cpu"),
        (None, {"head_size": 33}, "cuda", "heads of 33: .*; use device=cpu"),
        ("sdpa", {"head_size": 8}, "cuda", "heads of 8: .*; use device=cpu"),
        ("sdpa", {"dtype": "float32"}, "cuda", "runs in float32: use attention_backend=triton"),
        ("sdpa", {"windows": frozenset({64})}, "cuda", "every layer of this model has a window: use .*=triton"),
        ("sdpa", {"has_soft_cap": True}, "cuda", "has no soft cap, .*: use attention_backend=triton"),
        ("sdpa", {"has_quantized_kv": True}, "cuda", "kv_cache_dtype rounded them: use attention_backend=triton"),
        ("flash_attn", {"has_quantized_kv": True}, "cuda", "set kv_cache_dtype=auto, or use attention_backend=triton"),
        ("flashinfer", {"has_quantized_kv": True}, "cuda", "set kv_cache_dtype=auto, or use attention_backend=triton"),
        ("flash_attn", {"dtype": "float32"}, "cuda", "set dtype=bfloat16, or use attention_backend=triton"),
        ("flash_attn", {"head_size": 36}, "cuda", "a multiple of 8 up to 256, not of 36: use .*=triton"),
        ("flash_attn", {}, "cuda", "takes no blocks of 16 tokens: set block_size=256, or use .*=triton"),
        ("flashinfer", {"dtype": "float32"}, "cuda", "set dtype=bfloat16, or use attention_backend=triton"),
        ("flashinfer", {"head_size": 96}, "cuda", "takes heads of 64, 128, 256, not of 96: use .*=triton"),
    ],
)
def test_what_a_backend_cannot_do_is_refused_with_what_would_work(
    name: str | None, changes: dict[str, Any], device: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent(monkeypatch, "flash_attn_interface")
    stand_in(monkeypatch, "flash_attn")
    stand_in(monkeypatch, "flashinfer")
    with pytest.raises(ValueError, match=says) as refused:
        select_backend(name, replace(NEEDS, **changes), torch.device(device))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["flash_attn", "flashinfer"])
def test_a_package_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, "flash_attn_interface", "flash_attn", "flashinfer")
    with pytest.raises(ValueError, match=f"{name}' needs .* not installed: pip install .*, or use .*=triton"):
        select_backend(name, NEEDS, GPU)


def test_prompts_side_by_side_have_a_plan_that_all_layers_share(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    used: list[tuple[int, int]] = []
    put_on_hopper(monkeypatch)
    monkeypatch.setattr(triton, "SHORT", 0)
    monkeypatch.setattr(triton, "plan_prefill", lambda starts, *rest: made.append(len(starts) - 1) or made[-1])
    monkeypatch.setattr(triton, "hopper_prefill", lambda q, k, v, tables, plan, *rest: used.append((len(q), plan)))
    batch = Batch([(7, 0), (40, 0), (5, 0)])
    starts = batch.metadata.query_start
    for _ in range(2):  # layers; some see a long prompt apart, others, with a window, all of them at once
        for requests, end in ((slice(0, 1), 7), (slice(0, 3), 52)):
            where = (batch.kv_cache, batch.metadata, FULL, requests, starts[: requests.stop + 1])
            triton.attend_prompts(batch.q[:end], *where, torch.empty_like(batch.q[:end]))
    assert made == [1, 3] and used == [(7, 1), (52, 3)] * 2


def test_padding_alone_behind_decodes_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for launch in ("plan_prefill", "hopper_prefill", "paged_prefill_triton"):
        monkeypatch.setattr(triton, launch, lambda *where: pytest.fail("there are no prompts"))
    batch = Batch([(1, 20), (1, 3), (5, 0)]).plan_decodes()
    batch.metadata.query_lens, batch.metadata.kv_lens = [1, 1], [21, 4]  # the third one is padding
    TritonBackend().attend(batch.q, batch.k, batch.v, batch.kv_cache, batch.metadata, FULL)


@pytest.mark.parametrize(
    ("sizes", "in_graph", "settings", "on_hopper"),
    [
        ([(512, 0)], False, FULL, False),
        ([(512, 0)], True, FULL, True),
        ([(512, 0)], True, replace(FULL, soft_cap=5.0), False),
        ([(200, 0), (313, 0)], False, FULL, True),
        ([(9, 0), (7, 2042)], False, FULL, True),
        ([(9, 0), (7, 2041)], False, FULL, False),
    ],
    ids=["quick", "in a graph", "soft cap", "many queries", "many keys", "quick too"],
)
def test_what_is_quick_takes_the_kernel_that_is_launched_quickly(
    sizes: list[tuple[int, int]], in_graph: bool, settings: AttentionSettings, on_hopper: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    used: list[str] = []
    put_on_hopper(monkeypatch)
    monkeypatch.setattr(triton, "plan_prefill", lambda *where: "plan")
    monkeypatch.setattr(triton, "hopper_prefill", lambda *where: used.append("hopper"))
    monkeypatch.setattr(triton, "paged_prefill_triton", lambda *where, **how: used.append("portable"))
    batch = Batch(sizes)
    if in_graph:
        batch.metadata.query_lens = batch.metadata.kv_lens = []
    for _ in range(2):
        TritonBackend().attend(batch.q, batch.k, batch.v, batch.kv_cache, batch.metadata, settings)
    assert used == 2 * ["hopper" if on_hopper else "portable"]
