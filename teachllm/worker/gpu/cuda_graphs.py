"""CUDA graphs (lesson 09): a step's hundreds of kernels, recorded once and launched by one call.

Launching a kernel costs the host microseconds, and a decode step has more kernels than microseconds: recorded as a
graph, its length on the host no longer matters. A recording fixes every address and size, so it is made for a padded
number of tokens, reads and writes only tensors that stay where they are, and leaves all lengths to the device.

    full        a step of decodes alone, or of a few short prompts alone, from row to sampled token: how attention is
                launched does not depend on lengths there, it finds them on the device
    piecewise   a mixed step: everything between two attentions is a piece, attention itself is launched in between,
                as it is best for the batch at hand

What ranks exchange inside is counted at each replay, as it was when it was recorded.

Source: Gray, "Getting Started with CUDA Graphs", 2019; the pieces are vLLM's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from teachllm.distributed.group import Counts, Traffic
from teachllm.layers.attention import AttentionMetadata
from teachllm.layers.weak_tensor import weak_tensor
from teachllm.worker.gpu.device_step import DeviceStep
from teachllm_kernels.first_launch import FirstLaunchError, refusing_first_launches

_LARGEST_MIXED_GRAPH = 512  # tokens; a longer step takes longer on the device than its launches take on the host
_PROMPTS = 8  # sequences in a graph of prompts alone: up to seven prompts, since at least one is padding
_OTHERS_MAY_CALL = "thread_local"  # other threads wait for results, and NCCL's watches its operations, meanwhile

AttentionCall = Callable[[AttentionMetadata], None]
_Record = Callable[[Callable[[], None], Callable[[], None]], None]  # calls its arguments to begin and end a graph


class FullKey(NamedTuple):
    """Name a full graph by all that is fixed in it.

    Attributes:
        num_seqs, num_tokens: with padding.
        decode_len: the most tokens per decode; 0: all are prompts.
        variant: of the sampler, see `Sampler.plain_variant`; None: the graph ends with logits.
        num_drafts: the most drafts that it proposes for a request; None: the drafter runs outside.
    """

    num_seqs: int
    num_tokens: int
    decode_len: int
    variant: tuple[bool, bool] | None
    num_drafts: int | None

    @property
    def samples(self) -> bool:
        """Return whether the step samples in the graph, and drafts if drafts are asked for.

        Otherwise the graph ends with logits, and both are done after it.
        """
        return self.variant is not None


@dataclass(frozen=True)
class GraphSizes:
    """The sizes that steps are padded to, few enough that each is soon recorded.

    Attributes:
        max_num_seqs, max_num_tokens: of a step.
        max_drafts: of a request; 0: nothing speculates.
    """

    max_num_seqs: int
    max_num_tokens: int
    max_drafts: int = 0

    def drafts(self, count: int) -> int:
        """Return the number of drafts per request that a step with at most `count` is padded to."""
        return min(1 << (count - 1).bit_length(), self.max_drafts) if count else 0

    def sequences(self, count: int) -> int:
        """Return the number of decodes that `count` are padded to."""
        return _padded_size(count, self.max_num_seqs)

    def decodes(self) -> list[int]:
        """Return every number of decodes that steps are padded to."""
        return sorted({self.sequences(count) for count in range(1, self.max_num_seqs + 1)})

    def full(self, step: DeviceStep) -> tuple[int, int] | None:
        """Return (sequences, tokens), with padding, of the graph that holds a whole step; None: no graph does.

        Decodes alone are padded to a graph's size, and so are a few short prompts alone, with at least one padding
        sequence, which owns the tokens that are padding, if there are any.
        """
        count = len(step.rows)
        if step.is_decode:
            size = self.sequences(count)
            num_tokens = size * step.decode_len
            if num_tokens > self.max_num_tokens:
                return None
            # What some have less than others is padding, and padding needs an owner.
            return size + (step.decode_len > 1), num_tokens
        num_seqs = min(_PROMPTS, self.max_num_seqs + 1)
        if step.num_decodes or step.num_drafts or count >= num_seqs or step.num_tokens > self.largest_mixed:
            return None
        return num_seqs, _padded_size(step.num_tokens, self.max_num_tokens)

    @property
    def largest_mixed(self) -> int:
        """Return the most tokens that a graph, or its pieces, hold of a step with prompts."""
        return min(_LARGEST_MIXED_GRAPH, self.max_num_tokens)

    def mixed(self, num_tokens: int) -> int:
        """Return the tokens of a mixed step with padding; a step that is longer than any graph is not padded."""
        return _padded_size(num_tokens, self.max_num_tokens) if num_tokens <= _LARGEST_MIXED_GRAPH else num_tokens


def _padded_size(count: int, largest: int) -> int:
    """Return the graph size for `count` tokens: powers of two up to 8, steps of 8 up to 32, 16 to 64, 32 to 512, 64."""
    if count <= 8:
        size = 1 << (count - 1).bit_length()
    else:
        step = 8 if count <= 32 else 16 if count <= 64 else 32 if count <= 512 else 64
        size = -(-count // step) * step
    return min(size, largest)


class Graphs:
    """Recordings by key; they share one pool of memory, so a result is there until the next replay of any of them.

    Args:
        traffic: counts what this process exchanges with other ranks; None: there are none.
        is_shared: there are others, and what is recorded may exchange something with them.
    """

    def __init__(self, device: torch.device, traffic: Traffic | None = None, is_shared: bool = False) -> None:
        self._traffic = traffic or Traffic()
        self._sent: dict[Hashable, Counts] = {}  # at each replay
        self._pool, self._pool_is_new = torch.cuda.graph_pool_handle(), True
        self._stream = torch.cuda.Stream(device)
        self._is_shared, self._warms_up, self._has_failed = is_shared, True, False
        self._seen: set[Hashable] = set()
        self._failed: set[Hashable] = set()
        self._full: dict[Hashable, tuple[torch.cuda.CUDAGraph, torch.Tensor | None]] = {}
        self._pieces: dict[Hashable, tuple[list[torch.cuda.CUDAGraph], list[AttentionCall], torch.Tensor]] = {}

    def clear(self) -> None:
        """Drop all recordings. A communicator whose operations are in one cannot be closed before."""
        self._full.clear()
        self._pieces.clear()

    def has(self, key: Hashable) -> bool:
        return key in self._full or key in self._pieces

    def is_due(self, key: Hashable) -> bool:
        """Note a key; return whether it was noted before: a key that occurs once is not worth a recording."""
        seen = key in self._seen
        self._seen.add(key)
        return seen and key not in self._failed

    def capture(self, key: Hashable, run: Callable[[], torch.Tensor | None]) -> bool:
        """Record `run`. If it launches a kernel for the first time, it runs once before.

        Returns:
            Whether it could be recorded; if not, it is not tried again, and a warning says why.
        """
        results: list[torch.Tensor | None] = []

        def record(begin: Callable[[], None], end: Callable[[], None]) -> None:
            begin()
            try:
                results[:] = [run()]
            finally:
                end()  # or the stream would go on recording

        recorded = self._recorded(key, run, record)
        if recorded is None:
            return False
        ([graph], self._sent[key]), [result] = recorded, results
        self._full[key] = (graph, None if result is None else weak_tensor(result))
        return True

    def capture_pieces(
        self, key: Hashable, run: Callable[[Callable[[AttentionCall], None] | None], torch.Tensor]
    ) -> bool:
        """Record `run` in pieces; otherwise like `capture`.

        Args:
            run: hands every attention call to its argument (None: there is nothing to attend to yet).
        """
        results: list[torch.Tensor] = []
        calls: list[AttentionCall] = []

        def record(begin: Callable[[], None], end: Callable[[], None]) -> None:
            def outside(call: AttentionCall) -> None:
                end()
                calls.append(call)
                begin()

            calls.clear()
            begin()
            try:
                results[:] = [run(outside)]
            finally:
                end()

        recorded = self._recorded(key, lambda: run(None), record)
        if recorded is None:
            return False
        (graphs, self._sent[key]), [result] = recorded, results
        self._pieces[key] = (graphs, calls, weak_tensor(result))
        return True

    def _recorded(
        self, key: Hashable, run: Callable[[], object], record: _Record
    ) -> tuple[list[torch.cuda.CUDAGraph], Counts] | None:
        """Record graphs; return None if that fails.

        The first launch of a kernel loads it and makes what it keeps between launches, which cannot be recorded. To run
        everything before costs as much as to record it, so it is done only where it is needed: for the first recording
        of all, since libraries have first launches, too; after one that has failed; and always where there are other
        ranks, which run it as well and would wait for this one.
        """
        if key in self._failed:
            return None
        if not self._warms_up:
            try:
                return self._record(record)
            except FirstLaunchError:
                if self._pool_is_new:  # what was begun in it is gone, and took it along
                    self._renew_pool()
            except RuntimeError:
                self._has_failed = True
                self._renew_pool()
        try:
            self._warm_up(run)
            recorded = self._record(record)
        except RuntimeError as error:
            self._give_up(key, error)
            return None
        self._warms_up = self._is_shared or self._has_failed
        return recorded

    def _record(self, record: _Record) -> tuple[list[torch.cuda.CUDAGraph], Counts]:
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(self._pool, capture_error_mode=_OTHERS_MAY_CALL)

        def end() -> None:
            graphs[-1].capture_end()

        torch.cuda.synchronize()
        # Not `torch.cuda.graph`, which empties the allocator's cache each time.
        with torch.cuda.stream(self._stream), self._traffic.recorded() as sent, refusing_first_launches():
            record(begin, end)
        torch.cuda.current_stream().wait_stream(self._stream)
        self._pool_is_new = False
        return graphs, sent

    def _give_up(self, key: Hashable, error: RuntimeError) -> None:
        self._failed.add(key)
        self._has_failed = True
        self._renew_pool()
        reason = str(error).splitlines()[0]
        warnings.warn(f"running without a CUDA graph for {key}, which could not be recorded: {reason}", stacklevel=5)

    def _renew_pool(self) -> None:
        """PyTorch before 2.12 takes the old pool for one that is still recorded to (pytorch/pytorch#180395)."""
        self._pool, self._pool_is_new = torch.cuda.graph_pool_handle(), True

    def replay(self, key: Hashable) -> torch.Tensor | None:
        """Launch a full recording; return the tensor that it writes to, the same one every time."""
        graph, result = self._full[key]
        graph.replay()
        self._traffic.replay(self._sent[key])
        return result

    def replay_pieces(self, key: Hashable, metadata: AttentionMetadata) -> torch.Tensor:
        """Launch a recording in pieces, with attention for this step in between."""
        graphs, calls, result = self._pieces[key]
        graphs[0].replay()
        for call, graph in zip(calls, graphs[1:], strict=True):
            call(metadata)
            graph.replay()
        self._traffic.replay(self._sent[key])
        return result

    def _warm_up(self, run: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
