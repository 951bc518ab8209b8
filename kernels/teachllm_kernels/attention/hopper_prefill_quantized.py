"""A quantized KV cache in Hopper's prefill: a further group of four warps in `hopper_prefill.py` dequantizes K and V.

In that kernel K and V are right operands, which come from shared memory, and both attending groups read all of them. So
quantized tiles are fetched to separate buffers and converted to float16 once, into the buffers that the groups expect.
That is little work beside theirs, and it is done by warps that have nothing else to do. Tiles have 64 keys: with more,
a thread's scores, sums and queries would not fit in the registers that the further group leaves.

Q becomes float16, too. It goes through registers on its way to that and stays there: it is the left operand.
"""

from __future__ import annotations

from teachllm_kernels._triton import gdc_wait, gl, gluon, hopper
from teachllm_kernels.attention.hopper_kv_dequantize import dequantize_unscaled
from teachllm_kernels.attention.hopper_tasks import num_tasks, task_of

TILE = 64  # keys
STAGES = 3  # tiles, quantized and dequantized


@gluon.jit
def convert(quantized, fetched, buffers, made, work, NUM_KV_HEADS: gl.constexpr, WINDOW: gl.constexpr):
    """Four warps: dequantize tiles of keys and values, one after the other.

    quantized, fetched  the copying warp's buffers (K, V), and their barriers (K's arrived, free, V's arrived, free)
    buffers, made       the same for the buffers of dequantized tiles, which the attending groups read
    """
    quantized_k, quantized_v = quantized
    k_fetched, k_taken, v_fetched, v_taken = fetched
    k, v = buffers
    k_arrived, k_free, v_arrived, v_free = made
    FETCHED: gl.constexpr = quantized_k.shape[0]
    STAGES: gl.constexpr = k.shape[0]
    TILE: gl.constexpr = k.shape[1]
    D: gl.constexpr = k.shape[2]
    MOVED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    key = gl.arange(0, TILE, gl.SliceLayout(1, MOVED))
    count = 0
    gdc_wait()
    for task in range(num_tasks(work, NUM_KV_HEADS)):
        _, _, _, _, _, begin, end = task_of(work, task, NUM_KV_HEADS, TILE, WINDOW)
        for first_key in range(begin, end, TILE):
            source, source_parity = count % FETCHED, count // FETCHED & 1
            stage, parity = count % STAGES, (count // STAGES - 1) & 1
            hopper.mbarrier.wait(k_fetched.index(source), source_parity)
            keys = quantized_k.index(source).load(MOVED)
            hopper.mbarrier.arrive(k_taken.index(source))
            hopper.mbarrier.wait(k_free.index(stage), parity, count >= STAGES)
            k.index(stage).store(dequantize_unscaled(keys))
            hopper.fence_async_shared()
            hopper.mbarrier.arrive(k_arrived.index(stage))
            hopper.mbarrier.wait(v_fetched.index(source), source_parity)
            values = dequantize_unscaled(quantized_v.index(source).load(MOVED))
            hopper.mbarrier.arrive(v_taken.index(source))
            if first_key + TILE > end:  # slots after the end were not fetched, and 0 * NaN is NaN
                values = gl.where((first_key + key < end)[:, None], values, 0.0)
            hopper.mbarrier.wait(v_free.index(stage), parity, count >= STAGES)
            v.index(stage).store(values)
            hopper.fence_async_shared()
            hopper.mbarrier.arrive(v_arrived.index(stage))
            count += 1
