"""Attention over a long quantized context: no error but that of rounding K and V, and a needle is found as without.

On a GPU with 16 thousand tokens, by every kernel; elsewhere by the reference, and by kernels with few tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from teachllm_kernels._hopper import has_hopper
from teachllm_kernels.attention import decode_plan
from teachllm_kernels.attention.decode_plan import DecodeKernel, DecodePlan, plan_decode
from teachllm_kernels.attention.hopper_decode import takes_decode_heads
from teachllm_kernels.attention.hopper_prefill import hopper_prefill
from teachllm_kernels.attention.kv_quantization import LARGEST, KVScales, dequantize_kv_reference, quantize_kv_reference
from teachllm_kernels.attention.paged_attention import paged_attention_cpu, paged_attention_reference
from teachllm_kernels.attention.paged_decode import fused_paged_decode, paged_decode_triton
from teachllm_kernels.attention.paged_prefill import paged_prefill_triton
from teachllm_kernels.attention.prefill_plan import plan_prefill
from tests.kernels.cases import DEVICE, HALF, ON_GPU, per_device
from tests.thorough import THOROUGH, times

pytestmark = [pytest.mark.gpu] if ON_GPU else []
DTYPE = HALF  # of the kernels
BLOCK_SIZE, HEAD_SIZE = 16, 128
NUM_HEADS, NUM_KV_HEADS = per_device((4, 2), (32, 8))
LONG = 16_448 if THOROUGH or ON_GPU else 2_112
NUM_KEYS = per_device(times(150, 200), LONG)
KV_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
SCALE = HEAD_SIZE**-0.5

on_hopper = pytest.mark.skipif(
    DTYPE.itemsize != 2
    or not (takes_decode_heads(HEAD_SIZE, NUM_HEADS // NUM_KV_HEADS, BLOCK_SIZE) and has_hopper(DEVICE)),
    reason="needs a Hopper GPU",
)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(decode_plan, "_MULTIPROCESSORS", 1)


@dataclass(frozen=True)
class Context:
    """One sequence, of which the last token attends.

    Attributes:
        q: [1, num_heads, head_size].
        k, v: [num_keys, num_kv_heads, head_size].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def exact(self, k: torch.Tensor | None = None, v: torch.Tensor | None = None) -> torch.Tensor:
        """In float64, of these or of other K and V."""
        k, v = (self.k if k is None else k).double(), (self.v if v is None else v).double()
        group = self.q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        weights = (torch.einsum("qhd,khd->hqk", self.q.double(), k) * SCALE).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    def exact_of_quantized(self, kv: tuple[torch.Tensor, torch.Tensor], scales: KVScales) -> torch.Tensor:
        """Attention to the dequantized values: nothing but storing them costs."""
        (k, v), (k_scale, v_scale) = kv, scales
        return self.exact(
            dequantize_kv_reference(k, k_scale, torch.float64), dequantize_kv_reference(v, v_scale, torch.float64)
        )

    def quantized(self, dtype: torch.dtype) -> tuple[tuple[torch.Tensor, torch.Tensor], KVScales]:
        """With scales as a calibration leaves them: some room above the largest."""
        k_scale, v_scale = (1.3 * x.float().abs().amax(dim=(0, 2)) / LARGEST[dtype] for x in (self.k, self.v))
        return (quantize_kv_reference(self.k, k_scale, dtype), quantize_kv_reference(self.v, v_scale, dtype)), (
            k_scale,
            v_scale,
        )


