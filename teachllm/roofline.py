"""The roofline: the time no engine can beat for a step, and which ceiling a step that was measured has come to.

    bytes  weights once; K and V that earlier steps wrote, read; those of the step's own tokens, written
    FLOPs  2 x parameters of the layers x tokens + 2 x parameters of the head x sampled tokens
           + 4 x heads x head size x (query, key) pairs, in every layer; of the last layer for sampled tokens alone
    floor  max(bytes / read bandwidth, matrix FLOPs / GEMM rate + attention FLOPs / attention rate)

W8A8 products count as half as long: tensor cores multiply 8-bit values twice as fast as 16-bit ones.

Activations are left out: a fused step need not write them. So the kernels' own `cost()`, each counting what goes in
and out of that kernel, add up to more than this.

Of a mixture of experts the layers are those that one token meets: a router may send all tokens of a step to the same
experts, so no more of them need be read. What tokens spread over many experts take lies far above that floor.

Source: Williams, Waterman, Patterson, "Roofline", CACM 2009.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from teachllm.models.model_config import ModelConfig

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LEAST_SHARE = 0.5  # of a step's time: a floor below it is not what the step waits for


@dataclass(frozen=True)
class Ceilings:
    """Rates of one device for one dtype.

    Attributes:
        device: its name.
        dtype: of the matrix products and attention.
        read_bandwidth: bytes/s read.
        copy_bandwidth: bytes/s read and written.
        gemm_flops: FLOP/s of a large matrix product.
        attention_flops: FLOP/s of causal attention over a long sequence, masked pairs not counted.
    """

    device: str
    dtype: str
    read_bandwidth: float
    copy_bandwidth: float
    gemm_flops: float
    attention_flops: float

    def scaled(self, bandwidths: float, flops: float) -> Ceilings:
        """Return multiples of these rates."""
        return replace(
            self,
            read_bandwidth=bandwidths * self.read_bandwidth,
            copy_bandwidth=bandwidths * self.copy_bandwidth,
            gemm_flops=flops * self.gemm_flops,
            attention_flops=flops * self.attention_flops,
        )


@dataclass(frozen=True, slots=True)
class StepShape:
    """Describe how much each request computes in one step.

    Attributes:
        query_lens: new tokens of each request.
        kv_lens: tokens it has computed when the step is over.
        num_sampled: requests that sample a token.
        num_shared: leading tokens common to all, whose K and V one read can serve.
        num_held: tokens whose K and V the cache has room for in blocks that are in use: no more can be read, however
            many requests share them. None is no limit.
    """

    query_lens: Sequence[int]
    kv_lens: Sequence[int]
    num_sampled: int
    num_shared: int = 0
    num_held: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """The least that a step must do: bytes moved, FLOPs of products and of attention, W8A8 FLOPs among the former."""

    num_bytes: int
    matrix_flops: int
    attention_flops: int
    w8a8_flops: int = 0

    def seconds(self, ceilings: Ceilings) -> float:
        """The floor."""
        return max(self._seconds_to_move(ceilings), self._seconds_to_compute(ceilings))

    def raised(self, ceilings: Ceilings, seconds: float) -> Ceilings:
        """Return ceilings under which work that took so long could be done: these, if it could.

        A device cannot do more than it can. Where it has, the ceiling was measured too low, or bytes lie in a cache.
        """
        moves, computes = self._seconds_to_move(ceilings), self._seconds_to_compute(ceilings)
        return ceilings.scaled(max(1.0, moves / seconds), max(1.0, computes / seconds))

    def bound(self, ceilings: Ceilings, seconds: float) -> str:
        """Return what a step that took so long was bound by.

        "bandwidth" or "compute", whichever takes longer at its ceiling, if that is at least half of the time; else
        "overhead": launches, gaps, the host, kernels that are far from any ceiling, or experts beyond one token's.
        """
        if self.seconds(ceilings) < _LEAST_SHARE * seconds:
            return "overhead"
        moves_longer = self._seconds_to_move(ceilings) >= self._seconds_to_compute(ceilings)
        return "bandwidth" if moves_longer else "compute"

    def _seconds_to_move(self, ceilings: Ceilings) -> float:
        return self.num_bytes / ceilings.read_bandwidth

    def _seconds_to_compute(self, ceilings: Ceilings) -> float:
        matrix_flops = self.matrix_flops - self.w8a8_flops / 2
        return matrix_flops / ceilings.gemm_flops + self.attention_flops / ceilings.attention_flops


def step_work(model: ModelConfig, step: StepShape) -> Work:
    """Bytes and FLOPs of one step."""
    body, head = model.num_active_parameters, model.vocab_size * model.hidden_size
    num_tokens = sum(step.query_lens)
    size = _DTYPE_BYTES[model.dtype]
    num_bytes = model.active_bytes + (head * size if step.num_sampled else 0)
    # Of the last layer, tokens that sample nothing need no more than K and V.
    spared = 1 - step.num_sampled / num_tokens if num_tokens else 0.0
    attention_flops = 0.0
    for window, num_layers in Counter(model.windows).items():
        keys_read = _keys_read(step, window)
        keys = num_tokens + (keys_read if step.num_held is None else min(keys_read, step.num_held))
        num_bytes += num_layers * keys * 2 * model.num_kv_heads * model.head_size * model.kv_bytes
        num_whole = num_layers - (spared if window == model.windows[-1] else 0)
        attention_flops += num_whole * 4 * _pairs_of(step, window) * model.num_attention_heads * model.head_size
    num_passes = num_tokens * (1 - spared / model.num_layers)
    matrix_flops = 2 * (body * num_passes + head * step.num_sampled)
    w8a8_flops = 2 * model.num_w8a8_parameters * num_passes
    return Work(num_bytes, round(matrix_flops), round(attention_flops), round(w8a8_flops))


def _keys_read(step: StepShape, window: int | None) -> int:
    """Keys of earlier steps that a layer reads; a shared prefix once."""
    if window is None:
        return sum(step.kv_lens) - sum(step.query_lens) - (len(step.kv_lens) - 1) * step.num_shared
    olds = [kv - n - step.num_shared for n, kv in zip(step.query_lens, step.kv_lens, strict=True)]
    return sum(min(old, window - 1) for old in olds)  # of a shared prefix, the window may have left nothing


def _pairs_of(step: StepShape, window: int | None) -> int:
    """(query, key) pairs of a step: the tokens of a sequence see kv_len - query_len + 1, ..., kv_len keys, or less."""
    lens = zip(step.query_lens, step.kv_lens, strict=True)
    if window is None:
        return sum(n * (2 * kv - n + 1) for n, kv in lens) // 2
    return sum(_pairs(kv, window) - _pairs(kv - n, window) for n, kv in lens)


def _pairs(num_queries: int, window: int) -> int:
    """(query, key) pairs among the first tokens of a sequence: the k-th sees k keys, or the window's."""
    if num_queries <= window:
        return num_queries * (num_queries + 1) // 2
    return window * (window + 1) // 2 + (num_queries - window) * window
