"""Add up the products of a stripe's tiles, for `hopper_linear.py`; for block scales, see `hopper_blocks.py`.

Tensor cores work asynchronously: a warp group starts a product, and waits for it when it needs the result or has to
give the tile's memory back. To keep them busy, the next product starts before that.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
"""

from __future__ import annotations

from teachllm_kernels._triton import gl, gluon, hopper
from teachllm_kernels.linear.scaled.hopper_blocks import product

__all__ = ["sums", "sums_by_tile"]


@gluon.jit
def sums(acc, more, buffers, STRIPE: gl.constexpr, STRIPES: gl.constexpr, TILES: gl.constexpr, REST: gl.constexpr):
    """Return acc, and `more` for further rows, plus the products of a stripe of the weight.

    Each tile's products start before the previous tile's end.
    """
    w, x, rest, _, arrived, free = buffers
    STAGES: gl.constexpr = x.shape[0]
    for tile in range(TILES):
        stage = tile % STAGES
        hopper.mbarrier.wait(arrived.index(stage), tile // STAGES & 1)
        weight = w.index(stage * STRIPES + STRIPE).reshape([64, x.shape[2]])
        acc = hopper.warpgroup_mma(weight, x.index(stage).permute((1, 0)), acc, is_async=True)
        if REST > 0:
            more = hopper.warpgroup_mma(weight, rest.index(stage).permute((1, 0)), more, is_async=True)
            acc, more = hopper.warpgroup_mma_wait(2, [acc, more])  # the previous tile's: these two continue
        else:
            acc = hopper.warpgroup_mma_wait(1, [acc])
        if STAGES < TILES:
            hopper.mbarrier.arrive(free.index((tile + STAGES - 1) % STAGES), pred=tile > 0)
    if REST > 0:
        acc, more = hopper.warpgroup_mma_wait(0, [acc, more])
    else:
        acc = hopper.warpgroup_mma_wait(0, [acc])
    return acc, more


@gluon.jit
def sums_by_tile(acc, buffers, STRIPE: gl.constexpr, STRIPES: gl.constexpr, TILES: gl.constexpr):
    """Like `sums`, tile by tile, for 8-bit floats, which tensor cores accumulate in fewer bits than float32 has.

    A tile's sums are added up while the next tile's are computed in other registers. The loop is unrolled over several
    tiles, because the compiler does not see through iterations that begin with a product in flight. Three warp groups
    work tile by tile: the tensor cores always have one of them to serve, and none may hold one of the few stages until
    the next has arrived.
    """
    _, x, _, _, _, free = buffers
    STAGES: gl.constexpr = x.shape[0]
    FREES: gl.constexpr = STAGES < TILES
    RUN: gl.constexpr = 1 if STRIPES == 3 else 4 if TILES % 4 == 0 else 2 if TILES % 2 == 0 else 1
    even, odd = gl.zeros_like(acc), gl.zeros_like(acc)
    for run in range(TILES // RUN):
        tile = run * RUN
        begun = _next_product(buffers, tile, even, STRIPE, STRIPES)
        for i in gl.static_range(1, RUN):
            following = _next_product(buffers, tile + i, even if i % 2 == 0 else odd, STRIPE, STRIPES)
            done = hopper.warpgroup_mma_wait(1, [begun])
            acc += done
            if FREES:
                hopper.mbarrier.arrive(free.index((tile + i - 1) % STAGES))
            if i % 2 == 0:
                odd = done
            else:
                even = done
            begun = following
        done = hopper.warpgroup_mma_wait(0, [begun])
        acc += done
        if RUN % 2 == 0:
            odd = done
        else:
            even = done
        if FREES:
            hopper.mbarrier.arrive(free.index((tile + RUN - 1) % STAGES))
    return acc


@gluon.jit
def _next_product(buffers, tile, part, STRIPE: gl.constexpr, STRIPES: gl.constexpr):
    """Start `product` for a tile as soon as it has arrived."""
    w, x, _, _, arrived, _ = buffers
    STAGES: gl.constexpr = x.shape[0]
    stage = tile % STAGES
    hopper.mbarrier.wait(arrived.index(stage), tile // STAGES & 1)
    weight = w.index(stage * STRIPES + STRIPE).reshape([64, x.shape[2]])
    return product(weight, x.index(stage), part)
