"""The operator's own files: state in DFLASHCTL_HOME, else where the platform keeps such things."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from remote.protocol.errors import DflashError

_LOCK_PATIENCE = 5.0
_LOCK_STALE = 30.0
"""Seconds after which a lock file counts as left behind by a crash: its holder writes one small file."""


def state_directory(environment: Mapping[str, str]) -> Path:
    """Return the directory of destinations.json (it need not exist)."""
    if home := environment.get("DFLASHCTL_HOME"):
        return Path(home).expanduser()
    import platformdirs

    return Path(platformdirs.user_state_path("dflashctl"))


def user_file(environment: Mapping[str, str]) -> Path:
    """Return the user's settings file (it need not exist)."""
    if home := environment.get("DFLASHCTL_HOME"):
        return Path(home).expanduser() / "config.toml"
    import platformdirs

    return Path(platformdirs.user_config_path("dflashctl")) / "config.toml"


@contextmanager
def locked(path: Path) -> Generator[None, None, None]:
    """Hold `path` as a lock file while the body runs. Raises DflashError when another process holds it for 5 s.

    A file created exclusively, not an fcntl lock: this side runs on other systems than Linux as well.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _LOCK_PATIENCE
    while not _create(path):
        if time.monotonic() > deadline:
            raise DflashError(
                f"{path} is locked",
                cause="another dflashctl is writing there",
                hint="repeat, or remove the file if none runs",
            )
        time.sleep(0.02)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _create(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        try:
            if time.time() - path.stat().st_mtime > _LOCK_STALE:
                path.unlink(missing_ok=True)
        except FileNotFoundError:
            # Its holder finished between the two looks; the next attempt gets it.
            pass
        return False
    return True


def replace_file(path: Path, content: str) -> None:
    """Write `content` under a temporary name and rename it: a reader sees the old or the new file, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            # Before the rename: else a power cut may leave the new name with no content.
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
