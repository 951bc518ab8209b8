"""Read the weights of a checkpoint, one tensor after the other.

Source: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from teachllm.checkpoint.files import pickle_files, stored_tensors, wrong_shape
from teachllm.checkpoint.pickles import read_pickle
from teachllm.errors import ModelError
from teachllm.layers.checkpoint_tensors import TensorDestination

Progress = Callable[[int, int], None]
Wants = Callable[[str], bool]
PartOf = Callable[[str], TensorDestination | None]


def _everything(name: str) -> bool:
    return True


def _all(name: str) -> None:
    """Return None: nothing is cut."""


def read_safetensors(
    folder: Path, progress: Progress | None, wants: Wants = _everything, part: PartOf = _all
) -> Iterator[tuple[str, torch.Tensor, Path]]:
    """Do the same as `read_pickles`; of a tensor that is cut no more than the part is read."""
    from safetensors import SafetensorError, safe_open

    stored = stored_tensors(folder)
    files = list(dict.fromkeys(tensor.file for tensor in stored.values()))
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 (the reader is no dictionary)
                    size = 0
                    if stored[name].file == file and wants(name):
                        cut = part(name)
                        if cut is None:
                            tensor = reader.get_tensor(name)
                        else:
                            lazy = reader.get_slice(name)
                            tensor = lazy[_ranges(cut, tuple(lazy.get_shape()), name, file)]
                        yield name, tensor, file
                        size = tensor.nbytes
                    done += size
                    if progress is not None:
                        progress(done, total)
        except SafetensorError as error:
            raise ModelError(f"{file} cannot be read: {error}") from None
    if progress is not None:
        progress(total, total)


def _ranges(cut: TensorDestination, shape: tuple[int, ...], name: str, file: Path) -> tuple[slice, ...]:
    """Return what to read of a tensor.

    Raises:
        ModelError: it has another shape.
    """
    if shape != cut.shape:
        raise ModelError(wrong_shape(name, file, shape, cut.shape))
    assert cut.ranges is not None
    return cut.ranges


def read_pickles(
    folder: Path, progress: Progress | None, wants: Wants = _everything, part: PartOf = _all
) -> Iterator[tuple[str, torch.Tensor, Path]]:
    """Yield (name, tensor, file) of the tensors of a checkpoint in pickles, of which only plain tensors are read.

    Args:
        wants: whether to read a tensor, by its name.
        part: what of it.

    Raises:
        ModelError: a file holds anything else, or what is to be cut has another shape.
    """
    files = pickle_files(folder)
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        for name, tensor in read_pickle(file).items():
            if wants(name):
                cut = part(name)
                yield name, tensor if cut is None else tensor[_ranges(cut, tuple(tensor.shape), name, file)], file
        done += file.stat().st_size
        if progress is not None:
            progress(done, total)
