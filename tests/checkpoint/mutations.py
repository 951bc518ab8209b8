"""Values in a checkpoint's JSON files replaced by others: null, other types, numbers out of range."""

from __future__ import annotations

import json
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import transformers

ABSENT = "(absent)"  # stands for taking the key away
VALUES = [
    *(None, "x", "2", [], [1, 2], {}, {"a": 1}, -1, 0, 2.5, 1e30, True, False, ABSENT),
    *(1, 3, 1000, 10**6, 10**9, 10**18),
]


class Mutation(NamedTuple):
    """Describe a changed file.

    Attributes:
        checkpoint: which of several.
        file: in the checkpoint's folder.
        path: keys of objects and places in lists, from the outermost object to the value.
    """

    checkpoint: str
    file: str
    path: tuple[str | int, ...]
    value: Any

    @property
    def key(self) -> str:
        """Return the innermost key; a value in a list goes by that of the list."""
        return next(each for each in reversed(self.path) if isinstance(each, str))


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every value of a JSON object, of objects inside of it too, and of the first of each list."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:1])
    for key, inner in inside:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from leaves(inner, (*path, key))


def value_at(whole: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        whole = whole[key]
    return whole


def mutations(
    folders: Mapping[str, Path], files: Sequence[str], count: int, not_read: Sequence[str] = ()
) -> list[Mutation]:
    """Return different ones, drawn with one seed; none of keys that are not read."""
    every = []
    for checkpoint, folder in folders.items():
        for file in files:
            whole = json.loads((folder / file).read_text())
            for path in leaves(whole):
                if not set(path) & set(not_read):
                    before = value_at(whole, path)
                    same = [float(before)] if type(before) is int else []  # 4.0 for 4
                    every += [Mutation(checkpoint, file, path, value) for value in VALUES + same]
    return random.Random(0).sample(every, min(count, len(every)))


def mutated(folder: Path, mutation: Mutation, to: Path) -> Path:
    """Return a copy of the checkpoint with the change."""
    shutil.copytree(folder, to)
    whole = json.loads((to / mutation.file).read_text())
    inner = value_at(whole, mutation.path[:-1])
    if mutation.value == ABSENT:
        del inner[mutation.path[-1]]
    else:
        inner[mutation.path[-1]] = mutation.value
    (to / mutation.file).write_text(json.dumps(whole))
    return to


def is_named(error: Exception, mutation: Mutation) -> bool:
    """Return whether an error says in one line which key of which file is to blame."""
    words = str(error)
    keys = [each for each in mutation.path if isinstance(each, str)]
    may_be_named = keys if mutation.value in (None, ABSENT) else keys[-1:]
    # A key of one plain word, such as "type", may stand in a sentence by chance.
    ends = "[=:'`,) ]" if "_" in mutation.key else "[=:'`,)]"
    is_said = any(re.search(rf"(?<![\w.]){re.escape(key)}({ends}| lacks| in config|$)", words) for key in may_be_named)
    return "\n" not in words and mutation.file in words and is_said


def wrong_ones(
    drawn: Iterable[Mutation],
    folders: Mapping[str, Path],
    to: Path,
    ours: Callable[[Path], Any],
    theirs: Callable[[Path, Mutation], Any],
    may_refuse: Callable[[Exception, Mutation], bool] = is_named,
) -> str:
    """Return a line for each mutation that is neither right nor refused by name.

    Args:
        to: an empty folder for the changed checkpoints.
        ours: what the engine makes of a changed checkpoint.
        theirs: what is right.
        may_refuse: whether the engine's error says enough.
    """

    def verdict(folder: Path, mutation: Mutation) -> str | None:
        try:
            found = ours(folder)
        except ValueError as error:
            return None if may_refuse(error, mutation) else f"refused without file and key: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        try:
            expected = theirs(folder, mutation)
        except Exception as error:
            return f"runs, and transformers raises {type(error).__name__}: {str(error)[:150]}"
        return None if found == expected else f"{found} is not {expected}"

    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        for i, mutation in enumerate(drawn):
            folder = mutated(folders[mutation.checkpoint], mutation, to / str(i))
            if (why := verdict(folder, mutation)) is not None:
                wrong.append(f"{mutation}: {why}")
            shutil.rmtree(folder)
    return "\n".join(wrong)
