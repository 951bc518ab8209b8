"""Scales of K and V in a checkpoint: what the tools that write them call them, and what they are scales of.

K and V are their quantized values times a scale per layer or per KV head. Every tool has its own name for it, below
`model.layers.N.self_attn` (or the attention of a drafter's layer); here `*` is k or v:

    *_scale, attn.*_scale, qkv_proj.*_scale      compressed-tensors, vLLM
    *_proj.*_scale                               modelopt
    *_proj.output_scale                          Quark, AutoFP8, compressed-tensors until 2024
    *_cache.scale                                HunYuan
    kv_scale                                     vLLM until 2024, for both

A checkpoint may hold them for those who want them. Beside them lie scales of q and of attention weights, and zeros of
asymmetric quantization: this engine uses none of those.

Sources: vLLM, `model_loader/weight_utils.py` and `layers/quantization/kv_cache.py`; compressed-tensors,
`modeling/kvcache.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from teachllm.distributed.shards import Shard
from teachllm.layers.weights.quantized_weight_loader import Slot
from teachllm.layers.weights.scheme import FLOATS, Stored

_NAMES = ("{0}_{1}", "attn.{0}_{1}", "qkv_proj.{0}_{1}", "{0}_proj.{0}_{1}", "{0}_proj.output_{1}", "{0}_cache.{1}")
_OF_BOTH, _OF_WEIGHTS = "kv_scale", ("prob_scale", "attn.prob_scale")

Keep = Callable[[torch.Tensor], None]


class ScaleSlot(Slot):
    """Receive scales of one layer or of each of its KV heads, of which a rank keeps its own; files may lack them."""

    def __init__(self, num_kv_heads: int, shard: Shard, keep: Keep) -> None:
        self.stored = Stored((1,), FLOATS, is_optional=True)
        self._num_all, self._shard, self._keep = num_kv_heads * shard.count, shard, keep

    def put(self, tensor: torch.Tensor) -> None:
        """Implement `Slot.put`."""
        if tensor.numel() not in (1, self._num_all):
            raise ValueError(
                f"has shape {list(tensor.shape)}, and a layer has one scale or one for each of {self._num_all} KV heads"
            )
        scales = tensor.float().flatten()
        self._keep(scales if len(scales) == 1 else scales[self._shard.of(len(scales))])


class _Unread(Slot):
    """Take tensors that are not read."""

    def __init__(self) -> None:
        self.stored = Stored((-1,), FLOATS, is_optional=True)

    def put(self, tensor: torch.Tensor) -> None:
        """Implement `Slot.put`; takes anything."""


def kv_scale_slots(num_kv_heads: int, shard: Shard, keep_k: Keep, keep_v: Keep) -> Iterator[tuple[str, Slot]]:
    """Under every name that one layer's attention may have them in a checkpoint.

    Args:
        num_kv_heads: of a rank, which has the part `shard` of them.
        keep_k, keep_v: take K's and V's, [1] or [num_kv_heads] float32.
    """

    def keep_both(scale: torch.Tensor) -> None:
        keep_k(scale)
        keep_v(scale)

    yield _OF_BOTH, ScaleSlot(num_kv_heads, shard, keep_both)
    for which, keep in (("k", keep_k), ("v", keep_v)):
        yield from ((name.format(which, "scale"), ScaleSlot(num_kv_heads, shard, keep)) for name in _NAMES)
    unread = [name.format(which, "zero_point") for name in _NAMES for which in "qkv"]
    unread += [name.format("q", "scale") for name in _NAMES]
    yield from ((name, _Unread()) for name in (*unread, *_OF_WEIGHTS))
