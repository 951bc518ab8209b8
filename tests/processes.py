"""Who runs, and what they hold, as /proc tells it."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

RING = "memfd:teachllm ring"  # memory that ranks share: it has no file, and lasts as long as anybody maps it


def children(pid: int) -> list[int]:
    """Processes that one has started and not collected yet, in the order in which they came."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> set[int]:
    """Processes that one has started, and those that these have."""
    found = set(children(pid))
    return found.union(*map(descendants, found))


def processes_for_texts(pid: int) -> list[int]:
    """The process for the texts of one and its workers, as many as were needed at once; a socket leads to each."""
    parents = [child for child in children(pid) if is_for_texts(child)]
    found = parents + [worker for parent in parents for worker in children(parent)]
    return [each for each in found if _command(each)]  # one that has ended has none


def is_for_texts(pid: int) -> bool:
    """Whether it is the process for texts, or one of its workers."""
    return b"text_process" in _command(pid)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def is_gone(pid: int) -> bool:
    """One that has ended is, also if whoever started it has not collected it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return True


def num_descriptors() -> int:
    """That this process has open."""
    return len(os.listdir("/dev/fd"))


def open_files() -> Counter[tuple[int, int]]:
    """Return what the descriptors of this process refer to, by device and inode, and how many refer to each.

    `open_files() - before` is what has been opened since and is still open, whatever else has been closed meanwhile:
    a socket of ZeroMQ may stay open for a second after the test that closed it.
    """
    found: Counter[tuple[int, int]] = Counter()
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the listing itself had one, which is closed by now
            status = os.fstat(int(name))
            found[status.st_dev, status.st_ino] += 1
    return found


def named_memory(pids: Iterable[int]) -> set[Path]:
    """Files of shared memory that any of them has mapped: such a file outlives who forgets it."""
    return {Path(line[line.index("/dev/shm/") :]) for line in _maps(pids) if "/dev/shm/" in line}


def num_rings(*pids: int) -> int:
    """Rings that they have mapped."""
    return sum(RING in line for line in _maps(pids))


def _maps(pids: Iterable[int]) -> list[str]:
    lines: list[str] = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines += Path(f"/proc/{pid}/maps").read_text().splitlines()
    return lines
