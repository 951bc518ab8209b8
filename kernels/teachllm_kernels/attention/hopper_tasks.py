"""Deal the tiles of queries to the programs of Hopper's prefill, see `hopper_prefill.py`."""

from __future__ import annotations

from teachllm_kernels._triton import gl, gluon, tl

NUM_FIELDS = 4  # per item, see `prefill_plan.PrefillPlan`

FIELDS = tl.constexpr(NUM_FIELDS)
TOKEN, NUM_QUERIES, POSITION, ROW = map(tl.constexpr, range(NUM_FIELDS))


@gluon.jit
def num_tasks(work, NUM_KV_HEADS: gl.constexpr):
    """Return the number of this program's tasks: one per whole round, and perhaps one in the last round."""
    total = gl.load(work[1]) * NUM_KV_HEADS
    rounds, left = total // gl.num_programs(0), total % gl.num_programs(0)
    return rounds + (_place(rounds) < left).to(gl.int32)


@gluon.jit
def _place(round_):
    """Return this program's place in a round: every other round goes backwards."""
    return gl.where(round_ % 2 == 0, gl.program_id(0), gl.num_programs(0) - 1 - gl.program_id(0))


@gluon.jit
def task_of(work, round_, NUM_KV_HEADS: gl.constexpr, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """Return (KV head, first token, queries, position of the first, table row, first key, end of the keys)."""
    items_ptr, _ = work
    index = round_ * gl.num_programs(0) + _place(round_)
    fields_ptr = items_ptr + index // NUM_KV_HEADS * FIELDS
    kv_head, token, num_queries = index % NUM_KV_HEADS, gl.load(fields_ptr + TOKEN), gl.load(fields_ptr + NUM_QUERIES)
    position, row = gl.load(fields_ptr + POSITION), gl.load(fields_ptr + ROW)
    begin = 0
    if WINDOW is not None:
        begin = gl.maximum(position + 1 - WINDOW, 0) // TILE * TILE
    return kv_head, token, num_queries, position, row, begin, position + num_queries
