"""Triton's cache on disk: where compiled kernels can be kept, and whether those that are there are whole.

Triton writes each file under another name and then renames it, and lists a kernel's files last. So a process that is
killed leaves no half of a kernel behind, and processes that compile the same do not disturb each other. What can still
happen is that a machine loses power, or a disk its data: then a file is listed and is not what was written. Triton
would load it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import struct
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from triton import knobs
from triton.runtime.cache import get_cache_manager

__all__ = [
    "CachedKernel",
    "cache_folder",
    "cached_kernel",
    "forget",
    "is_whole",
    "is_whole_code",
    "usable_cache_folder",
    "usual_cache_folder",
]

_LEAST_FREE = 64 << 20  # bytes: a model's kernels take some 20 MB
_IN_MEMORY = Path("/dev/shm")  # the last resort, where no disk has room


class CachedKernel(NamedTuple):
    """Find a compiled kernel in the cache.

    Attributes:
        key: Triton's hash of its source, its constants, its options and the compiler.
        name: of its function.
        digest: of its machine code.
    """

    key: str
    name: str
    digest: str


def cached_kernel(kernel: Any) -> CachedKernel:
    """Describe a kernel that Triton has compiled or found."""
    return CachedKernel(kernel.hash, kernel.name, hashlib.sha256(kernel.kernel).hexdigest())


def is_whole(cached: CachedKernel) -> bool:
    """Return whether the kernel is in the cache as it was written."""
    try:
        code = [path for path in _files(cached) if path.suffix in (".cubin", ".hsaco")]
        return [hashlib.sha256(path.read_bytes()).hexdigest() for path in code] == [cached.digest]
    except OSError:
        return False


def is_whole_code(code: bytes) -> bool:
    """Return whether machine code is an ELF file with all of its sections; used where its digest is not known."""
    if len(code) < 64 or not code.startswith(b"\x7fELF"):
        return False
    (offset,), (size, count) = struct.unpack_from("<Q", code, 40), struct.unpack_from("<HH", code, 58)
    return int(offset) + int(size) * int(count) <= len(code)


def forget(cached: CachedKernel) -> None:
    """Remove the kernel from the cache, so that it is compiled again."""
    for folder in {path.parent for path in _files(cached)}:
        shutil.rmtree(folder, ignore_errors=True)


def _files(cached: CachedKernel) -> list[Path]:
    """Return the kernel's files in the cache; none if it is not there."""
    group = get_cache_manager(cached.key).get_group(f"{cached.name}.json") or {}
    return [Path(path) for path in group.values()]


def usual_cache_folder() -> Path:
    """Return the folder of Triton's cache, whether or not anything can be kept in it."""
    return Path(knobs.cache.dir)


def cache_folder() -> Path:
    """Return the folder of Triton's cache.

    Raises:
        ValueError: nothing can be kept in it; one line says why.
    """
    folder = usual_cache_folder()
    if (why := _why_not(folder)) is not None:
        raise _refusal(folder, why)
    return folder


def usable_cache_folder() -> tuple[Path, str | None]:
    """Return the folder of Triton's cache and None; or, if nothing can be kept there, another folder and why.

    The other one is the same for all processes of a user, and lasts until the machine clears it.

    Raises:
        ValueError: nothing can be kept anywhere.
    """
    folder = usual_cache_folder()
    why = _why_not(folder)
    if why is None:
        return folder, None
    for parent in (Path(tempfile.gettempdir()), _IN_MEMORY):
        other = parent / f"teachllm-kernels-{os.getuid()}"
        if _why_not(parent) is None and _is_private(other):
            return other, why
    raise _refusal(folder, why)


def _is_private(folder: Path) -> bool:
    """Return whether this user alone can write into a folder: code is loaded from it. It is made if it is missing."""
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return False


def _refusal(folder: Path, why: str) -> ValueError:
    return ValueError(f"kernels cannot be kept in {folder} ({why}): set TRITON_CACHE_DIR to another folder")


def _why_not(folder: Path) -> str | None:
    """Return why kernels cannot be kept in a folder, or None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return (error.strerror or type(error).__name__).lower()
    return None if free >= _LEAST_FREE else f"only {free >> 20} MiB are free"
