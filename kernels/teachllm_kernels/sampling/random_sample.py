"""Draw one token per row, with noise that depends on the request alone, never on its place in the batch.

Adding independent Gumbel noise to log-probabilities and taking the argmax draws from exactly that distribution: no
cumulative sum, no normalisation, one pass. Two kernels do it, without a transfer to the host between the logits and the
token, so that a CUDA graph can hold both:

    _scan   cuts each row into chunks, since one program would take long for a whole row. Per chunk: the best token with
            its noise, or, for rows with filters, what `filtered_draw.py` needs
    _pick   per row: the best of all chunks, or the draw among what the filters keep

If several GPUs have the logits of some tokens each, each picks the best of its own, for rows without filters. It comes
with its score, as one number, and the largest over all GPUs is the token: 8 bytes per row, see `token_of_best`.

Sources: Gumbel, 1954; the noise is `philox.py`'s.
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, tl, triton
from teachllm_kernels.sampling.filtered_draw import best_packed, filtered_draw, group_stats, unpacked_id
from teachllm_kernels.sampling.parameter_table import CHILD_INDEX, IS_FILTERED, SEED, TEMPERATURE, ParameterTable
from teachllm_kernels.sampling.philox import STREAM_SAMPLE, gumbel_noise, philox_reference, philox_uniform_reference

__all__ = [
    "STREAM_SAMPLE",
    "cost",
    "gumbel_sample_reference",
    "philox_reference",
    "philox_uniform_reference",
    "sample_triton",
    "token_of_best",
    "workspace_bytes",
]

_BLOCK = 1024  # tokens that a program of `_scan` takes at a time
_SCAN_PROGRAMS = 2048  # about as many as a GPU holds at once; more would only leave more candidates for `_pick`
_GROUP = 64  # see `filtered_draw.py`
_TILE = 64  # groups taken at a time there
_CANDIDATES = 2048  # candidates that fit in one program's registers
_HIGHEST_ID = 0x7FFFFFFF
_TOKEN_0 = tl.constexpr(_HIGHEST_ID)  # with score 0, see `best_packed`
_PICK_WARPS = 8  # for rows with filters; more warps are faster for one row and slower for many


def gumbel_sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    output_indices: torch.Tensor,
    child_indices: torch.Tensor,
    stream: int = STREAM_SAMPLE,
) -> torch.Tensor:
    """Draw one token per row from softmax(logits / temperature).

    Args:
        logits: [num_rows, vocab_size] float32; minus infinity is never drawn while a row has a finite logit.
        temperature: [num_rows] float32, above 0.
        seeds, output_indices, child_indices: [num_rows] int64, see `philox.py`.
        stream: the purpose of the noise, see there.

    Returns:
        [num_rows] int64 token ids.
    """
    return gumbel_scores_reference(logits, temperature, seeds, output_indices, child_indices, stream).argmax(dim=-1)


def gumbel_scores_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    output_indices: torch.Tensor,
    child_indices: torch.Tensor,
    stream: int = STREAM_SAMPLE,
    first_id: int = 0,
) -> torch.Tensor:
    """Return the scores that `gumbel_sample_reference` maximizes, [num_rows, vocab_size], from `first_id` on."""
    noise = gumbel_noise_reference(seeds, output_indices, child_indices, logits.shape[-1], stream, first_id)
    return logits / temperature[:, None] + noise


def gumbel_noise_reference(
    seeds: torch.Tensor,
    output_indices: torch.Tensor,
    child_indices: torch.Tensor,
    vocab_size: int,
    stream: int,
    first_id: int = 0,
) -> torch.Tensor:
    """Return [num_rows, vocab_size] float32 noise. The arguments are those of `philox_uniform_reference`."""
    uniform = philox_uniform_reference(seeds, output_indices, child_indices, vocab_size, stream, first_id)
    # -log1p(-u) is exponentially distributed; the large noises, which decide, come from small u, where u is finest.
    return -torch.log(-torch.log1p(-uniform))


@triton.jit(do_not_specialize=["tiles_per_chunk"])  # it depends on the number of rows
def _scan(
    logits_ptr, rows_ptr,
    floats_ptr, ints_ptr, output_index_ptr,
    best_ptr, group_max_ptr, group_mass_ptr,
    vocab_size, first_id, num_groups, tiles_per_chunk,
    logits_stride, floats_stride, ints_stride,
    STREAM: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, RANDOM: tl.constexpr, FILTERED: tl.constexpr,
    SKEW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk, i = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + i).to(tl.int64)
    if row < 0:
        return
    logits_ptr += i * logits_stride
    floats_ptr += row * floats_stride
    ints_ptr += row * ints_stride
    first = chunk * tiles_per_chunk * BLOCK
    end = tl.minimum(first + tiles_per_chunk * BLOCK, vocab_size)
    heat, key, child, output = 0.0, 0, 0, 0
    if RANDOM:
        heat = tl.load(floats_ptr + TEMPERATURE)
        key, child = tl.load(ints_ptr + SEED), tl.load(ints_ptr + CHILD_INDEX)
        output = tl.load(output_index_ptr + i)
    if FILTERED:
        is_filtered = tl.load(ints_ptr + IS_FILTERED) > 0
        if is_filtered:
            to = i * num_groups
            group_stats(logits_ptr, first, end, heat, group_max_ptr + to, group_mass_ptr + to, BLOCK, GROUP)
            return

    packed = best_of_chunk(logits_ptr, first, end, heat, key, output, child, STREAM, BLOCK, RANDOM, first_id, SKEW)
    tl.store(best_ptr + i * tl.num_programs(0) + chunk, packed)


@triton.jit
def best_of_chunk(
    logits_ptr, first, end, heat, key, output, child,
    STREAM: tl.constexpr, BLOCK: tl.constexpr, RANDOM: tl.constexpr, first_id=0, SKEW: tl.constexpr = 0,
):  # fmt: skip
    """Return the winner among the columns `first` up to `end`, as `best_packed`.

    Args:
        first_id: the token of the very first column.
        SKEW: first_id modulo four: noise comes for four tokens at a time.
    """
    best_score = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = first + tl.arange(0, BLOCK)
    for start in range(first - SKEW, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < end
        if SKEW > 0:
            inside = inside & (ids >= first)
        score = tl.load(logits_ptr + ids, mask=inside, other=float("-inf")).to(tl.float32)
        if RANDOM:  # noqa: SIM102 - known when the kernel is compiled; the other one is not
            if heat > 0.0:
                # Noise times temperature instead of logits / temperature: the same argmax, without a division.
                counter = (first_id + start) // 4 + tl.arange(0, BLOCK // 4)
                score += heat * gumbel_noise(counter, key, output, child, STREAM)
        is_better = score > best_score
        best_score = tl.where(is_better, score, best_score)
        best_id = tl.where(is_better, ids, best_id)
    return best_packed(best_score, first_id + best_id)


@triton.jit(do_not_specialize=["num_chunks"])  # it depends on the number of rows
def _pick(
    logits_ptr, rows_ptr,
    floats_ptr, ints_ptr, output_index_ptr,
    best_ptr, group_max_ptr, group_mass_ptr, listed_ptr, candidates_ptr, out_ptr,
    vocab_size, num_groups, num_chunks,
    logits_stride, floats_stride, ints_stride,
    STREAM: tl.constexpr, NUM_CHUNKS_PADDED: tl.constexpr, NUM_GROUPS_PADDED: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr, CANDIDATES: tl.constexpr, FILTERED: tl.constexpr, OF_SOME: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i).to(tl.int64)
    if row < 0:
        tl.store(out_ptr + i, _TOKEN_0 if OF_SOME else 0)
        return
    if FILTERED:
        ints_ptr += row * ints_stride
        is_filtered = tl.load(ints_ptr + IS_FILTERED) > 0
        if is_filtered:
            to = i * num_groups
            token = filtered_draw(
                logits_ptr + i * logits_stride,
                floats_ptr + row * floats_stride, ints_ptr, tl.load(output_index_ptr + i),
                group_max_ptr + to, group_mass_ptr + to, listed_ptr + to, candidates_ptr + i * CANDIDATES,
                vocab_size, num_groups, STREAM, GROUP, NUM_GROUPS_PADDED, TILE, CANDIDATES,
            )  # fmt: skip
            tl.store(out_ptr + i, token)
            return

    chunk = tl.arange(0, NUM_CHUNKS_PADDED)
    packed = tl.load(best_ptr + i * num_chunks + chunk, mask=chunk < num_chunks, other=-(2**63))
    tl.store(out_ptr + i, tl.max(packed) if OF_SOME else unpacked_id(tl.max(packed)))


def sample_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    table: ParameterTable,
    output_index: torch.Tensor,
    *,
    any_random: bool,
    any_filtered: bool,
    stream: int = STREAM_SAMPLE,
    out: torch.Tensor | None = None,
    first_id: int | None = None,
) -> torch.Tensor:
    """Apply filters, add noise and take the argmax: one token per row of logits.

    Args:
        logits: [R, vocab_size] float32, bfloat16 or float16, any stride between rows; left as they are.
        rows: [R] int32, the request row of each; -1 is padding, whose token is 0.
        table: the parameters of all open requests.
        output_index: [R] int64.
        any_random: False promises that every temperature is 0: then only `rows` and the logits are read.
        any_filtered: False skips filters, because no random row has one or, for drafts, because none is wanted.
        stream: the purpose of the noise, see `philox.py`: `STREAM_DRAFT` draws what a drafter proposes.
        out: [R] int64 to write to.
        first_id: the logits are those of the tokens from this one on, and other ranks have the rest. Without filters.

    Returns:
        [R] int64, the tokens of `apply_filters` and `gumbel_sample_reference`, up to rounding; with `first_id` the
        input of `token_of_best`. A row's token does not depend on the other rows, nor on their number.

    Raises:
        ValueError: the logits of a row are not contiguous.
    """
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("logits must have their rows contiguous")
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device) if out is None else out
    filtered = any_random and any_filtered
    assert first_id is None or not filtered
    skew = (first_id or 0) % 4
    num_tiles, num_groups = triton.cdiv(vocab_size, _BLOCK), triton.cdiv(vocab_size, _GROUP)
    tiles_per_chunk = triton.cdiv(num_tiles * num_rows, max(_SCAN_PROGRAMS, num_rows))
    num_chunks = triton.cdiv(num_tiles, tiles_per_chunk)
    best = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=logits.device)
    scratch = filter_scratch(num_rows, vocab_size, logits.device) if filtered else [None] * 4
    group_max, group_mass, listed, few = scratch
    options = launch_options(logits.device)
    _scan[(num_chunks, num_rows)](
        logits_ptr=logits, rows_ptr=rows,
        floats_ptr=table.floats, ints_ptr=table.ints, output_index_ptr=output_index,
        best_ptr=best, group_max_ptr=group_max, group_mass_ptr=group_mass,
        vocab_size=vocab_size, first_id=first_id or 0, num_groups=num_groups, tiles_per_chunk=tiles_per_chunk,
        logits_stride=logits.stride(0), floats_stride=table.floats.stride(0), ints_stride=table.ints.stride(0),
        STREAM=stream, BLOCK=_BLOCK, GROUP=_GROUP, RANDOM=any_random, FILTERED=filtered, SKEW=skew,
        num_warps=4, **options,
    )  # fmt: skip
    _pick[(num_rows,)](
        logits_ptr=logits, rows_ptr=rows,
        floats_ptr=table.floats, ints_ptr=table.ints, output_index_ptr=output_index,
        best_ptr=best, group_max_ptr=group_max, group_mass_ptr=group_mass, listed_ptr=listed,
        candidates_ptr=few, out_ptr=out,
        vocab_size=vocab_size, num_groups=num_groups, num_chunks=num_chunks,
        logits_stride=logits.stride(0), floats_stride=table.floats.stride(0), ints_stride=table.ints.stride(0),
        STREAM=stream, NUM_CHUNKS_PADDED=triton.next_power_of_2(num_tiles), **filter_sizes(vocab_size),
        FILTERED=filtered, OF_SOME=first_id is not None,
        num_warps=_PICK_WARPS if filtered else 1, **options,
    )  # fmt: skip
    return out


def token_of_best(best: torch.Tensor) -> torch.Tensor:
    """Return [R] int64 tokens for what `sample_triton` returned for each rank's logits, [num_ranks, R] int64."""
    return _HIGHEST_ID - (best.amax(dim=0) & _HIGHEST_ID)


