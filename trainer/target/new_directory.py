"""A directory that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from remote.protocol.errors import preflight_error


@contextmanager
def new_directory(destination: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `destination` which is fsynced and renamed to it when the block ends.

    Whatever goes wrong in the block, nothing is left behind and nothing existing is touched.

    Raises:
        DflashError: `destination` exists and is not an empty directory, or its parent cannot be written (code 7).
    """
    refuse_existing(destination)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        # A sibling: rename is atomic within one file system only.
        temporary = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
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


def refuse_existing(destination: Path) -> None:
    """Raise a DflashError (code 7) if `destination` is anything but absent or an empty directory."""
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise preflight_error(
            f"{destination} exists already",
            cause="a directory is written whole and never over another one",
            hint="remove it or choose another destination",
        )


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
