"""The newest token of a decode on Hopper: norm and rotate its query heads and key, for `hopper_decode.py`."""

from __future__ import annotations

from teachllm_kernels._triton import gl, gluon


@gluon.jit
def _normed_and_turned(x, y, weight_x, weight_y, cos, signed_sin, eps, AXIS: gl.constexpr, HAS_NORM: gl.constexpr):
    """Like `rotary.normed_and_turned`, for whole heads, each of which lies in the threads of one warp. Float32.

    y: for each channel of x, the channel that the rotation pairs with it.
    """
    x, y = x.to(gl.float32), y.to(gl.float32)
    scale = 1.0
    if HAS_NORM:
        scale = gl.rsqrt(gl.sum(x * x, axis=AXIS) / x.shape[AXIS] + eps)
        if AXIS == 1:
            scale = scale[:, None]
        x *= weight_x.to(gl.float32)
        y *= weight_y.to(gl.float32)
    return (x * cos.to(gl.float32) + y * signed_sin.to(gl.float32)) * scale


@gluon.jit
def query_and_key(
    new, kv_head,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, HAS_NORM: gl.constexpr,
    LOADED: gl.constexpr,
):  # fmt: skip
    """Return this step's query heads of a KV head, [HEADS, D], and its key, [D], normed and rotated, float32."""
    qkv_ptr, cos_ptr, sin_ptr, qk_weight_ptr, eps, _, _ = new
    head = gl.arange(0, HEADS, gl.SliceLayout(1, LOADED))
    column = gl.arange(0, D, gl.SliceLayout(0, LOADED))
    across = gl.max_contiguous(
        gl.multiple_of((column + D // 2) % D, 8), 8
    )  # the channel that the rotation pairs with each
    is_query = (head < GROUP)[:, None]
    q_head = ((kv_head * GROUP + head) * D)[:, None]
    q_at, q_across = q_head + column[None, :], q_head + across[None, :]
    k_head = (NUM_KV_HEADS * GROUP + kv_head) * D
    # All loads start at once: one round trip to memory.
    cos, signed_sin = gl.load(cos_ptr + column), gl.load(sin_ptr + column)
    q_x, q_y = gl.load(qkv_ptr + q_at, is_query, 0.0), gl.load(qkv_ptr + q_across, is_query, 0.0)
    k_x, k_y = gl.load(qkv_ptr + (k_head + column)), gl.load(qkv_ptr + (k_head + across))
    norm_q_x, norm_q_y, norm_k_x, norm_k_y = q_x, q_y, k_x, k_y
    if HAS_NORM:
        norm_q_x, norm_q_y = (
            gl.load(qk_weight_ptr + q_at, is_query, 0.0),
            gl.load(qk_weight_ptr + q_across, is_query, 0.0),
        )
        norm_k_x, norm_k_y = gl.load(qk_weight_ptr + (k_head + column)), gl.load(qk_weight_ptr + (k_head + across))
    query = _normed_and_turned(q_x, q_y, norm_q_x, norm_q_y, cos[None, :], signed_sin[None, :], eps, 1, HAS_NORM)
    return query, _normed_and_turned(k_x, k_y, norm_k_x, norm_k_y, cos, signed_sin, eps, 0, HAS_NORM)
