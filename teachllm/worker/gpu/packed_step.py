"""PackedStep: a step's header as it crosses to the device, one run of int32 with a named view for each field.

The host fills it in NumPy, one kernel copies it, and the kernels of the step read the same fields on the device. Both
sides take their views from one list of sizes, so that no field is known by its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from teachllm.worker.gpu.device_step import DeviceStep

Array = TypeVar("Array", np.ndarray, torch.Tensor)


@dataclass(slots=True, frozen=True)
class PackedStep(Generic[Array]):
    """Hold the fields of a header. Each field has room for one sequence of padding in addition to those that run.

    Attributes:
        rows: [max_num_seqs + 1] int32, of each sequence its row; -1: padding.
        query_start: [max_num_seqs + 2] int32, of each sequence its first flat token.
        planned_start: [max_num_seqs + 1] int32, its first token's index in the sequence.
        sample_rows: [max_num_logits] int32, of each position that is sampled from its row; -1: padding.
        logit_index: [max_num_logits] int32, which flat token it is.
        output_row: [1] int32, which of the host's outputs is this step's.
        sample_first: [max_num_seqs + 2] int32, of each sequence that samples the first such position; without drafts
            it is empty, as is `num_next`.
        num_next: [max_num_seqs + 1] int32, of each of them, how many drafts it asks for.
    """

    rows: Array
    query_start: Array
    planned_start: Array
    sample_rows: Array
    logit_index: Array
    output_row: Array
    sample_first: Array
    num_next: Array


def field_sizes(max_num_seqs: int, max_drafts: int) -> list[int]:
    """Return the number of int32 of each field, in the order of `PackedStep`.

    Args:
        max_drafts: of a request; 0: nothing speculates.
    """
    most, most_sampled = max_num_seqs + 1, max_num_seqs * (1 + max_drafts) + 1
    speculation = [most + 1, most] if max_drafts else [0, 0]
    return [most, most + 1, most, most_sampled, most_sampled, 1, *speculation]


def on_host(sizes: list[int]) -> tuple[np.ndarray, PackedStep[np.ndarray]]:
    """Return a header of zeros, and its fields."""
    header = np.zeros(sum(sizes), dtype=np.int32)
    return header, PackedStep(*np.split(header, np.cumsum(sizes)[:-1]))


def pack(packed: PackedStep[np.ndarray], step: DeviceStep, num_seqs: int, num_tokens: int) -> None:
    """Fill a header on the host, except for `output_row`.

    Args:
        num_seqs: with padding.
        num_tokens: with padding. Each padding sequence takes one padding token while they last, the last one all that
            remain.
    """
    count, samples, num_sampling = len(step.rows), step.num_logits, len(step.sampling)
    rows, starts = np.asarray(step.rows), packed.query_start
    packed.rows[:count], packed.rows[count:num_seqs] = rows, -1
    ends = np.cumsum(step.query_lens)
    starts[0], starts[1 : count + 1] = 0, ends
    padding = num_seqs - count
    if padding:
        starts[count + 1 : num_seqs + 1] = np.minimum(ends[-1] + np.arange(1, padding + 1), num_tokens)
        starts[num_seqs] = num_tokens
    packed.planned_start[:count] = step.starts
    sampling = np.asarray(step.sampling, dtype=np.int64)
    if step.num_drafts:
        sampled = np.asarray(step.num_drafts) + 1
        last_positions = np.cumsum(sampled)
        sampling = np.repeat(sampling, sampled)
        # From the last one of a sequence backwards: 0 for the newest token's, more for those before it.
        behind = np.repeat(last_positions, sampled) - 1 - np.arange(samples)
        packed.logit_index[:samples] = ends[sampling] - 1 - behind
    else:
        packed.logit_index[:samples] = ends[sampling] - 1
    packed.sample_rows[:samples] = rows[sampling]
    packed.sample_rows[samples:], packed.logit_index[samples:] = -1, 0
    if packed.num_next.size:
        last_positions = last_positions if step.num_drafts else np.arange(1, num_sampling + 1)
        packed.sample_first[0], packed.sample_first[num_sampling + 1 :] = 0, samples
        packed.sample_first[1 : num_sampling + 1] = last_positions
        packed.num_next[:], packed.num_next[: len(step.num_next)] = 0, step.num_next


def clear(packed: PackedStep[torch.Tensor], num_seqs: int, num_tokens: int) -> None:
    """Make a header on the device one of padding alone: what graphs are captured with."""
    packed.rows.fill_(-1)
    packed.sample_rows.fill_(-1)
    packed.logit_index.fill_(0)
    torch.arange(num_seqs + 1, out=packed.query_start[: num_seqs + 1]).clamp_(max=num_tokens)
    packed.query_start[num_seqs] = num_tokens
    if packed.num_next.numel():
        packed.sample_first.fill_(0)
        packed.num_next.fill_(0)
