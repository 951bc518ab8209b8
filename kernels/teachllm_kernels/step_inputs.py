"""From rows to a step's flat tensors, on the device: which token, at which position, in which slot of the paged cache.

The device keeps a row for every running request: its token ids, its block table and its number of known tokens. The
host sends only which request computes how many tokens, so a step can be prepared before the previous one has
sampled: the sampled token is in the row by the time `step_inputs` reads it. Before that, `write_runs` copies what
the host adds to the rows from pinned memory. At the end of the step `append_tokens` writes sampled ids into the rows
for the next step, and into the host's memory; the host may read them when the step's event is done.

Source of slots and block tables: Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", 2023.
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, tl, triton

_BLOCK = 256
_RUN_BLOCK = 1024
_MAX_RUN_PROGRAMS = 16  # per run; most runs are a block-table entry or two


@triton.jit(do_not_specialize=["num_trees"])
def _step_inputs(
    rows_ptr, query_start_ptr, planned_start_ptr, token_ids_ptr, num_known_ptr, block_tables_ptr,
    input_ids_ptr, positions_ptr, slot_mapping_ptr, seq_lens_ptr,
    token_stride, table_stride,
    depths_ptr, num_trees, num_places,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, ALL_KNOWN: tl.constexpr, HAS_TREES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq = tl.program_id(0)
    row = tl.load(rows_ptr + seq).to(tl.int64)
    first = tl.load(query_start_ptr + seq)
    num_tokens = tl.load(query_start_ptr + seq + 1) - first
    if row >= 0:
        # The plan may assume drafts that were rejected; a step always computes a known token first.
        start = tl.load(num_known_ptr + row) - 1
        if ALL_KNOWN:
            start -= num_tokens - 1
        start = tl.minimum(tl.load(planned_start_ptr + seq), start)
        tl.store(seq_lens_ptr + seq, start + num_tokens)
    else:
        start = 0
        tl.store(seq_lens_ptr + seq, 0)
    for offset in range(0, num_tokens, BLOCK):
        index = offset + tl.arange(0, BLOCK)
        inside = index < num_tokens
        position = start + index
        known = inside & (row >= 0) & (position >= 0)
        token = tl.load(token_ids_ptr + row * token_stride + position, mask=known, other=0)
        block = tl.load(block_tables_ptr + row * table_stride + position // BLOCK_SIZE, mask=known, other=0).to(
            tl.int64
        )
        slot = tl.where(known, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(input_ids_ptr + first + index, token.to(tl.int64), mask=inside)
        if HAS_TREES:  # noqa: SIM102 (settled when the kernel is compiled)
            if seq < num_trees:
                position = start + tl.load(depths_ptr + index, mask=inside & (index < num_places), other=0)
        tl.store(positions_ptr + first + index, tl.where(known, position, 0).to(tl.int64), mask=inside)
        tl.store(slot_mapping_ptr + first + index, slot, mask=inside)


def step_inputs(
    rows: torch.Tensor,
    query_start: torch.Tensor,
    planned_start: torch.Tensor,
    token_ids: torch.Tensor,
    num_known: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    all_known: bool = False,
    depths: torch.Tensor | None = None,
    num_trees: int = 0,
) -> None:
    """Fill `input_ids`, `positions`, `slot_mapping` and `seq_lens` from the others; one program per sequence.

    Args:
        rows: [num_seqs] int32, the row of each sequence; -1 is padding, whose tokens get id 0 and slot -1.
        query_start: [num_seqs + 1] int32, first token of each sequence in the flat batch.
        planned_start: [num_seqs] int32, an upper bound for the index of its first token to compute in the sequence.
        token_ids: [max_rows, max_len] int32.
        num_known: [max_rows] int32, tokens of prompt and outputs.
        block_tables: [max_rows, max_blocks] int32.
        input_ids, positions, slot_mapping: [num_tokens] int64, written.
        seq_lens: [num_seqs] int32, written: tokens of each sequence after this step; 0 for padding.
        all_known: no token is a draft: a sequence's last token is at most its newest one. Otherwise its first token is.
        depths: [num_places] int32, if drafts are trees: each one's position relative to the sequence's first token.
        num_trees: this many of the first sequences have such drafts, or could have.
    """
    _step_inputs[(rows.shape[0],)](
        rows_ptr=rows,
        query_start_ptr=query_start,
        planned_start_ptr=planned_start,
        token_ids_ptr=token_ids,
        num_known_ptr=num_known,
        block_tables_ptr=block_tables,
        input_ids_ptr=input_ids,
        positions_ptr=positions,
        slot_mapping_ptr=slot_mapping,
        seq_lens_ptr=seq_lens,
        token_stride=token_ids.stride(0),
        table_stride=block_tables.stride(0),
        depths_ptr=depths,
        num_trees=num_trees,
        num_places=0 if depths is None else depths.shape[0],
        BLOCK_SIZE=block_size,
        BLOCK=_BLOCK,
        ALL_KNOWN=all_known,
        HAS_TREES=depths is not None,
        **launch_options(rows.device),
    )


@triton.jit(do_not_specialize=["num_rows"])  # it differs from batch to batch
def _append_tokens(
    rows_ptr, sampled_ptr, token_ids_ptr, num_known_ptr, outputs_ptr, output_row_ptr,
    num_rows, token_stride, output_stride,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    index = tl.arange(0, ROWS)
    row = tl.load(rows_ptr + index, mask=index < num_rows, other=-1).to(tl.int64)
    token = tl.load(sampled_ptr + index, mask=row >= 0, other=0)
    known = tl.load(num_known_ptr + row, mask=row >= 0, other=0)
    tl.store(token_ids_ptr + row * token_stride + known, token.to(tl.int32), mask=row >= 0)
    tl.store(num_known_ptr + row, known + 1, mask=row >= 0)
    tl.store(outputs_ptr + tl.load(output_row_ptr) * output_stride + index, token.to(tl.int32), mask=row >= 0)


def append_tokens(
    rows: torch.Tensor,
    sampled: torch.Tensor,
    token_ids: torch.Tensor,
    num_known: torch.Tensor,
    outputs: torch.Tensor,
    output_row: torch.Tensor,
) -> None:
    """Append sampled tokens to the known ones, for the host, too.

    Args:
        rows: [num_rows] int32, no row twice; -1 is padding.
        sampled: [num_rows] int64 ids.
        token_ids: [max_rows, max_len] int32, grown in place; no row may be full.
        num_known: [max_rows] int32, incremented in place.
        outputs: [num_steps, max_rows] int32, on the device or in the host's pinned memory.
        output_row: [1] int32, the row of `outputs` to write to.
    """
    _append_tokens[(1,)](
        rows_ptr=rows,
        sampled_ptr=sampled,
        token_ids_ptr=token_ids,
        num_known_ptr=num_known,
        outputs_ptr=outputs,
        output_row_ptr=output_row,
        num_rows=rows.shape[0],
        token_stride=token_ids.stride(0),
        output_stride=outputs.stride(0),
        ROWS=triton.next_power_of_2(rows.shape[0]),
        **launch_options(rows.device),
    )


@triton.jit
def _write_runs(to_ptr, packed_ptr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    run, num_runs = tl.program_id(0), tl.num_programs(0)
    to_ptr += tl.load(packed_ptr + run).to(tl.int64)
    first, end = tl.load(packed_ptr + num_runs + run), tl.load(packed_ptr + num_runs + run + 1)
    values_ptr = packed_ptr + 2 * num_runs + 1
    for offset in range(first + tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        index = offset + tl.arange(0, BLOCK)
        tl.store(to_ptr + index - first, tl.load(values_ptr + index, mask=index < end), mask=index < end)


def write_runs(to: torch.Tensor, packed: torch.Tensor, num_runs: int, longest: int) -> None:
    """Write runs of consecutive values, the plan's additions to the rows: tokens, block-table entries, lengths.

    Args:
        to: [size] int32.
        packed: int32, on the same device or in the host's pinned memory: the place of each run's first value in `to`,
            [num_runs]; where each run begins among the values, and where the last one ends, [num_runs + 1]; the
            values. No two runs may overlap.
        longest: the number of values in the longest run.
    """
    programs = min(triton.cdiv(longest, _RUN_BLOCK), _MAX_RUN_PROGRAMS)
    _write_runs[(num_runs, programs)](to_ptr=to, packed_ptr=packed, BLOCK=_RUN_BLOCK, **launch_options(to.device))


def cost(num_tokens: int, num_sampled: int = 0, num_written: int = 0) -> tuple[int, int]:
    """Return (bytes, FLOPs) of a step's three kernels. Latency-bound.

    A token's id and block in, its id, position and slot out; per sampled token its row, id and place in, its id to
    the row and to the host, the row's length in and out; per written value the value in and out.
    """
    return num_tokens * (4 + 4 + 3 * 8) + num_sampled * (4 + 8 + 2 * 4 + 2 * 4) + num_written * 2 * 4, 0
