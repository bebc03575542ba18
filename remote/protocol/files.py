"""Files that must survive a kill: written under a temporary name, fsynced, renamed into place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from remote.protocol.codec import dumps, loads_object


def fsync_directory(path: Path) -> None:
    """Make renames inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` by `data`: a reader, or a crash at any moment, sees the old or the new content, never a part.

    Raises OSError (no space, read-only); the previous content then still stands and no temporary file is left.
    """
    # Beside the file, because rename works within one file system only; hidden, with our pid, so that two writers never meet.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            # Before the rename: else a power cut can leave the new name with no content.
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """Write `value` durably as indented JSON."""
    write_durably(path, (dumps(value, indent=1) + "\n").encode("ascii"), mode=mode)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in `path`, None when there is no such file. Raises ValueError when it is no object."""
    try:
        return loads_object(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
