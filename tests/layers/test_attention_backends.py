"""Each way to compute attention gives what the definition gives, or refuses in one line.

The packages that are not part of any install are stood in for by modules with their functions' signatures, so that
what is tested is what they are handed; `test_installed_packages_agree` runs the real ones where they are.
"""

from __future__ import annotations

import importlib.machinery
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from teachllm.layers.attention import AttentionMetadata
from teachllm.layers.attention_backends import sdpa, selection, triton
from teachllm.layers.attention_backends.base import AttentionBackend, AttentionNeeds, AttentionSettings
from teachllm.layers.attention_backends.flash_attn import FlashAttnBackend
from teachllm.layers.attention_backends.flashinfer import FlashInferBackend
from teachllm.layers.attention_backends.invariant import InvariantBackend
from teachllm.layers.attention_backends.reference import REFERENCE
from teachllm.layers.attention_backends.selection import select_backend
from teachllm.layers.attention_backends.triton import TritonBackend
from teachllm_kernels.attention.decode_plan import DecodePlan, plan_decode
from teachllm_kernels.attention.hopper_prefill import fits_hopper_prefill
from teachllm_kernels.attention.kv_quantization import KVScales, dequantize_kv_reference, quantize_kv_reference
from teachllm_kernels.attention.paged_attention import paged_attention_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
gpu = [pytest.mark.gpu] if ON_GPU else []
pytestmark = gpu
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TOLERANCE = 1e-2 if ON_GPU else 1e-5
HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 64, 16
FULL = AttentionSettings(0.2)
NEEDS = AttentionNeeds(16, 8, 128, "bfloat16", 16, frozenset({None}))

# (query length, context): decodes first, then chunks of prompts.
MIXED = [(1, 40), (1, 16), (5, 0), (20, 12), (1, 0), (33, 60)]
DECODES = [(1, 40), (1, 16), (1, 99)]
PROMPTS = [(20, 0), (48, 0)]


