"""Values in a checkpoint's JSON files replaced by others: null, other types, numbers out of range."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

VALUES = [None, "x", "2", [], [1, 2], {}, {"a": 1}, -1, 0, 2.5, 1e30, 10**18, True]


class Mutation(NamedTuple):
    """Describe a changed file.

    Attributes:
        checkpoint: which of several.
        file: in the checkpoint's folder.
        path: keys from the outermost object to the value.
    """

    checkpoint: str
    file: str
    path: tuple[str, ...]
    value: Any


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every value of a JSON object, of objects inside of it too."""
    for key, inner in value.items():
        yield (*path, key)
        if isinstance(inner, dict):
            yield from leaves(inner, (*path, key))


def mutations(
    folders: Mapping[str, Path], files: Sequence[str], count: int, not_read: Sequence[str] = ()
) -> list[Mutation]:
    """Return different ones, drawn with one seed; none of keys that are not read."""
    every = [
        Mutation(checkpoint, file, path, value)
        for checkpoint, folder in folders.items()
        for file in files
        for path in leaves(json.loads((folder / file).read_text()))
        for value in VALUES
        if not set(path) & set(not_read)
    ]
    return random.Random(0).sample(every, min(count, len(every)))


def mutated(folder: Path, mutation: Mutation, to: Path) -> Path:
    """Return a copy of the checkpoint with the change."""
    shutil.copytree(folder, to)
    whole = json.loads((to / mutation.file).read_text())
    inner = whole
    for key in mutation.path[:-1]:
        inner = inner[key]
    inner[mutation.path[-1]] = mutation.value
    (to / mutation.file).write_text(json.dumps(whole))
    return to


def is_named(error: Exception, mutation: Mutation) -> bool:
    """Return whether an error says in one line which key of which file is to blame."""
    words = str(error)
    return "\n" not in words and mutation.file in words and any(key in words for key in mutation.path)
