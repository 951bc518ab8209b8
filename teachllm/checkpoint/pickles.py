"""Tensors of a checkpoint that was written with `torch.save`: pickles, of which only plain tensors are read.

A pickle can run code when it is read, so PyTorch's restricted unpickler reads these files, and only where the user asks
for it with `load_format="pt"`.

Source: https://docs.pytorch.org/docs/stable/generated/torch.load.html
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from teachllm.checkpoint.files import StoredTensor, pickle_files
from teachllm.errors import ModelError


def pickled_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return what `stored_tensors` does, of a checkpoint in pickles. Errors as in `read_pickle`."""
    return {
        name: PickledTensor(file, tuple(tensor.shape), str(tensor.dtype), begin=0, end=tensor.nbytes, tensor=tensor)
        for file in pickle_files(folder)
        for name, tensor in read_pickle(file).items()
    }


@dataclass(frozen=True)
class PickledTensor(StoredTensor):
    """Describe a tensor in a pickle, with its dtype by PyTorch's name; `begin` and `end` tell no more than its size."""

    tensor: torch.Tensor

    def is_copy_of(self, other: StoredTensor) -> bool:
        """Return whether both hold the same values in the same form."""
        assert isinstance(other, PickledTensor)
        return self.dtype == other.dtype and torch.equal(self.tensor, other.tensor)


def read_pickle(file: Path) -> dict[str, torch.Tensor]:
    """Return a file's tensors, which are read when they are looked at.

    Raises:
        ModelError: it holds anything else.
    """
    try:  # PyTorch's first format, which was no ZIP archive, is read at once
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:
        raise ModelError(f"{file} cannot be read as plain tensors: {str(error).splitlines()[0]}") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in tensors.items()
    ):
        raise ModelError(f"{file} holds something else than tensors by name: download it again")
    return tensors
