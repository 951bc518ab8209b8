"""Compiles every kernel for several types of GPU, on a machine that needs none.

    python tests/kernels/compile_all.py [--one-each]

Launchers are called as always, in a dry run: the variants of kernels that they would have launched are collected, and
compiled. Prints each type of GPU with its kernels and how many variants of each there are. Run without
TRITON_INTERPRET.

    --one-each  compile only one variant of each kernel, for Ampere and Hopper; otherwise all, for all of `TARGETS`
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from unittest import mock

import torch

from teachllm.sampling.device_parameters import DeviceParameters
from teachllm_kernels._hopper import has_hopper
from teachllm_kernels.attention.decode_plan import DecodePlan, plan_decode
from teachllm_kernels.attention.hopper_decode import hopper_decode
from teachllm_kernels.attention.hopper_prefill import hopper_prefill
from teachllm_kernels.attention.kv_move import KVMover
from teachllm_kernels.attention.kv_quantization import has_fp8
from teachllm_kernels.attention.kv_write import kv_write_triton
from teachllm_kernels.attention.paged_decode import fused_paged_decode, paged_decode_triton
from teachllm_kernels.attention.paged_prefill import paged_prefill_triton
from teachllm_kernels.attention.prefill_plan import plan_prefill
from teachllm_kernels.attention.rope_kv_write import rope_kv_write_triton
from teachllm_kernels.comm.one_shot_all_reduce import NUM_SLOTS, DeferredAllReduce, SymmetricBuffer, one_shot_all_reduce
from teachllm_kernels.compile_pool import compile_in_processes
from teachllm_kernels.dry_run import dry_run
from teachllm_kernels.gpu_type import GPU_TYPES
from teachllm_kernels.linear import skinny_gemm
from teachllm_kernels.linear.batch_invariant_gemm import batch_invariant_gemm_triton
from teachllm_kernels.linear.gemv import gemv_triton
from teachllm_kernels.linear.hopper_gated_linear import hopper_gated_linear
from teachllm_kernels.linear.hopper_linear import hopper_linear, hopper_scaled_linear
from teachllm_kernels.linear.packed.dequantize import dequantize_triton
from teachllm_kernels.linear.packed.hopper_packed_linear import hopper_packed_linear
from teachllm_kernels.linear.packed.packed_gemv import packed_gemv_triton
from teachllm_kernels.linear.packed.packed_linear import packed_linear_triton
from teachllm_kernels.linear.packed.packed_weight import pack
from teachllm_kernels.linear.scaled.hopper_scaled_mm import hopper_scaled_mm
from teachllm_kernels.linear.scaled.scaled_gemv import scaled_gemv_triton
from teachllm_kernels.linear.scaled.scaled_linear import scaled_linear_triton, weight_only_triton
from teachllm_kernels.linear.scaled.scaled_mm import scaled_mm
from teachllm_kernels.linear.skinny_gemm import skinny_gemm_triton
from teachllm_kernels.moe.grouped_gemm import grouped_down_triton, grouped_gated_triton
from teachllm_kernels.moe.moe_routing import combine_triton, group_triton, route_triton
from teachllm_kernels.quantize_rows import empty_rows, quantize_rows_triton
from teachllm_kernels.rms_norm import rms_norm_quantized_triton, rms_norm_triton
from teachllm_kernels.sampling import random_sample
from teachllm_kernels.sampling.random_sample import sample_triton
from teachllm_kernels.silu_and_mul import silu_and_mul_quantized_triton, silu_and_mul_triton
from teachllm_kernels.speculation.draft_rows import draft_inputs, following_ids, push
from teachllm_kernels.speculation.prompt_lookup import prompt_lookup_triton
from teachllm_kernels.speculation.rejection import rejection_sample_triton
from teachllm_kernels.speculation.verify_drafts import accept, draft_proposals, synthetic_verdict
from teachllm_kernels.step_inputs import append_tokens, step_inputs, write_runs
from teachllm_kernels.variants import KernelVariants

ONE_EACH = "--one-each" in sys.argv
META = torch.device("meta")
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def compile_small(dtype: torch.dtype) -> None:
    """Compile everything but attention and sampling."""
    x, weight = torch.zeros(2, 4096, dtype=dtype), torch.zeros(32, 4096, dtype=dtype)
    bias = torch.zeros(32, dtype=dtype)
    rms_norm_triton(x, x, x[0], 1e-6)
    rms_norm_triton(x, None, x[0], 1e-6)
    silu_and_mul_triton(x)
    gemv_triton(x[:1], weight, norm=(x[0], 1e-6), gated=True)
    gemv_triton(x[:1], weight, bias=bias, residual=torch.zeros(1, 32, dtype=dtype))
    skinny_gemm_triton(x, weight, gated=True)
    skinny_gemm_triton(x, torch.zeros(8192, 4096, dtype=dtype))
    batch_invariant_gemm_triton(x, weight, bias)
    batch_invariant_gemm_triton(x, torch.zeros(8192, 4096, dtype=dtype))
    rms_norm_triton(torch.zeros(8, 2, 4096), x, x[0], 1e-6)
    for num_ranks in (2, 4):
        symmetric_buffer = SymmetricBuffer(
            1, [torch.zeros(NUM_SLOTS, num_ranks, 8, x.shape[1], dtype=dtype)] * num_ranks
        )
        rms_norm_triton(DeferredAllReduce(x, symmetric_buffer), x, x[0], 1e-6)
        one_shot_all_reduce(x, symmetric_buffer)
    cache = torch.zeros(2, 16, 8, 128, dtype=dtype)
    kv_write_triton(cache[0, :2], cache[0, :2], cache, cache, ints(2, dtype=torch.int64))
    qkv, angle = torch.zeros(2, 32, 128, dtype=dtype), torch.zeros(2, 1, 128, dtype=dtype)
    for weight_of_norm in (torch.zeros(24, 128, dtype=dtype), None):
        rope_kv_write_triton(qkv, angle, angle, weight_of_norm, 1e-6, cache, cache, ints(2, dtype=torch.int64))


def compile_experts(dtype: torch.dtype) -> None:
    """Compile experts' kernels for steps in which an expert gets a few rows, some, and many."""
    gate_up, down = torch.zeros(16, 256, 512, dtype=dtype), torch.zeros(16, 512, 128, dtype=dtype)
    for num_tokens in (1, 100, 400):
        x = torch.zeros(num_tokens, 512, dtype=dtype)
        routes = route_triton(torch.zeros(num_tokens, 16, dtype=dtype), 4, True)
        groups = group_triton(routes.experts, range(16))
        h = grouped_gated_triton(x, gate_up, groups)
        combine_triton(grouped_down_triton(h, down, groups, routes), routes.experts, range(16))