def filter_scratch(num_rows: int, vocab_size: int, device: torch.device) -> list[torch.Tensor]:
    """Allocate `group_max`, `group_mass`, `listed` and `few` of `filtered_cut`, for all rows."""
    num_groups = triton.cdiv(vocab_size, _GROUP)
    # Separate allocations: each is aligned for any number of rows, so the same compiled kernel takes it.
    sizes = (
        (num_groups, torch.float32),
        (num_groups, torch.float32),
        (num_groups, torch.int32),
        (_CANDIDATES, torch.float32),
    )
    return [torch.empty((num_rows, size), dtype=dtype, device=device) for size, dtype in sizes]


def filter_sizes(vocab_size: int) -> dict[str, int]:
    """Return the constants of `filtered_cut`."""
    padded = triton.next_power_of_2(triton.cdiv(vocab_size, _GROUP))
    return {"GROUP": _GROUP, "NUM_GROUPS_PADDED": padded, "TILE": _TILE, "CANDIDATES": _CANDIDATES}


def workspace_bytes(num_rows: int, vocab_size: int) -> int:
    """Return the most bytes that `sample_triton` allocates for rows with filters, including the result."""
    num_tiles, num_groups = -(-vocab_size // _BLOCK), -(-vocab_size // _GROUP)
    return num_rows * (8 * num_tiles + 12 * num_groups + 4 * _CANDIDATES + 8)


def cost(num_rows: int, vocab_size: int, dtype_bytes: int = 4) -> tuple[int, int]:
    """Return (bytes, FLOPs): logits in, an int64 id out; 70 integer operations per four ids, 6 float ones per id."""
    ids = num_rows * vocab_size
    return dtype_bytes * ids + 8 * num_rows, ids * 70 // 4 + 6 * ids
