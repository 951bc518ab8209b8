"""Counts the bytes of tensors that are alive while something runs, as a device's allocator would."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`peak`: the most bytes that tensors made inside of the block held at once; views count once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {self._key(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and (key := self._key(each)) not in self._known | given:
                self._known.add(key)
                storage = each.untyped_storage()
                self._now += storage.nbytes()
                weakref.finalize(storage, self._freed, key, storage.nbytes())
        self.peak = max(self.peak, self._now)
        return result

    def _freed(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self._now -= num_bytes

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata
