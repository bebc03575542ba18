"""Whole-file open-file-description locks (Linux), the ground truth of "does anything of this run live".

They die with the last descriptor of the open file, so no crash leaves one behind. flock() is another lock space, which
F_OFD_GETLK does not see; classic POSIX locks are lost when any descriptor of the file is closed. A probe takes no lock.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from enum import IntEnum
from pathlib import Path

# struct flock on 64-bit Linux: short l_type, short l_whence, off_t l_start, off_t l_len, pid_t l_pid. l_pid must be 0
# for OFD locks.
_FLOCK = struct.Struct("hhqqi4x")
# asm-generic/fcntl.h; Python's fcntl module names them from 3.9 on where the C library does.
_F_OFD_GETLK = 36
_F_OFD_SETLK = 37


class LockKind(IntEnum):
    """How a lock is held."""

    SHARED = fcntl.F_RDLCK
    EXCLUSIVE = fcntl.F_WRLCK


class LockBusy(Exception):
    """Another open file description holds a conflicting lock."""


def _request(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)


def acquire(path: Path, kind: LockKind) -> int:
    """Open (or create) `path`, lock it without waiting, and return the descriptor that holds the lock (close-on-exec).

    Raises LockBusy when a conflicting lock is held, OSError when the file cannot be opened.
    """
    # Read and write: a shared lock needs the first, an exclusive one the second.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.fcntl(descriptor, _F_OFD_SETLK, _request(kind))
    except OSError as error:
        os.close(descriptor)
        # POSIX allows EAGAIN and EACCES for a lock that is held.
        if isinstance(error, BlockingIOError | PermissionError):
            raise LockBusy(str(path)) from error
        raise
    return descriptor


def acquire_within(path: Path, kind: LockKind, seconds: float) -> int:
    """Like `acquire`, trying again for `seconds` before LockBusy is raised."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return acquire(path, kind)
        except LockBusy:
            if time.monotonic() >= deadline:
                raise
        # F_OFD_SETLKW would need a signal to time out, and these waits are rare and short.
        time.sleep(0.02)


def name_holder(descriptor: int, text: str) -> None:
    """Write who holds the lock into the locked file, for the message of whoever finds it busy."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode("utf-8"), 0)


def holder_name(path: Path) -> str:
    """Return what `name_holder` wrote, or "unknown"."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")[:200].strip() or "unknown"
    except OSError:
        return "unknown"


def still_named(descriptor: int, path: Path) -> bool:
    """Whether `path` is still the file that `descriptor` has open: a lock on a deleted file is one that no probe sees."""
    try:
        named = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    held = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)


def is_held(path: Path) -> bool:
    """Whether anybody holds a lock on `path`, shared or exclusive. A missing file is not held."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        # A would-be exclusive lock conflicts with every holder. GETLK needs no write permission.
        answer = fcntl.fcntl(descriptor, _F_OFD_GETLK, _request(LockKind.EXCLUSIVE))
    finally:
        os.close(descriptor)
    return _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK
