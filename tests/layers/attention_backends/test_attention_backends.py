"""Each way to compute attention gives what the definition gives, or refuses in one line.

The packages that are not part of any install are stood in for by modules with their functions' signatures, so that
what is tested is what they are handed; `test_installed_packages_agree` runs the real ones where they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from teachllm.layers.attention_backends import sdpa, triton
from teachllm.layers.attention_backends.base import AttentionSettings
from teachllm.layers.attention_backends.flash_attn import FlashAttnBackend
from teachllm.layers.attention_backends.flashinfer import FlashInferBackend
from teachllm.layers.attention_backends.invariant import InvariantBackend
from teachllm.layers.attention_backends.reference import REFERENCE
from teachllm.layers.attention_backends.triton import TritonBackend
from teachllm_kernels.attention import decode_plan
from teachllm_kernels.attention.paged_attention import paged_attention_reference
from teachllm_kernels.selection import case_of
from tests.kernels.cases import DEVICE, ON_GPU, pairs, per_device
from tests.layers.attention_backends.attention_cases import (
    BLOCK_SIZE,
    DTYPE,
    FULL,
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    NEEDS,
    Batch,
    absent,
    stand_in,
)

pytestmark = [pytest.mark.gpu] if ON_GPU else []

# (query length, context): decodes first, then chunks of prompts.
MIXED = per_device([(1, 20), (1, 16), (5, 0), (9, 12)], [(1, 40), (1, 16), (5, 0), (20, 12), (1, 0), (33, 60)])
DECODES = per_device([(1, 40), (1, 16)], [(1, 40), (1, 16), (1, 99)])
PROMPTS = per_device([(9, 0), (12, 0)], [(20, 0), (48, 0)])


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:  # an interpreted program costs milliseconds even if it has nothing to do
        monkeypatch.setattr(decode_plan, "_MULTIPROCESSORS", 1)


@pytest.fixture(params=per_device([True], [True, False]), ids=lambda few: "few queries" if few else "hopper_prefill")
def prompts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the kernel for prompts: the one for as few as there are here, or, on a Hopper, the one for many."""
    if not request.param:
        heads = triton.heads_of(DEVICE, DTYPE, HEAD_SIZE, HEADS // KV_HEADS, BLOCK_SIZE)
        if "hopper_prefill" not in case_of("prefill", heads, 1).kernel:
            pytest.skip("needs a Hopper GPU")
        monkeypatch.setattr(triton, "SHORT", 0)


@pytest.mark.usefixtures("prompts")
@pytest.mark.parametrize(
    ("sizes", "window"), [(MIXED, 10), (DECODES, 30), (PROMPTS, None), *per_device([], [(MIXED, None), (PROMPTS, 30)])]
)
def test_kernels_of_this_project(sizes: list[tuple[int, int]], window: int | None) -> None:
    settings = replace(FULL, window=window)
    Batch(sizes, window=window).plan_decodes().check(TritonBackend(), settings)
    Batch(sizes).check(InvariantBackend(), settings)


@pytest.mark.usefixtures("prompts")
@pytest.mark.parametrize(
    ("sizes", "kv_dtype"), [(MIXED, torch.float8_e4m3fn), (DECODES, torch.int8)], ids=["fp8", "int8"]
)
def test_kernels_of_this_project_read_what_is_stored(sizes: list[tuple[int, int]], kv_dtype: torch.dtype) -> None:
    """They do for the step's own tokens, too: `Batch.k` and `Batch.v` are not what the cache holds."""
    Batch(sizes, kv_dtype=kv_dtype).plan_decodes().check(TritonBackend(), FULL)
    Batch(sizes, kv_dtype=kv_dtype).check(InvariantBackend(), FULL)
    if not ON_GPU:
        batch = Batch(sizes, kv_dtype=kv_dtype)
        batch.metadata.block_tables = batch.metadata.block_tables[batch.metadata.rows.long()]  # type: ignore[union-attr]
        batch.metadata.rows = torch.arange(len(sizes), dtype=torch.int32)
        batch.check(REFERENCE, FULL)


LONG_STEPS = {
    "alone": [(24, 0)],
    "after decodes": [(1, 20), (1, 3), (24, 0)],
    "after a short prompt": [(1, 20), (7, 5), (24, 0)],
    "before a short prompt": [(24, 0), (7, 5), (9, 0)],
    "several": [(1, 20), (24, 0), (3, 0), (16, 0), (32, 0)],
    "beside others as long": [(1, 20), (17, 0), (24, 0), (24, 8), (24, 0)],
}


@pytest.fixture
def long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let prompts of 16 tokens be long, and multiples of 8 round."""
    monkeypatch.setattr(sdpa, "_LONG_PROMPT", 16)
    monkeypatch.setattr(sdpa, "_ROUND", 8)


@pytest.mark.usefixtures("prompts", "long_prompts")
@pytest.mark.parametrize("sizes", LONG_STEPS.values(), ids=LONG_STEPS.keys())
def test_long_prompts_go_to_pytorch_wherever_they_stand(
    sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = sdpa._attend_long

    def counted(*args: Any) -> torch.Tensor:
        calls.append(args[0].shape[0])
        return real(*args)

    monkeypatch.setattr(sdpa, "_attend_long", counted)
    Batch(sizes).plan_decodes().check(sdpa.SDPABackend(), FULL)
    assert calls == 2 * [n for n, context in sizes if n in (16, 24, 32) and not context]


@pytest.mark.usefixtures("long_prompts")
@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ([(1, 9), (24, 8)], FULL),
        ([(20, 0)], FULL),
        ([(8, 0)], FULL),
        ([(24, 0)], replace(FULL, window=20)),
        ([(24, 0)], replace(FULL, soft_cap=5.0)),
    ],
    ids=["context", "a length of its own", "short", "window", "soft cap"],
)
def test_a_prompt_that_pytorch_is_no_faster_for_stays_with_the_kernels(
    sizes: list[tuple[int, int]], settings: AttentionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "_attend_long", lambda *_: pytest.fail("PyTorch's attention was asked"))
    Batch(sizes, window=settings.window).plan_decodes().check(sdpa.SDPABackend(), settings)


def attend(
    q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], tables: torch.Tensor, query_lens: list[int],
    kv_lens: list[int], scale: float, left: int, soft_cap: float,
) -> torch.Tensor:  # fmt: skip
    window = None if left < 0 else left + 1
    return paged_attention_reference(q, *caches, tables, query_lens, kv_lens, scale, window, soft_cap or None)


def lengths(starts: torch.Tensor) -> list[int]:
    assert starts.dtype == torch.int32 and starts.is_contiguous()
    return starts.diff().tolist()


def flash_attn_3_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
):  # fmt: skip
    assert causal and k is None and page_table.dtype == cache_seqlens.dtype == torch.int32
    query_lens = lengths(cu_seqlens_q)
    assert max_seqlen_q == max(query_lens) and window_size[1] in (-1, 0)
    where = (page_table, query_lens, cache_seqlens.tolist())
    return attend(q, (k_cache, v_cache), *where, softmax_scale, window_size[0], softcap)


def flash_attn_2_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
):  # fmt: skip
    assert causal and k_cache.shape[1] % 256 == 0 and q.shape[1] == 1
    where = (block_table, [1] * len(q), cache_seqlens.tolist())
    result = attend(q[:, 0], (k_cache, v_cache), *where, softmax_scale, window_size[0], softcap)
    return result.unsqueeze(1)


def flash_attn_2_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    query_lens, kv_lens = lengths(cu_seqlens_q), lengths(cu_seqlens_k)
    assert causal and k.shape[1] % 256 == 0 and cu_seqlens_q[0] == 0 and cu_seqlens_q[-1] == len(q)
    assert (max_seqlen_q, max_seqlen_k) == (max(query_lens), max(kv_lens))
    return attend(q, (k, v), block_table, query_lens, kv_lens, softmax_scale, window_size[0], softcap)


class Wrapper:
    """What flashinfer's wrappers share: pages, planned for some lengths, then run for every layer."""

    num_plans = 0

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "HND") -> None:
        assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8

    def keep(self, starts: torch.Tensor, pages: torch.Tensor, last: torch.Tensor, page_size: int) -> None:
        assert starts.device.type == last.device.type == "cpu" and starts.dtype == last.dtype == torch.int32
        assert pages.dtype == torch.int32 and len(pages) == starts[-1]
        Wrapper.num_plans += 1
        counts = starts.diff().tolist()
        self.kv_lens = [(n - 1) * page_size + end for n, end in zip(counts, last.tolist(), strict=True)]
        self.tables = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=pages.device)
        for i, n in enumerate(counts):
            self.tables[i, :n] = pages[starts[i] : starts[i] + n]

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        assert q.is_contiguous()
        out.copy_(attend(q, paged_kv_cache, self.tables, self.query_lens, self.kv_lens, *self.settings))


