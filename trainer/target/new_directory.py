"""A directory that appears whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from remote.protocol.errors import preflight_error
from remote.protocol.locks import still_named


@contextmanager
def new_directory(destination: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `destination` which is fsynced and renamed to it when the block ends.

    Whatever goes wrong in the block, nothing is left behind and nothing existing is touched. What a killed process left
    behind is removed by the next one with the same destination.

    Raises:
        DflashError: `destination` exists and is not an empty directory, or its parent cannot be written (code 7).
    """
    # "." has no name, and a link is written through.
    destination = destination.resolve()
    refuse_existing(destination)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _sweep(destination)
        temporary, lock = _temporary(destination)
    except OSError as problem:
        raise preflight_error(
            f"cannot write {destination}", cause=str(problem), hint="choose a destination on a writable disk with space"
        ) from problem
    try:
        yield temporary
        _finish_tree(temporary)
        # Again: somebody else may have finished first, and rename replaces an empty directory only.
        refuse_existing(destination)
        temporary.rename(destination)
        _fsync(destination.parent)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)
        os.close(lock)


@contextmanager
def told_if_unwritable(destination: Path) -> Iterator[None]:
    """Turn what a full or broken disk raises while `destination` is written into a DflashError (code 7)."""
    try:
        yield
    except (OSError, SafetensorError) as problem:
        raise preflight_error(
            f"cannot write {destination}",
            cause=str(problem),
            hint="free space there, or choose a destination on a writable disk",
        ) from problem


def refuse_existing(destination: Path) -> None:
    """Raise a DflashError (code 7) if `destination` is anything but absent or an empty directory."""
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise preflight_error(
            f"{destination} exists already",
            cause="a directory is written whole and never over another one",
            hint="choose another destination",
        )


def _temporary(destination: Path) -> tuple[Path, int]:
    """Make the temporary sibling: rename is atomic within one file system only. Returns it with its lock."""
    while True:
        temporary = Path(tempfile.mkdtemp(prefix=_prefix(destination), dir=destination.parent))
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
            _lock(lock, wait=True)
            if still_named(lock, temporary):
                return temporary, lock
            # Another process swept it away before it was locked.
            os.close(lock)


def _sweep(destination: Path) -> None:
    """Remove temporary siblings that nobody holds: their processes were killed."""
    name = re.compile(re.escape(_prefix(destination)) + "[a-z0-9_]{8}")
    for path in destination.parent.iterdir():
        if not name.fullmatch(path.name):
            continue
        # One of another user, or one that somebody else removes just now, is none of ours.
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if _lock(descriptor, wait=False):
                    shutil.rmtree(path)
            finally:
                os.close(descriptor)


def _prefix(destination: Path) -> str:
    return f".{destination.name}.unfinished-"


def _lock(descriptor: int, *, wait: bool) -> bool:
    """Lock a directory; False where somebody else holds it, or where the file system has no such locks (NFS)."""
    # flock, since OFD locks need a descriptor to write by, which no directory has.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _finish_tree(directory: Path) -> None:
    """Fsync everything and give it ordinary modes: mkdtemp makes 0700, safetensors 0600; other users could not read."""
    umask = os.umask(0o077)
    os.umask(umask)
    for path in [*directory.rglob("*"), directory]:
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
