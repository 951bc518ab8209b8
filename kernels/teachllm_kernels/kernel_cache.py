"""Find a writable folder for Triton's cache, and check the kernels in it for damage.

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
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from triton import knobs
from triton.runtime.cache import get_cache_manager

__all__ = [
    "CachedKernel",
    "cache_folder",
    "cached_kernel",
    "copy_kernels",
    "forget",
    "is_whole",
    "is_whole_code",
    "usable_cache_folder",
    "usual_cache_folder",
]

_LEAST_FREE = 64 << 20  # bytes: a model's kernels take some 20 MB
_IN_MEMORY = Path("/dev/shm")  # the last resort, where no disk has room


class CachedKernel(NamedTuple):
    """Say where a compiled kernel is in the cache, and what its files contain.

    Attributes:
        key: Triton's hash of its source, its constants, its options and the compiler.
        digest: of all of its files.
    """

    key: str
    digest: str


def cached_kernel(kernel: Any) -> CachedKernel:
    """Describe a kernel that Triton has compiled or found."""
    return CachedKernel(kernel.hash, _digest(kernel.hash))


def is_whole(cached: CachedKernel) -> bool:
    """Return whether the kernel's files are as they were written."""
    return _digest(cached.key) == cached.digest


def is_whole_code(code: bytes) -> bool:
    """Return whether machine code is an ELF file with all of its sections; used where its digest is not known."""
    if len(code) < 64 or not code.startswith(b"\x7fELF"):
        return False
    (offset,), (size, count) = struct.unpack_from("<Q", code, 40), struct.unpack_from("<HH", code, 58)
    return int(offset) + int(size) * int(count) <= len(code)


def forget(key: str) -> None:
    """Remove a kernel from the cache, if that can be written to, so that it is compiled again."""
    if (folder := _folder(key)) is not None:
        shutil.rmtree(folder, ignore_errors=True)


def copy_kernels(kernels: Iterable[CachedKernel], source: Path, target: Path) -> None:
    """Copy kernels from one cache to another, as far as possible: what is missing will be compiled again."""
    for name in {Path(get_cache_manager(kernel.key).cache_dir).name for kernel in kernels}:
        with suppress(OSError, shutil.Error):
            shutil.copytree(source / name, target / name, dirs_exist_ok=True)


def _folder(key: str) -> Path | None:
    """Return the folder of a kernel; None where it is missing and cannot be made."""
    try:
        return Path(get_cache_manager(key).cache_dir)
    except OSError:
        return None


def _digest(key: str) -> str:
    """Return a digest of the names and contents of a kernel's files; "" if they cannot be read."""
    digest, folder = hashlib.sha256(), _folder(key)
    try:
        for file in sorted(folder.iterdir() if folder is not None else ()):
            if file.is_file():
                digest.update(f"{file.name}:{file.stat().st_size}:".encode() + file.read_bytes())
    except OSError:
        return ""
    return digest.hexdigest()


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
        parent = folder.parent.stat().st_mode
        if parent & stat.S_IWOTH and not parent & stat.S_ISVTX:  # others can put another folder in its place
            return False
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
