"""Triton's interpreter with bounds: a kernel that reads or writes outside of its arguments' memory is an error.

Without them a stray write would land in another tensor, as on a GPU, and a later test would fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from teachllm_kernels.attention.kv_move import KVMover
from teachllm_kernels.comm.one_shot_all_reduce import Mailbox


class _Bounds:
    """The memory that the running kernel may touch: first and last byte of each tensor's storage, in order."""

    def __init__(self) -> None:
        self._begins = self._ends = np.zeros(0, dtype=np.uint64)
        self._kernel = ""

    def set(self, kernel: str, tensors: Sequence[torch.Tensor]) -> None:
        storages = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in (t.untyped_storage() for t in tensors)})
        self._begins, self._ends = np.array(storages, dtype=np.uint64).reshape(-1, 2).T
        self._kernel = kernel

    def check(self, what: str, pointers: Any, mask: Any, num_bytes: int) -> None:
        chosen = mask.data.astype(bool)
        addresses = np.broadcast_to(pointers.data, chosen.shape)[chosen].astype(np.uint64)
        if not addresses.size:
            return
        low, high = addresses.min(), addresses.max() + np.uint64(num_bytes)
        if ((self._begins <= low) & (high <= self._ends)).any():
            return  # as nearly always: one tensor's
        among = np.searchsorted(self._begins, addresses, side="right").astype(np.int64) - 1
        inside = (among >= 0) & (addresses + np.uint64(num_bytes) <= self._ends[among])
        assert inside.all(), f"{self._kernel}: {(~inside).sum()} of a {what}'s {inside.size} lie outside of its tensors"


def guard(patch: pytest.MonkeyPatch) -> None:
    """Check every load and store of interpreted kernels until `patch` is undone."""
    from triton.runtime import interpreter

    bounds, builder = _Bounds(), interpreter.InterpreterBuilder
    init, load, store = interpreter.GridExecutor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    by_address: list[torch.Tensor] = []  # those that a kernel has only the addresses of
    init_mover, init_mailbox = KVMover.__init__, Mailbox.__init__

    def guarded_init(executor: Any, args: Any, kwargs: Any) -> Any:
        found = init(executor, args, kwargs)
        given = [*found[0], *found[1].values()]
        bounds.set(executor.fn.__name__, [each for each in given if isinstance(each, torch.Tensor)] + by_address)
        return found

    def guarded_load(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        bounds.check("read", pointers, mask, np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize)
        return load(self, pointers, mask, *more)

    def guarded_store(self: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        bounds.check("write", pointers, mask, value.data.dtype.itemsize)
        return store(self, pointers, value, mask, *more)

    def guarded_mover(self: Any, caches: Any) -> None:
        init_mover(self, caches)
        by_address[:] = [tensor for cache in caches for tensor in cache]

    def guarded_mailbox(self: Any, rank: int, boxes: Any, owner: object = None) -> None:
        init_mailbox(self, rank, boxes, owner)
        by_address[:] = boxes

    patch.setattr(interpreter.GridExecutor, "_init_args_hst", guarded_init)
    patch.setattr(builder, "create_masked_load", guarded_load)
    patch.setattr(builder, "create_masked_store", guarded_store)
    patch.setattr(KVMover, "__init__", guarded_mover)
    patch.setattr(Mailbox, "__init__", guarded_mailbox)