class Batch:
    """A step's q, k and v, the cache after they were written, and where everything lies."""

    def __init__(
        self,
        sizes: list[tuple[int, int]],
        block_size: int = BLOCK_SIZE,
        window: int | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        query_lens, kv_lens = [n for n, _ in sizes], [n + context for n, context in sizes]
        self.num_decodes = next((i for i, n in enumerate(query_lens) if n > 1), len(sizes))
        counts = [-(-n // block_size) for n in kv_lens]
        order = torch.randperm(sum(counts) + 2, generator=generator).int()
        rows = torch.randperm(len(sizes) + 2, generator=generator)[: len(sizes)].int()
        tables = torch.zeros(len(sizes) + 2, max(counts) + 1, dtype=torch.int32)
        shape = (sum(counts) + 2, block_size, KV_HEADS, HEAD_SIZE)
        caches = torch.randn(2, *shape, generator=generator).to(DTYPE)
        new: list[torch.Tensor] = []
        first = 0
        for row, count, n, kv_len in zip(rows.tolist(), counts, query_lens, kv_lens, strict=True):
            tables[row, :count] = order[first : first + count]
            first += count
            at = torch.arange(kv_len - n, kv_len)
            new.append(caches[:, tables[row, at // block_size].long(), at % block_size])
        starts = torch.tensor([0, *query_lens]).cumsum(0).int().to(DEVICE)
        self.k, self.v = torch.cat(new, dim=1).to(DEVICE)
        wide = torch.randn(sum(query_lens), HEADS + 3, HEAD_SIZE, generator=generator).to(DTYPE).to(DEVICE)
        self.q = wide[:, :HEADS]
        self.kv_cache = self.dequantized = (caches[0].to(DEVICE), caches[1].to(DEVICE))
        self.scales: KVScales | None = None
        if kv_dtype is not None:
            k_scale, v_scale = self.scales = (torch.rand(2, KV_HEADS) * 0.02 + 0.03).to(DEVICE).unbind()
            k, v = (
                quantize_kv_reference(self.dequantized[0], k_scale, kv_dtype),
                quantize_kv_reference(self.dequantized[1], v_scale, kv_dtype),
            )
            self.kv_cache, self.dequantized = (
                (k, v),
                (dequantize_kv_reference(k, k_scale), dequantize_kv_reference(v, v_scale)),
            )
        self.window = window
        self.metadata = AttentionMetadata(
            query_start=starts,
            seq_lens=torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE),
            block_tables=tables.to(DEVICE),
            slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64, device=DEVICE),
            query_lens=query_lens,
            kv_lens=kv_lens,
            rows=rows.to(DEVICE),
            num_decodes=self.num_decodes,
            prefill_start=starts[self.num_decodes :] - self.num_decodes,
        )

    def plan_decodes(self) -> Batch:
        """Adds what the runner prepares for backends that split decodes."""
        count, metadata = self.num_decodes, self.metadata
        assert metadata.rows is not None
        if count:
            plan = DecodePlan.allocate(count, HEADS, KV_HEADS, HEAD_SIZE, DEVICE)
            where = (metadata.seq_lens[:count], metadata.query_start[: count + 1], metadata.rows[:count])
            plan_decode(plan, *where, KV_HEADS, self.window)
            metadata.plans[self.window] = plan
        return self

    def check(self, backend: AttentionBackend, settings: AttentionSettings, times: int = 1) -> None:
        metadata = self.metadata
        assert metadata.rows is not None
        settings = replace(settings, kv_scales=self.scales)
        expected = paged_attention_reference(
            self.q.double(), self.dequantized[0].double(), self.dequantized[1].double(),
            metadata.block_tables[metadata.rows.long()], metadata.query_lens, metadata.kv_lens,
            settings.scale, settings.window, settings.soft_cap,
        )  # fmt: skip
        for _ in range(times):
            out = torch.full(self.q.shape, torch.nan, dtype=DTYPE, device=DEVICE)
            for result in (
                backend.attend(self.q, self.k, self.v, self.kv_cache, metadata, settings),
                backend.attend(self.q, self.k, self.v, self.kv_cache, metadata, settings, out),
            ):
                assert result.isfinite().all()
                error = (result.double() - expected).norm() / expected.norm()
                assert error < TOLERANCE, float(error)


@pytest.fixture(params=[True, False], ids=["quick launches", "hopper_prefill"])
def prompts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of prompts: the one for as few as there are here, or, on a Hopper, the one for many."""
    if not request.param:
        if not fits_hopper_prefill(DEVICE, DTYPE, HEAD_SIZE, HEADS // KV_HEADS, BLOCK_SIZE):
            pytest.skip("needs a Hopper GPU")
        monkeypatch.setattr(triton, "_FEW_QUERIES", 0)


@pytest.mark.usefixtures("prompts")
@pytest.mark.parametrize("sizes", [MIXED, DECODES, PROMPTS], ids=["mixed", "decodes", "prompts"])
@pytest.mark.parametrize("window", [None, 30])
def test_this_projects_kernels(sizes: list[tuple[int, int]], window: int | None) -> None:
    settings = replace(FULL, window=window)
    Batch(sizes, window=window).plan_decodes().check(TritonBackend(), settings)
    Batch(sizes).check(InvariantBackend(), settings)


@pytest.mark.usefixtures("prompts")
@pytest.mark.parametrize("sizes", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.int8], ids=["fp8", "int8"])
def test_this_projects_kernels_read_what_is_stored(sizes: list[tuple[int, int]], kv_dtype: torch.dtype) -> None:
    """Of the step's own tokens, too: `Batch.k` and `Batch.v` are not what the quantized cache holds."""
    Batch(sizes, kv_dtype=kv_dtype).plan_decodes().check(TritonBackend(), FULL)
    Batch(sizes, kv_dtype=kv_dtype).check(InvariantBackend(), FULL)
    if not ON_GPU:
        batch = Batch(sizes, kv_dtype=kv_dtype)
        batch.metadata.block_tables = batch.metadata.block_tables[batch.metadata.rows.long()]  # type: ignore[union-attr]
        batch.metadata.rows = torch.arange(len(sizes), dtype=torch.int32)
        batch.check(REFERENCE, FULL)


LONG_STEPS = {
    "alone": [(48, 0)],
    "behind decodes": [(1, 20), (1, 3), (48, 0)],
    "behind a short prompt": [(1, 20), (7, 5), (48, 0)],
    "before a short prompt": [(48, 0), (7, 5), (9, 0)],
    "several": [(1, 20), (48, 0), (3, 0), (32, 0), (64, 0)],
    "beside others as long": [(1, 20), (33, 0), (48, 0), (48, 16), (48, 0)],
}


@pytest.mark.usefixtures("prompts")
@pytest.mark.parametrize("sizes", LONG_STEPS.values(), ids=LONG_STEPS.keys())
def test_long_prompts_go_to_pytorch_wherever_they_stand(
    sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "_LONG_PROMPT", 32)
    monkeypatch.setattr(sdpa, "_ROUND", 16)
    calls: list[int] = []
    real = sdpa._attend_long

    def counted(*args: Any) -> torch.Tensor:
        calls.append(args[0].shape[0])
        return real(*args)

    monkeypatch.setattr(sdpa, "_attend_long", counted)
    Batch(sizes).plan_decodes().check(sdpa.SDPABackend(), FULL)
    assert calls == 2 * [n for n, context in sizes if n in (32, 48, 64) and not context]


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ([(1, 9), (48, 16)], FULL),
        ([(40, 0)], FULL),
        ([(16, 0)], FULL),
        ([(48, 0)], replace(FULL, window=20)),
        ([(48, 0)], replace(FULL, soft_cap=5.0)),
    ],
    ids=["context", "a length of its own", "short", "window", "soft cap"],
)
def test_a_prompt_that_pytorch_is_no_faster_for_stays_with_the_kernels(
    sizes: list[tuple[int, int]], settings: AttentionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "_LONG_PROMPT", 32)
    monkeypatch.setattr(sdpa, "_ROUND", 16)
    monkeypatch.setattr(sdpa, "_attend_long", lambda *_: pytest.fail("PyTorch's attention was asked"))
    Batch(sizes, window=settings.window).plan_decodes().check(sdpa.SDPABackend(), settings)


# -- packages ----------------------------------------------------------------------------------------------


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for member, value in members.items():
        setattr(module, member, value)
    monkeypatch.setitem(sys.modules, name, module)


def absent(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


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
steps = pytest.mark.parametrize("sizes", [MIXED, DECODES, PROMPTS], ids=["mixed", "decodes", "prompts"])
kinds = pytest.mark.parametrize("settings", ALL_SETTINGS, ids=["full", "window", "soft cap"])


@steps
@kinds
def test_flash_attention_3(
    sizes: list[tuple[int, int]], settings: AttentionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=flash_attn_3_with_kvcache)
    FlashAttnBackend.check(NEEDS)
    Batch(sizes).check(FlashAttnBackend(), settings, times=2)


@steps
@kinds
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


@steps
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
@kinds
def test_installed_packages_agree(package: str, make: Any, block_size: int, settings: AttentionSettings) -> None:
    pytest.importorskip(package)
    for sizes in (MIXED, DECODES, PROMPTS):
        Batch(sizes, block_size).check(make(), settings)


# -- who is chosen -----------------------------------------------------------------------------------------


CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_the_fastest_that_suits_is_chosen_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "fits_hopper_prefill", lambda *where: True)
    assert type(select_backend(None, NEEDS, GPU)) is TritonBackend
    monkeypatch.setattr(selection, "fits_hopper_prefill", lambda *where: False)
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
    stand_in(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=flash_attn_3_with_kvcache)
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
        (
            "sdpa",
            {"has_quantized_kv": True},
            "cuda",
            "before kv_cache_dtype rounded them: use attention_backend=triton",
        ),
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
    monkeypatch.setattr(triton, "_FEW_QUERIES", 0)
    monkeypatch.setattr(triton, "fits_hopper_prefill", lambda *where: True)
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
    monkeypatch.setattr(triton, "fits_hopper_prefill", lambda *where: True)
    monkeypatch.setattr(triton, "plan_prefill", lambda *where: "plan")
    monkeypatch.setattr(triton, "hopper_prefill", lambda *where: used.append("hopper"))
    monkeypatch.setattr(triton, "paged_prefill_triton", lambda *where, **how: used.append("portable"))
    batch = Batch(sizes)
    if in_graph:
        batch.metadata.query_lens = batch.metadata.kv_lens = []
    for _ in range(2):
        TritonBackend().attend(batch.q, batch.k, batch.v, batch.kv_cache, batch.metadata, settings)
    assert used == 2 * ["hopper" if on_hopper else "portable"]
