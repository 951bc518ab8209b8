"""Count the bytes of tensors that are alive while code runs, as a device's allocator would.

A dispatch mode sees every tensor that PyTorch returns. A storage counts from then until it is freed; views share one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Count the tensors that are made inside of the block.

    Args:
        device_type: only tensors on a device of this type count; None if all do.

    Attributes:
        peak: the most bytes that have been alive at once.
        now: the bytes that are alive at this moment.
    """

    def __init__(self, device_type: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self.now = 0
        self._device_type = device_type
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Call the operation, and count the tensors in its result that it was not given."""
        given = {_key(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if not isinstance(each, torch.Tensor) or self._device_type not in (None, each.device.type):
                continue
            if (key := _key(each)) not in self._known | given:
                self._known.add(key)
                storage = each.untyped_storage()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, key, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _freed(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