class PrefillWrapper(Wrapper):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, *, causal, sm_scale, window_left, logits_soft_cap, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert causal and q_data_type == kv_data_type == DTYPE
        assert (num_qo_heads, num_kv_heads, head_dim_qk) == (HEADS, KV_HEADS, HEAD_SIZE)
        self.query_lens = lengths(qo_indptr)
        self.settings = (sm_scale, window_left, logits_soft_cap)
        self.keep(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)


class DecodeWrapper(Wrapper):
    def __init__(self, float_workspace_buffer, kv_layout="HND", *, use_tensor_cores=False):
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, sm_scale,
        window_left, logits_soft_cap, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert q_data_type == kv_data_type == DTYPE
        assert (num_qo_heads, num_kv_heads, head_dim) == (HEADS, KV_HEADS, HEAD_SIZE)
        self.query_lens = [1] * len(last_page_len)
        self.settings = (sm_scale, window_left, logits_soft_cap)
        self.keep(indptr, indices, last_page_len, page_size)


ALL_SETTINGS = [FULL, replace(FULL, window=30), replace(FULL, soft_cap=20.0)]
STEPS = [MIXED, DECODES, PROMPTS]


@pairs(sizes=STEPS, settings=ALL_SETTINGS)
def test_flash_attention_3(
    sizes: list[tuple[int, int]], settings: AttentionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=flash_attn_3_with_kvcache)
    FlashAttnBackend.check(NEEDS)
    Batch(sizes).check(FlashAttnBackend(), settings, times=2)