def compile_hopper_products(dtype: torch.dtype) -> None:
    x, weight = torch.zeros(2, 4096, dtype=dtype), torch.zeros(32, 4096, dtype=dtype)
    hopper_linear(x, weight, gated=True)
    hopper_linear(x, weight, torch.zeros(32, dtype=dtype))
    hopper_linear(x, weight, parts=True)
    hopper_linear(torch.zeros(96, 512, dtype=dtype), torch.zeros(24576, 512, dtype=dtype), gated=True)
    hopper_linear(torch.zeros(160, 512, dtype=dtype), torch.zeros(24576, 512, dtype=dtype), gated=True)
    hopper_linear(torch.zeros(160, 512, dtype=dtype), torch.zeros(6144, 512, dtype=dtype))
    hopper_linear(torch.zeros(256, 512, dtype=dtype), torch.zeros(4096, 512, dtype=dtype), parts=True)
    hopper_gated_linear(torch.zeros(300, 512, dtype=dtype), torch.zeros(6144, 512, dtype=dtype))


def compile_scaled(quantized_dtype: torch.dtype) -> None:
    """Compile what quantizes rows to 8 bits, and what multiplies them."""
    x, norm_weight = torch.zeros(2, 4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)
    norm = (norm_weight, 1e-6)
    weight, long = torch.zeros(256, 4096, dtype=quantized_dtype), torch.zeros(64, 12288, dtype=quantized_dtype)
    outputs, blocks, one = torch.zeros(256, 1), torch.zeros(2, 32), torch.zeros(1, 1)
    quantize_rows_triton(x, quantized_dtype)
    rms_norm_quantized_triton(x, x, norm_weight, 1e-6, quantized_dtype)
    silu_and_mul_quantized_triton(x, quantized_dtype)
    rows, groups, many = (
        empty_rows((num_rows, 4096), quantized_dtype, grouped, x.device)
        for num_rows, grouped in ((2, False), (2, True), (200, False))
    )
    scaled_gemv_triton(x[:1], weight, outputs, norm=norm, gated=True)
    alone = empty_rows((1, 12288), quantized_dtype, False, x.device)
    scaled_gemv_triton(alone, long, one, residual=torch.zeros(1, 64), dtype=torch.bfloat16)
    for gated in (False, True):
        scaled_linear_triton(rows, weight, outputs, gated=gated)
    scaled_linear_triton(many, weight, outputs)
    if quantized_dtype == torch.int8:
        scaled_mm(many, weight, outputs, gated=True)
    else:
        for scale, grouped in ((one[0], False), (None, True)):
            quantize_rows_triton(x, quantized_dtype, scale, grouped)
            rms_norm_quantized_triton(x, x, norm_weight, 1e-6, quantized_dtype, scale, grouped)
            silu_and_mul_quantized_triton(x, quantized_dtype, scale, grouped)
        scaled_gemv_triton(x[:1], weight, blocks, norm=norm, gated=True)
        scaled_linear_triton(groups, weight, blocks, gated=True)
    if not has_hopper(META):
        return
    hopper_scaled_linear(rows, weight, outputs, gated=True)
    hopper_scaled_linear(rows, weight, one, parts=True)
    wide, scales = torch.zeros(12288, 512, dtype=quantized_dtype), torch.zeros(12288, 1)
    hopper_scaled_linear(empty_rows((160, 512), quantized_dtype, False, x.device), wide, scales, gated=True)
    hopper_scaled_linear(empty_rows((256, 512), quantized_dtype, False, x.device), wide, scales)
    if quantized_dtype != torch.int8:
        of_blocks = torch.zeros(96, 4)
        few, more = (empty_rows((num_rows, 512), quantized_dtype, True, x.device) for num_rows in (64, 100))
        hopper_scaled_linear(few, wide, of_blocks, parts=True)
        hopper_scaled_linear(more, wide, of_blocks, gated=True)
        hopper_scaled_mm(empty_rows((300, 512), quantized_dtype, True, x.device), wide, of_blocks, gated=True)
    rows = empty_rows((300, 512), quantized_dtype, False, x.device)
    hopper_scaled_mm(rows, wide, scales, torch.zeros(12288, dtype=torch.bfloat16))
    for level in (0, 512):
        hopper_scaled_mm(rows, wide, scales, gated=True, level=level)