def paged(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """[num_keys, heads, head_size] in blocks, block i of the sequence at `order[i]`; what lies behind its end is 0."""
    raw = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
    blocks = raw.new_zeros((len(order), BLOCK_SIZE, *raw.shape[1:]))
    place = torch.arange(len(raw), device=raw.device)
    blocks[order[place // BLOCK_SIZE].long(), place % BLOCK_SIZE] = raw
    return blocks.view(x.dtype)


def tables(num_keys: int, device: torch.device) -> torch.Tensor:
    return torch.randperm(-(-num_keys // BLOCK_SIZE), generator=torch.Generator().manual_seed(1)).int().to(device)


def by_reference(attend: Callable[..., torch.Tensor], at: Context, kv: Any, scales: KVScales | None) -> torch.Tensor:
    order = tables(len(at.k), at.q.device)
    k_cache, v_cache = paged(kv[0], order), paged(kv[1], order)
    return attend(at.q, k_cache, v_cache, order[None], [1], [len(at.k)], SCALE, scales=scales)


class OnDevice(NamedTuple):
    rows: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor


def on_device(at: Context) -> OnDevice:
    rows = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    start = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    return OnDevice(rows, start, torch.full_like(rows, len(at.k)))


def planned(at: Context, kernel: DecodeKernel) -> DecodePlan:
    (rows, starts, lens), num_kv_heads = on_device(at), at.k.shape[1]
    plan = DecodePlan.allocate(2, at.q.shape[1], num_kv_heads, HEAD_SIZE, DEVICE)
    if kernel == "hopper_decode":  # which is for two sequences and more
        lens, rows, starts = lens.repeat(2), rows.repeat(2), torch.arange(3, dtype=torch.int32, device=DEVICE)
    plan_decode(plan, lens, starts, rows, num_kv_heads, kernel=kernel)
    return plan


def by_decode(at: Context, kv: Any, scales: KVScales | None) -> torch.Tensor:
    order = tables(len(at.k), DEVICE)
    k_cache, v_cache, start = paged(kv[0], order), paged(kv[1], order), on_device(at).query_start
    plan = planned(at, "paged_decode")
    return paged_decode_triton(at.q, k_cache, v_cache, order[None], start, plan, SCALE, scales=scales)


def by_fused_decode(at: Context, kv: Any, scales: KVScales | None, hopper: bool = False) -> torch.Tensor:
    """The last token's K and V come with its q; no rotation and no norm."""
    order, num_seqs = tables(len(at.k), DEVICE), 1 + hopper
    qkv = torch.cat([at.q, at.k[-1:], at.v[-1:]], dim=1).repeat(num_seqs, 1, 1).contiguous()
    angles = torch.ones(num_seqs, 1, HEAD_SIZE, dtype=at.q.dtype, device=DEVICE)
    out = fused_paged_decode(
        qkv,
        cos=angles,
        signed_sin=angles * 0,
        qk_weight=None,
        eps=0.0,
        k_cache=paged(kv[0], order),
        v_cache=paged(kv[1], order),
        block_tables=order[None].repeat(num_seqs, 1),
        plan=planned(at, "hopper_decode" if hopper else "fused_paged_decode"),
        scale=SCALE,
        scales=scales,
    )
    assert torch.equal(out[0], out[-1])
    return out[:1]


def by_prefill(at: Context, kv: Any, scales: KVScales | None, hopper: bool = False) -> torch.Tensor:
    order = tables(len(at.k), DEVICE)
    k_cache, v_cache, tables_of_one = paged(kv[0], order), paged(kv[1], order), order[None]
    rows, starts, lens = on_device(at)
    if not hopper:
        return paged_prefill_triton(at.q, k_cache, v_cache, tables_of_one, rows, starts, lens, SCALE, scales=scales)
    group = at.q.shape[1] // at.k.shape[1]
    plan = plan_prefill(starts, lens, rows, 1, group, len(at.k))
    return hopper_prefill(at.q, k_cache, v_cache, tables_of_one, plan, SCALE, scales=scales)


Attend = Callable[[Context, Any, KVScales | None], torch.Tensor]
WAYS: list[Any] = [
    pytest.param(partial(by_reference, paged_attention_reference), id="definition"),
    pytest.param(partial(by_reference, paged_attention_cpu), id="cpu"),
    pytest.param(by_decode, id="decode"),
    pytest.param(by_fused_decode, id="fused decode"),
    pytest.param(partial(by_fused_decode, hopper=True), id="hopper decode", marks=on_hopper),
    pytest.param(by_prefill, id="prefill"),
    pytest.param(partial(by_prefill, hopper=True), id="hopper prefill", marks=on_hopper),
]
ways = pytest.mark.parametrize("attend", WAYS)
kinds = pytest.mark.parametrize("kv_dtype", KV_DTYPES)


def length_and_dtype(attend: Any) -> tuple[int, torch.dtype, torch.device]:
    if getattr(attend, "func", None) is by_reference:  # fast on any machine
        return LONG, torch.float32, torch.device("cpu")
    return NUM_KEYS, DTYPE, DEVICE


def drawn(attend: Any, seed: int) -> Context:
    """Keys whose channels are not all as large, as models' are; a query that prefers a few hundred of them."""
    num_keys, dtype, device = length_and_dtype(attend)
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(HEAD_SIZE, generator=generator).mul(2).exp()
    q = torch.randn(1, NUM_HEADS, HEAD_SIZE, generator=generator)
    k = torch.randn(num_keys, NUM_KV_HEADS, HEAD_SIZE, generator=generator) * sizes
    v = torch.randn(num_keys, NUM_KV_HEADS, HEAD_SIZE, generator=generator) + 0.2
    return Context(q.to(dtype).to(device), k.to(dtype).to(device), v.to(dtype).to(device))


@ways
@kinds
def test_the_error_is_that_of_storing_quantized_values(attend: Attend, kv_dtype: str) -> None:
    at = drawn(attend, seed=0)
    kv, scales = at.quantized(KV_DTYPES[kv_dtype])
    stored, exact, found = at.exact_of_quantized(kv, scales), at.exact(), attend(at, kv, scales).double()

    def error(result: torch.Tensor) -> torch.Tensor:
        """Of each head."""
        return (result - exact).norm(dim=-1) / exact.norm(dim=-1)

    assert found.isfinite().all()
    assert (error(found) <= 2 * error(stored)).all(), (error(found).max(), error(stored).max())
    assert ((found - stored).norm(dim=-1) <= 0.5 * (stored - exact).norm(dim=-1)).all()


def needles(attend: Any, strength: float, seed: int) -> tuple[Context, torch.Tensor]:
    """(one key for each head of q that fits it, where it lies); all others fit by chance.

    Args:
        strength: log of its weight, to that of all others together.
    """
    at = drawn(attend, seed)
    generator, group = torch.Generator().manual_seed(seed), NUM_HEADS // NUM_KV_HEADS
    place = torch.randperm(len(at.k) - 1, generator=generator)[:NUM_HEADS]
    scores = torch.einsum("hd,khd->hk", at.q[0].float(), at.k.float().repeat_interleave(group, dim=1)) * SCALE
    wanted, k = scores.logsumexp(dim=1) + strength, at.k.clone()
    for head, i in enumerate(place.tolist()):
        q = at.q[0, head].float()
        k[i, head // group] = (q * (wanted[head] / (SCALE * q.square().sum()))).to(k.dtype)
    return Context(at.q, k, at.v), place


def num_found(at: Context, place: torch.Tensor, result: torch.Tensor) -> int:
    """Heads whose result is nearer to their needle's value than to that of any other key."""
    group = NUM_HEADS // NUM_KV_HEADS
    values = at.v.float().repeat_interleave(group, dim=1)
    likest = torch.einsum("hd,khd->hk", result[0].float(), values).argmax(dim=1)
    return int((likest.cpu() == place).sum())


@pytest.mark.parametrize("attend", WAYS if ON_GPU else WAYS[:2])  # among few keys none stands out
@kinds
def test_a_needle_is_found_as_without_quantization(attend: Attend, kv_dtype: str) -> None:
    """No needle is lost by how attention reads K and V, stored or not; a few of the weaker ones are by storing them.

    With integers it is more of them: steps that are wide enough for the largest channel are wide for all.
    """
    totals, num_seeds = {"exact": 0, "plain": 0, "stored": 0, "quantized": 0}, per_device(times(1, 3), 2)
    for seed in range(num_seeds):
        for strength in (0.0, -1.0):  # a weaker one is lost in what is not summed up well
            at, place = needles(attend, strength, seed)
            kv, scales = at.quantized(KV_DTYPES[kv_dtype])
            totals["exact"] += num_found(at, place, at.exact())
            totals["plain"] += num_found(at, place, attend(at, (at.k, at.v), None))
            totals["stored"] += num_found(at, place, at.exact_of_quantized(kv, scales))
            totals["quantized"] += num_found(at, place, attend(at, kv, scales))
    most = 2 * num_seeds * NUM_HEADS
    assert totals["plain"] > 0.75 * most, totals
    assert totals["plain"] >= totals["exact"] - 0.01 * most, totals
    assert totals["quantized"] >= totals["stored"] - 0.01 * most, totals
    lost = {"fp8": 0.02, "int8": 0.03}[kv_dtype]
    assert totals["stored"] >= totals["exact"] - lost * most, totals
    assert totals["quantized"] >= totals["plain"] - lost * most, totals