@pairs(sizes=STEPS, settings=ALL_SETTINGS)
def test_flash_attention_2(
    sizes: list[tuple[int, int]], settings: AttentionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent(monkeypatch, "flash_attn_interface")
    functions = {
        "flash_attn_varlen_func": flash_attn_2_varlen_func,
        "flash_attn_with_kvcache": flash_attn_2_with_kvcache,
    }
    stand_in(monkeypatch, "flash_attn", **functions)
    FlashAttnBackend.check(replace(NEEDS, block_size=256))
    Batch(sizes, block_size=256).check(FlashAttnBackend(), settings, times=2)


@pytest.mark.parametrize("sizes", STEPS, ids=["mixed", "decodes", "prompts"])
def test_flashinfer_plans_once_a_step_for_each_kind_of_layer(
    sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(
        monkeypatch,
        "flashinfer",
        BatchPrefillWithPagedKVCacheWrapper=PrefillWrapper,
        BatchDecodeWithPagedKVCacheWrapper=DecodeWrapper,
    )
    monkeypatch.setattr(Wrapper, "num_plans", 0)
    FlashInferBackend.check(NEEDS)
    backend, batch = FlashInferBackend(), Batch(sizes)
    for settings in ALL_SETTINGS:
        batch.check(backend, settings, times=2)
    num_calls = (batch.num_decodes > 0) + (batch.num_decodes < len(sizes))
    assert Wrapper.num_plans == len(ALL_SETTINGS) * num_calls
    batch = Batch([(1, 3), (4, 4)])  # another step, the same wrappers
    batch.check(backend, FULL)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("package", "make", "block_size"),
    [
        ("flash_attn_interface", FlashAttnBackend, 16),
        ("flash_attn", FlashAttnBackend, 256),
        ("flashinfer", FlashInferBackend, 16),
    ],
)
@pytest.mark.parametrize("settings", ALL_SETTINGS, ids=["full", "window", "soft cap"])
def test_installed_packages_agree(package: str, make: Any, block_size: int, settings: AttentionSettings) -> None:
    pytest.importorskip(package)
    for sizes in (MIXED, DECODES, PROMPTS):
        Batch(sizes, block_size).check(make(), settings)