def compile_packed(dtype: torch.dtype) -> None:
    """Compile products of weights of 4 and 8 bits with a scale per group."""
    num_in = 512 if dtype == torch.float32 else 4096  # several chunks of it would take long
    x, residual = torch.zeros(17, num_in, dtype=dtype), torch.zeros(1, 32, dtype=dtype)
    qweight, bias, norm = torch.zeros(32, num_in, dtype=torch.uint8), torch.zeros(32, dtype=dtype), (x[0], 1e-6)
    scales, zeros = torch.zeros(32, num_in // 128, dtype=torch.float16), torch.zeros(32, num_in // 128)
    plain, gated = (pack(qweight, scales, zeros, 4, is_gated=is_gated) for is_gated in (False, True))
    packed_gemv_triton(x[:1], plain, bias, norm, residual)
    packed_linear_triton(x, plain, bias)
    dequantize_triton(plain, dtype)
    if dtype == torch.bfloat16:
        packed_gemv_triton(x[:1], gated, gated=True)
        packed_linear_triton(x[:2], gated, gated=True)
        packed_linear_triton(x, plain, parts=True)
        wide, e2m1 = (
            pack(qweight, scales, None, 8),
            pack(qweight, torch.zeros(32, 256, dtype=dtype), None, 4, is_e2m1=True),
        )
        for weight in (wide, e2m1):
            packed_gemv_triton(x[:1], weight)
            packed_linear_triton(x, weight)


def compile_packed_on_hopper(dtype: torch.dtype) -> None:
    """Compile Hopper's own kernel."""
    qweight, x = torch.zeros(24_576, 512, dtype=torch.uint8), torch.zeros(100, 512, dtype=dtype)
    scales, zeros = torch.zeros(24_576, 4, dtype=torch.float16), torch.zeros(24_576, 4)
    plain, with_zeros = (pack(qweight, scales, each, 4, is_gated=each is not None) for each in (None, zeros))
    hopper_packed_linear(x[:64], with_zeros, gated=True)
    hopper_packed_linear(x, plain, parts=True)
    if dtype == torch.bfloat16:
        bias = torch.zeros(1024, dtype=dtype)
        hopper_packed_linear(x[:2], pack(qweight[:1024], scales[:1024], zeros[:1024], 8), bias)
        e2m1 = pack(qweight[:1024], torch.zeros(1024, 32, dtype=dtype), None, 4, is_e2m1=True)
        hopper_packed_linear(x[:16], e2m1, parts=True)


def compile_large_tiles() -> None:
    """Compile products and attention whose tiles are as large as there is shared memory for."""
    x, weight = torch.zeros(2, 4096, dtype=torch.bfloat16), torch.zeros(64, 4096, dtype=torch.bfloat16)
    skinny_gemm_triton(x, weight, gated=True)
    skinny_gemm_triton(x, weight)
    quantized = pack(torch.zeros(64, 4096, dtype=torch.uint8), torch.zeros(64, 32, dtype=torch.bfloat16), None, 4)
    for num_rows in (16, 64, 100):
        packed_linear_triton(torch.zeros(num_rows, 4096, dtype=torch.bfloat16), quantized)
    cache, lens = torch.zeros(4, 16, 2, 256, dtype=torch.bfloat16), ints(4)
    q = torch.zeros(4, 4, 256, dtype=torch.bfloat16)
    paged_prefill_triton(q, cache, cache, ints(4, 4), lens, ints(5), lens, 1.0)


def compile_attention(
    dtype: torch.dtype, num_heads: int, head_size: int, window: int | None, cap: float | None
) -> None:
    cache = torch.zeros(4, 16, 2, head_size, dtype=dtype)
    tables, rows, starts, lens = ints(4, 4), ints(4), ints(5), ints(4)
    plan = DecodePlan.allocate(4, num_heads, 2, head_size, META, max_query_len=4)
    plan_decode(plan, lens, starts, rows, 2, window)
    q = torch.zeros(4, num_heads, head_size, dtype=dtype)
    paged_decode_triton(q, cache, cache, tables, starts, plan, 1.0, window, cap)
    tree = ints(4, dtype=torch.int64)
    paged_decode_triton(q, cache, cache, tables, starts, plan, 1.0, window, cap, max_query_len=4, tree=tree)
    qkv, angle = torch.zeros(4, num_heads + 4, head_size, dtype=dtype), torch.zeros(4, 1, head_size, dtype=dtype)
    norm = torch.zeros(num_heads + 2, head_size, dtype=dtype)
    plan_decode(plan, lens, starts, rows, 2, window, "fused_paged_decode")
    fused_paged_decode(qkv, angle, angle, norm, 1e-6, cache, cache, tables, plan, 1.0, window, cap)
    plan_decode(plan, lens[:1], starts[:2], rows[:1], 2, window, "fused_paged_decode")
    fused_paged_decode(qkv[:1], angle, angle, norm, 1e-6, cache, cache, tables, plan, 1.0, window, cap)
    if has_hopper(META) and dtype != torch.float32 and head_size in (64, 128):
        plan_decode(plan, lens, starts, rows, 2, window, "hopper_decode")
        for weight in (norm, None):
            hopper_decode(qkv, angle, angle, weight, 1e-6, cache, cache, tables, plan, 1.0)
        for longest in (0, 10_000):
            prompts = plan_prefill(starts, lens, rows, 4, num_heads // 2, longest)
            hopper_prefill(q, cache, cache, tables, prompts, 1.0, window)
    if dtype != torch.float32 or head_size < 128:  # spills there, and takes a minute to
        for is_fixed in (False, True):
            paged_prefill_triton(q, cache, cache, tables, rows, starts, lens, 1.0, window, cap, is_fixed=is_fixed)


def compile_quantized_kv(
    dtype: torch.dtype, quantized_dtype: torch.dtype, group: int, head_size: int, cap: float | None = None
) -> None:
    """Compile attention over a quantized KV cache, and what writes it."""
    num_heads, window = 2 * group, 100 if cap else None
    cache = torch.zeros(4, 16, 2, head_size, dtype=quantized_dtype)
    scales = (torch.ones(2), torch.ones(2))
    tables, rows, starts, lens = ints(4, 4), ints(4), ints(5), ints(4)
    plan = DecodePlan.allocate(4, num_heads, 2, head_size, META, max_query_len=4)
    qkv, angle = torch.zeros(4, num_heads + 4, head_size, dtype=dtype), torch.zeros(4, 1, head_size, dtype=dtype)
    q, norm = qkv[:, :num_heads], torch.zeros(num_heads + 2, head_size, dtype=dtype)
    plan_decode(plan, lens, starts, rows, 2, window)
    for max_query_len, tree in ((1, None), (4, ints(4, dtype=torch.int64))):
        paged_decode_triton(q, cache, cache, tables, starts, plan, 1.0, window, cap, max_query_len, tree, scales=scales)
    plan_decode(plan, lens, starts, rows, 2, window, "fused_paged_decode")
    fused_paged_decode(qkv, angle, angle, norm, 1e-6, cache, cache, tables, plan, 1.0, window, cap, scales)
    slots = ints(4, dtype=torch.int64)
    rope_kv_write_triton(qkv, angle, angle, norm, 1e-6, cache, cache, slots, scales)
    kv_write_triton(qkv[:, :2], qkv[:, 2:4], cache, cache, slots, scales)
    for is_fixed in (False, True):
        paged_prefill_triton(
            q, cache, cache, tables, rows, starts, lens, 1.0, window, cap, is_fixed=is_fixed, scales=scales
        )


def compile_quantized_kv_on_hopper(
    dtype: torch.dtype, quantized_dtype: torch.dtype, group: int, head_size: int
) -> None:
    """Compile Hopper's own kernels."""
    num_heads = 2 * group
    cache, tables, lens, starts = torch.zeros(4, 16, 2, head_size, dtype=quantized_dtype), ints(4, 4), ints(4), ints(5)
    plan = DecodePlan.allocate(4, num_heads, 2, head_size, META)
    plan_decode(plan, lens, starts, lens, 2, kernel="hopper_decode")
    qkv, angle = torch.zeros(4, num_heads + 4, head_size, dtype=dtype), torch.zeros(4, 1, head_size, dtype=dtype)
    scales = (torch.ones(2), torch.ones(2))
    hopper_decode(qkv, angle, angle, None, 1e-6, cache, cache, tables, plan, 1.0, scales)
    prompts = plan_prefill(starts, lens, lens, 4, group)
    hopper_prefill(qkv[:, :num_heads], cache, cache, tables, prompts, 1.0, None, scales=scales)


def compile_wide_decode(dtype: torch.dtype, group: int, head_size: int) -> None:
    """Compile for the most query heads per KV head, of the largest size: a tile must leave room for them."""
    cache, lens, starts = torch.zeros(4, 16, 1, head_size, dtype=dtype), ints(4), ints(5)
    quantized_cache, scales = torch.zeros(4, 16, 1, head_size, dtype=torch.int8), (torch.ones(1), torch.ones(1))
    plan = DecodePlan.allocate(4, group, 1, head_size, META)
    plan_decode(plan, lens, starts, lens, 1)
    q = torch.zeros(4, group, head_size, dtype=dtype)
    paged_decode_triton(q, cache, cache, ints(4, 4), starts, plan, 1.0)
    paged_decode_triton(q, quantized_cache, quantized_cache, ints(4, 4), starts, plan, 1.0, scales=scales)


def compile_sampling() -> None:
    rows, longs = ints(16), ints(16, dtype=torch.int64)
    table = DeviceParameters(16, META).table
    for dtype, any_random, any_filtered in (
        (torch.float32, True, True),
        (torch.bfloat16, True, False),
        (torch.float32, False, False),
    ):
        logits = torch.zeros(16, 151_936, dtype=dtype)
        sample_triton(
            logits,
            rows,
            table,
            output_index=longs,
            any_random=any_random,
            any_filtered=any_filtered,
        )
    drafted = torch.zeros(16, 151_936, dtype=torch.bfloat16)
    for dtype, num_siblings, any_filtered in ((torch.bfloat16, 1, False), (torch.float32, 4, True)):
        rejection_sample_triton(
            drafted.to(dtype),
            rows,
            table,
            output_index=longs,
            draft_logits=drafted,
            draft_rows=rows,
            siblings=ints(16, num_siblings),
            any_filtered=any_filtered,
        )


def launch_all() -> None:
    """Launch every kernel that the table can choose for the GPU of the dry run."""
    is_hopper = has_hopper(META)
    for dtype in (torch.bfloat16,) if ONE_EACH else (torch.bfloat16, torch.float16, torch.float32):
        compile_small(dtype)
        compile_packed(dtype)
        compile_experts(dtype)
        if is_hopper and dtype != torch.float32:
            compile_hopper_products(dtype)
            compile_packed_on_hopper(dtype)
    compile_attention(torch.bfloat16, 4, 128, None, None)
    compile_attention(torch.float16, 8, 64, 100, 20.0)
    compile_attention(torch.bfloat16, 2, 256, None, None)
    compile_attention(torch.float32, 4, 32, None, None)
    compile_attention(torch.float32, 2, 256, None, None)
    compile_wide_decode(torch.bfloat16, 64, 256)
    compile_wide_decode(torch.bfloat16, 128, 256)
    compile_wide_decode(torch.float32, 32, 256)
    compile_quantized_kv(torch.bfloat16, torch.float8_e4m3fn, 4, 128)
    compile_quantized_kv(torch.bfloat16, torch.float8_e4m3fn, 1, 256)
    compile_quantized_kv(torch.float16, torch.int8, 2, 64, cap=20.0)
    compile_quantized_kv(torch.float32, torch.int8, 2, 32)
    if is_hopper:
        for quantized_dtype in (torch.float8_e4m3fn, torch.int8):
            compile_quantized_kv_on_hopper(torch.bfloat16, quantized_dtype, 4, 128)
            compile_quantized_kv_on_hopper(torch.float16, quantized_dtype, 16, 64)
    compile_sampling()
    longs, int32s = ints(16, dtype=torch.int64), ints(16)
    tables = ints(4, 4)
    for all_known, depths, num_trees in ((False, None, 0), (True, None, 0), (False, int32s, 4)):
        step_inputs(
            rows=int32s,
            query_start=ints(17),
            planned_start=int32s,
            token_ids=ints(4, 64),
            num_known=int32s,
            block_tables=tables,
            block_size=16,
            input_ids=longs,
            positions=longs,
            slot_mapping=longs,
            seq_lens=int32s,
            all_known=all_known,
            depths=depths,
            num_trees=num_trees,
        )
    for places in (longs, None):
        accept(
            first=ints(17),
            rows=int32s,
            logit_index=int32s,
            sampled=longs,
            token_ids=ints(4, 64),
            num_known=int32s,
            num_real=int32s,
            parents=ints(4),
            last=int32s,
            last_token=int32s,
            path=ints(16, 3),
            places=places,
            outputs=ints(4, 64),
            output_row=ints(1),
        )
    KVMover([(torch.zeros(4, 16, 2, 64), torch.zeros(4, 16, 2, 64))]).move(
        ints(16, 3), ints(17), int32s, int32s, ints(4, 4)
    )
    for num_tokens, depth in ((1, None), (2, None), (3, 0)):
        draft_inputs(
            rows=int32s,
            num_drafts=int32s,
            token_ids=ints(4, 64),
            num_known=int32s,
            block_tables=tables,
            block_size=16,
            input_ids=longs,
            positions=longs,
            slot_mapping=longs,
            seq_lens=int32s,
            num_tokens=num_tokens,
            offset=-2,
            depth=depth,
        )
    push(int32s, int32s, longs, ints(4, 64), int32s, int32s, 0)
    following_ids(int32s, ints(17), int32s, ints(4, 64), longs, longs)
    for siblings in (1, 2):
        draft_proposals(
            first=ints(17),
            rows=int32s,
            token_ids=ints(4, 64),
            num_known=int32s,
            num_drawn=int32s,
            children=ints(5, siblings),
            kept=ints(5),
            siblings=ints(16, siblings),
            draft_rows=int32s,
            num_kept=4,
        )
    synthetic_verdict(ints(17), int32s, longs, ints(4, 64), int32s, ints(5, 1), 0.8)
    append_tokens(int32s, longs, ints(4, 64), int32s, ints(4, 16), ints(1))
    write_runs(ints(16), ints(40), 4, 10)
    prompt_lookup_triton(ints(4, 40_960), int32s, int32s, ints(16, 16), int32s, 8, 1)
    compile_scaled(torch.int8)
    if has_fp8(META):
        compile_scaled(torch.float8_e4m3fn)
    for num_rows in (2, 200):
        rows_of_x, e4m3 = torch.zeros(num_rows, 512, dtype=torch.bfloat16), torch.zeros(128, 512, dtype=torch.uint8)
        weight_only_triton(rows_of_x, e4m3.view(torch.float8_e4m3fn), torch.zeros(128, 1))
    compile_large_tiles()


def main() -> None:
    if ONE_EACH:
        mock.patch.multiple(random_sample, _TILE=2, _CANDIDATES=128).start()  # these compile faster
        mock.patch.multiple(skinny_gemm, _BLOCKS_WANTED=4).start()
    found: dict[str, Counter[str]] = {}
    for target in ("sm_80", "sm_90") if ONE_EACH else TARGETS:
        gpu = GPU_TYPES[target]
        variants = KernelVariants(gpu)
        with dry_run(gpu, variants.add), META:
            launch_all()
        wanted = list(variants.by_key.values())
        if ONE_EACH:
            wanted = list({variant.name: variant for variant in reversed(wanted)}.values())
        failures = [each for each in compile_in_processes(wanted, gpu, num_processes=2) if each.error is not None]
        for each in failures:
            print(target, each.variant.name, each.variant.constants, each.error, file=sys.stderr)
        if failures:
            sys.exit(1)
        found[target] = Counter(variant.name for variant in wanted)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
