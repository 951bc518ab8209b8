"""Divide a product of up to 256 rows among programs on Hopper, for `hopper_linear.py`.

A program multiplies some rows of x by some stripes of the weight, tile by tile. The choice decides how many programs
there are, and so how many multiprocessors read, how often x is read, and how many bytes are in flight. All of it was
measured with bfloat16, see benchmarks/NOTES.md; with 8-bit operands a tile holds as many bytes, so twice the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

from teachllm_kernels._triton import PLACES

__all__ = ["MAX_ROWS", "STRIPE", "Tiling", "registers", "result_columns", "tiling_of"]

MAX_ROWS = 256
STRIPE = 64  # weight rows per warp group: as many as the tensor cores take at once
_SHARED = 226 * 1024  # bytes of shared memory per program
_SHARED_OF_TWO = 112 * 1024  # if there are more programs than places: two per multiprocessor
_MAX_STAGES = 12
_SHORT = 2048  # bytes per weight row; a product this short is mostly the start and end of its programs
_PARTS_WANTED = 128  # programs for a product in parts: nearly as many as there are places
_ONE_BLOCK = 192  # rows of x that one program can take; more are two blocks of 128
# Up to this many rows of x: (rows per program, further rows). A narrow weight gets fewer if half of the places would be
# idle, and instead of more parts, all of which the next norm must read.
_SMALL_SIZES = ((8, 8, 0), (16, 16, 0), (32, 32, 0))
_LARGE_SIZES = ((160, 128, 32), (_ONE_BLOCK, 128, 64), (MAX_ROWS, 128, 0))
_GROUPED = 64  # rows per product with group scales, whose sums and scaled sums share the registers
_SIZES = (*_SMALL_SIZES, (64, 64, 0), (96, 64, 32), (128, 128, 0), *_LARGE_SIZES)
_SIZES_OF_NARROW = (*_SMALL_SIZES, (64, 64, 0), (128, 64, 0), *_LARGE_SIZES)
_SIZES_OF_NARROW_PARTS = (*_SMALL_SIZES, (64, 32, 0), (_ONE_BLOCK, 64, 0), (MAX_ROWS, 128, 0))


@dataclass(frozen=True, slots=True)
class Tiling:
    """Describe how a product is divided.

    Attributes:
        rows: rows of x per program: a power of two.
        rest: further rows.
        box: rows per copy.
        stripes: stripes of 64 weight rows per program.
        splits: slices of the inputs (split K), one program each, whose partial sums make the result.
        block_k: columns of a tile.
        tiles: tiles per program.
        stages: tiles that are being copied or in use.
        direct: threads write the result themselves; otherwise the copy engine does, from shared memory.
    """

    rows: int
    rest: int
    box: int
    stripes: int
    splits: int
    block_k: int
    tiles: int
    stages: int
    direct: bool


def result_columns(gated: bool) -> int:
    """Return the number of result columns that a stripe of the weight makes."""
    return STRIPE // 2 if gated else STRIPE


def _rows_of_a_program(num_rows: int, all_stripes: int, parts: bool) -> tuple[int, int]:
    """Return the rows of x per program: (a power of two, further rows, which are a second product)."""
    sizes: tuple[tuple[int, int, int], ...] = _SIZES
    if parts and 4 * all_stripes <= PLACES:
        sizes = _SIZES_OF_NARROW_PARTS
    elif not parts and 2 * all_stripes <= PLACES:
        sizes = _SIZES_OF_NARROW
    return next((rows, rest) for most, rows, rest in sizes if num_rows <= most)


def tiling_of(
    num_rows: int,
    num_in: int,
    num_weight_rows: int,
    gated: bool,
    parts: bool,
    dtype_bytes: int = 2,
    grouped: bool = False,
) -> Tiling:
    """Return the tiling: all rows of x per program, fewer if places would be idle, and the stripes that end first.

    With parts a program takes one stripe, or two of a wide weight for two blocks of rows, and there are as many slices
    as fill the places. Stages take the remaining shared memory, or half of it if two programs fit. All of it was
    measured, see benchmarks/NOTES.md.

    Args:
        grouped: x has a scale for every 128 inputs of a row. A tile is two products, each of 128 inputs and at most
            `_GROUPED` rows: of two groups one after the other, or of some rows and further rows.
    """
    all_stripes = -(-num_weight_rows // STRIPE)
    rows, rest = _rows_of_a_program(num_rows, all_stripes, parts)
    if grouped and rows > _GROUPED:
        rows, rest = _GROUPED, 32 if rest > 0 else _GROUPED
    row_blocks = -(-num_rows // (rows + rest))
    block_k = 128 if grouped and rest > 0 else (256 if rows <= 64 else 128) // dtype_bytes

    def waves(stripes: int) -> int:
        return -(-(-(-all_stripes // stripes) * row_blocks) // PLACES)

    if parts:
        stripes = 2 if num_rows > _ONE_BLOCK and 4 * all_stripes > PLACES else 1
    else:  # among equals, few long programs; or, if they are short, many: their starts and ends overlap
        overlap = -1 if num_in * dtype_bytes <= _SHORT else 1
        stripes = min((1, 2, 3), key=lambda count: (waves(count) * count, waves(count) * overlap))
    blocks = -(-all_stripes // stripes) * row_blocks
    tiles = -(-num_in // block_k)
    splits = max(min(_PARTS_WANTED // blocks, tiles), 1) if parts else 1
    tiles = -(-tiles // splits)
    splits = -(-num_in // (block_k * tiles))
    direct = parts or (gated and rest > 0 and not grouped)  # parts are too large to be staged, the other leaves no room
    staged = 0 if direct else stripes * rows * result_columns(gated) * 2
    if dtype_bytes == 1 and not grouped:  # row scales, which the threads of a stripe exchange
        staged += stripes * (rows + rest) * 8
    stage = (STRIPE * stripes + rows + rest) * block_k * dtype_bytes
    if grouped:
        stage += 2 * rows * 4
    room = _SHARED
    alone = grouped and stripes > 1  # one stripe alone in the registers
    if blocks * splits > PLACES and _SHARED_OF_TWO - staged >= 3 * stage and not alone:
        room = _SHARED_OF_TWO
    stages = min(tiles, (room - staged) // stage, _MAX_STAGES)
    box = 32 if grouped and rest > 0 else min(max(8, rows // 2), 32)
    return Tiling(rows, rest, box, stripes, splits, block_k, tiles, stages, direct)


def registers(tiling: Tiling) -> dict[str, int]:
    """Return a limit on registers per thread that leaves room for the next kernel's programs beside this one's."""
    if tiling.stripes > 1:
        return {}
    return {"maxnreg": 96 if tiling.rows <= 32 else 128 if tiling.rows + tiling.rest <= 128 else 168}
