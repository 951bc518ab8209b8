"""List the steps that an engine may meet: one of each kind that has a graph, or kernels, of its own.

Steps are padded to a few sizes (`GraphSizes`), and which kernels run depends on sizes alone. So all that may run is
known before the first request: it can be compiled, recorded and timed ahead.

    decodes   every padded number of requests, with every padded number of drafts
    prompts   a few short ones alone, which one graph holds
    mixed     any others, up to the largest size that is padded; longer ones are never padded
"""

from __future__ import annotations

from teachllm.worker.gpu.cuda_graphs import GraphSizes
from teachllm.worker.gpu.device_batch import DeviceBatch
from teachllm.worker.gpu.device_step import DeviceStep

_NUM_KNOWN = 1024  # tokens of a request, if that many fit
# Of random tokens and of filters, see `Sampler.plain_variant`: random rows without filters go through them, too.
VARIANTS = ((True, True), (False, False))
ALL_VARIANTS = ((True, True), (True, False), (False, False), None)  # without drafts; None: sampled after the graph
_MOST_DRAFTED_FOR = 64  # requests at once; for more it rarely pays, and what is needed all the same is recorded then


def decode_steps(batch: DeviceBatch, is_adaptive: bool) -> dict[tuple[int, int], DeviceStep]:
    """Return steps of decodes by (requests, drafts of each), from one request up to hundreds.

    Both numbers are padded: a batch that is not as large, or drafts less, takes the next larger ones. Without
    `is_adaptive` all draft as much as they can, but for those near their end.
    """
    num_known = max(known_tokens(batch), 1)
    counts = range(batch.max_drafts + 1) if is_adaptive else (0, batch.max_drafts)
    lengths = sorted({batch.sizes.drafts(count) for count in counts})
    found: dict[tuple[int, int], DeviceStep] = {}
    for num_seqs in batch.sizes.decodes():
        every = list(range(num_seqs))
        for num_drafts in lengths if num_seqs <= _MOST_DRAFTED_FOR else lengths[:1]:
            drafts = [num_drafts] * num_seqs if num_drafts else []
            lens, starts = [1 + num_drafts] * num_seqs, [num_known - 1] * num_seqs
            step = DeviceStep(
                rows=every,
                query_lens=lens,
                starts=starts,
                num_decodes=num_seqs,
                sampling=every,
                num_drafts=drafts,
                num_next=drafts,
                decode_len=1 + num_drafts,
                most_next=num_drafts,
            )
            if batch.sizes.full(step) is not None:
                found[num_seqs, num_drafts] = step
    return found


def known_tokens(batch: DeviceBatch) -> int:
    """Return how many tokens per request leave room for what a step adds and the next one drafts, or 0."""
    return max(min(_NUM_KNOWN, batch.token_ids.shape[1] - 2 * (1 + batch.max_drafts)), 0)


def prompt_steps(sizes: GraphSizes) -> list[DeviceStep]:
    """Return a step of each shape of the graphs that hold a few short prompts alone."""
    found: dict[tuple[int, int], DeviceStep] = {}
    for count in range(1, sizes.max_num_seqs + 1):
        each = list(range(count))
        for num_tokens in range(count, sizes.largest_mixed + 1):
            lens = [1] * (count - 1) + [num_tokens - count + 1]
            step = DeviceStep(each, lens, [0] * count, num_decodes=0, sampling=each)
            shape = sizes.full(step)
            if shape is None:  # nor is there one for more prompts
                return list(found.values())
            found.setdefault(shape, step)
    return list(found.values())


def mixed_sizes(sizes: GraphSizes) -> list[int]:
    """Return every number of tokens that mixed steps are padded to."""
    return sorted({sizes.mixed(count) for count in range(1, sizes.largest_mixed + 1)})
