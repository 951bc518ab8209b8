"""Record what speculation goes back and forth between before a request waits for it, and time it.

The length of drafts follows load and acceptance, so an engine that speculates meets more kinds of steps than others,
and to record one takes as long as dozens of steps. So decodes of every size are recorded as the engine starts, without
drafts and with every number that a graph is padded to. Then they are timed, as is what a drafter takes to catch up:
where to draft pays is known before the first request.

What is timed are rows that know some tokens, whatever these are: attention takes its time for their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

from teachllm.spec_decode.step_times import Prior
from teachllm.worker.gpu.device_batch import DeviceBatch
from teachllm.worker.gpu.known_steps import known_tokens
from teachllm.worker.gpu.spec_decode.draft_progress import Behind
from teachllm.worker.gpu.spec_decode.gpu_drafting import GPUDrafting

_REPLAYS = 3  # of which the median counts


def seconds_of(launch: Callable[[], object], batch: DeviceBatch) -> float:
    """Return the seconds that it takes on the device."""
    times: list[float] = []
    for _ in range(_REPLAYS):
        batch.num_known.fill_(known_tokens(batch))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return median(times)


def per_token_behind(drafting: GPUDrafting) -> float:
    """Return the seconds that a drafter takes to catch up with a token; 0 if it need not."""
    if not drafting.catches_up:
        return 0.0
    batch = drafting.batch
    num_rows, num_known = batch.num_known.shape[0], known_tokens(batch)
    count = min(num_rows, max(batch.input_ids.shape[0] // num_known, 1))
    behind = [Behind(row, 0, num_known) for row in range(count)]
    drafting.catch_up(behind)  # and compiles
    return seconds_of(lambda: drafting.catch_up(behind), batch) / (count * num_known)


def as_prior(seconds: dict[tuple[int, int], float], behind: float, batch: DeviceBatch, sizes: Sequence[int]) -> Prior:
    """Return what was timed, for what `AdaptiveLength` asks.

    Args:
        seconds: by the keys of `decode_steps`, of the steps that are captured.
        behind: of a token, see `Prior`.
        sizes: as in `AdaptiveLength`.
    """
    most = max((num_seqs for num_seqs, num_drafts in seconds if num_drafts), default=0)

    def ratio(num_requests: int, levels: int) -> float:
        num_seqs = batch.sizes.sequences(min(max(num_requests, 1), batch.sizes.max_num_seqs))
        at = min(num_seqs, most)
        plain, drafting = (seconds.get((at, batch.sizes.drafts(sizes[k]))) for k in (0, levels))
        if plain is None or drafting is None:
            return 1.0 + sizes[levels]  # a step that no graph holds is longer than any that one does
        if num_seqs <= at:
            return drafting / plain
        # What drafts take beyond a plain step grows with the requests, up to as much as plain steps would.
        return min(1 + (drafting / plain - 1) * num_seqs / at, 1.0 + sizes[levels])

    return Prior(ratio, behind)
