"""One tile of decode attention (lesson 08): load K and V through the block table, score them, add them to the sums.

A softmax over all keys would need all scores first. Online softmax needs three values per row instead: the highest
score so far, and, relative to it, the sum of the weights and the weighted sum of V. A tile with a higher score rescales
the two sums; after the last tile, acc / total is the exact result. So scores never leave the chip.

`paged_decode.py` is the loop around these functions. The reader of lesson 08 writes `add_tile`.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

from teachllm_kernels._triton import tl, triton
from teachllm_kernels.attention.kv_quantization import dequantize_unscaled

__all__ = ["add_tile", "attend_tile", "capped", "keys_and_values", "visible_keys"]


@triton.jit
def keys_and_values(
    k_cache_ptr, v_cache_ptr, block, key, kv_head, channel, is_key, is_channel,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Load K [D_PADDED, TILE] and V [TILE, D_PADDED] of a tile's keys, as they are stored."""
    kv_row = ((block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * D
    k_ptrs, v_ptrs = k_cache_ptr + kv_row[None, :] + channel[:, None], v_cache_ptr + kv_row[:, None] + channel[None, :]
    k = tl.load(k_ptrs, mask=is_key[None, :] & is_channel[:, None], other=0.0)
    return k, tl.load(v_ptrs, mask=is_key[:, None] & is_channel[None, :], other=0.0)


@triton.jit
def add_tile(score, v, highest, total, acc):
    """Add a tile to (highest, total, acc): the highest score, and relative to it the sums of weights and of weighted V.

    `score` [ROWS, TILE] is in base 2, -inf where a query may not look; `v` is [TILE, D].
    """
    higher = tl.maximum(highest, tl.max(score, axis=1))
    base = tl.where(higher == -float("inf"), 0.0, higher)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(highest - base)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return higher, total * shrink + tl.sum(weight, axis=1), acc


@triton.jit
def attend_tile(
    queries, k, v, visible, scale_log2, soft_cap, highest, total, acc, HAS_CAP: tl.constexpr, QUANTIZED_KV: tl.constexpr
):
    """Compute the scores of a tile's keys and add the tile with `add_tile`."""
    if QUANTIZED_KV:
        k, v = dequantize_unscaled(k, queries.dtype), dequantize_unscaled(v, queries.dtype)
    score = tl.dot(queries, k, input_precision="ieee") * scale_log2  # [ROWS, TILE]
    if HAS_CAP:
        score = capped(score, soft_cap)
    return add_tile(tl.where(visible, score, -float("inf")), v, highest, total, acc)


@triton.jit
def capped(score, soft_cap):
    """Return tanh(score / soft_cap) * soft_cap; both in the base-2 scale."""
    return (2.0 * tl.sigmoid(2.0 * score / soft_cap) - 1.0) * soft_cap


@triton.jit
def visible_keys(
    key, is_key, query, is_row, first_new, tree_ptr, first_place, WINDOW: tl.constexpr, HAS_TREE: tl.constexpr
):
    """Return which keys each of several new tokens sees, [ROWS, TILE]; the first new token is at `first_new`."""
    ahead = key - first_new  # index among the new tokens; negative: before them
    key_position, query_position = ahead, query  # from the first new token's
    if HAS_TREE:
        ahead += first_place  # from the tree's first token on
        bits = tl.load(tree_ptr + first_place + query, mask=is_row, other=0)
        sees = ((bits[:, None] >> tl.maximum(ahead, 0)[None, :]) & 1) != 0
        visible = is_key[None, :] & ((ahead < 0)[None, :] | sees)
        if WINDOW > 0:
            query_position = _depth(bits)
            key_bits = tl.load(tree_ptr + ahead, mask=is_key & (ahead >= 0), other=0)
            key_position = tl.where(ahead < 0, ahead, _depth(key_bits))
    else:
        visible = is_key[None, :] & (ahead[None, :] <= query[:, None])
    if WINDOW > 0:
        visible = visible & (key_position[None, :] > query_position[:, None] - WINDOW)
    return visible


@triton.jit
def _depth(bits):
    """Return how many of a tree's tokens lie before the one that sees `bits`: it sees them, and itself."""
    depth = tl.full(bits.shape, -1, tl.int32)
    for j in range(64):
        depth += ((bits >> j) & 1).to(tl.int32)
    return depth
