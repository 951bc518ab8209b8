"""How the products of a stripe's tiles become sums, for `hopper_linear.py`; of blocks, see `hopper_blocks.py`.

Tensor cores work by themselves: a warp group begins a product, and waits for it when it wants the result or has to give
the tile's memory back. So that they are never idle, the next one begins before that.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
"""

from __future__ import annotations

from teachllm_kernels._triton import gl, gluon, hopper
from teachllm_kernels.linear.scaled.hopper_blocks import product

__all__ = ["sums", "sums_by_tile"]


@gluon.jit
def sums(acc, more, buffers, STRIPE: gl.constexpr, STRIPES: gl.constexpr, TILES: gl.constexpr, REST: gl.constexpr):
    """acc, and of further rows `more`, plus the products of a stripe of the weight. A tile's begin behind another's."""
    w, x, rest, _, arrived, free = buffers
    STAGES: gl.constexpr = x.shape[0]
    for tile in range(TILES):
        stage = tile % STAGES
        hopper.mbarrier.wait(arrived.index(stage), tile // STAGES & 1)
        weight = w.index(stage * STRIPES + STRIPE).reshape([64, x.shape[2]])
        acc = hopper.warpgroup_mma(weight, x.index(stage).permute((1, 0)), acc, is_async=True)
        if REST > 0:
            more = hopper.warpgroup_mma(weight, rest.index(stage).permute((1, 0)), more, is_async=True)
            acc, more = hopper.warpgroup_mma_wait(2, [acc, more])  # of the tile before: these go on
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
    """As `sums`, of 8-bit floats, which tensor cores add up in fewer bits than float32 has: each tile's apart.

    They are added up while the next tile's are computed in other registers, several tiles long: compilers do not see
    through turns that begin with a product under way. Three groups of warps do it tile by tile: the tensor cores always
    have one of them to serve, and none may keep a stage, of which there are few, until the next one has come.
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
    """As `product`, of a tile, as soon as it is there."""
    w, x, _, _, arrived, _ = buffers
    STAGES: gl.constexpr = x.shape[0]
    stage = tile % STAGES
    hopper.mbarrier.wait(arrived.index(stage), tile // STAGES & 1)
    weight = w.index(stage * STRIPES + STRIPE).reshape([64, x.shape[2]])
    return product(weight, x.index(stage), part)
