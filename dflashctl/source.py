"""Where the trainer's source tree lies on this machine, and which revision it is."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from remote.protocol.errors import usage_error

FOLDERS = ("remote", "templates", "trainer")
"""What a release is made of."""

INSTALLED = "installed package"
"""Origin of a tree that is nobody's project: the one this program was installed with."""

_GIT_PATIENCE = 10.0


@dataclass(frozen=True)
class Source:
    """A directory that holds FOLDERS, and how it was found."""

    directory: Path
    origin: str

    def provenance(self) -> dict[str, str]:
        """Return directory, git revision and a hash of what is not committed ("" where there is none, or no git)."""
        revision = _git(self.directory, "rev-parse", "HEAD").decode("ascii", errors="replace").strip()
        if not revision:
            return {"directory": str(self.directory), "revision": "", "dirty": ""}
        change = _git(self.directory, "diff", "HEAD", "--binary", "--", *FOLDERS)
        # Names of untracked files count as well: a new file is a change although no diff shows it.
        change += _git(self.directory, "ls-files", "--others", "--exclude-standard", "--", *FOLDERS)
        dirty = hashlib.sha256(change).hexdigest()[:12] if change else ""
        return {"directory": str(self.directory), "revision": revision, "dirty": dirty}


def _git(directory: Path, *arguments: str) -> bytes:
    command = ["git", "-C", str(directory), *arguments]
    try:
        answer = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_GIT_PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        # No git, or one that hangs on a dead network disk: the release id still names every byte that was shipped.
        return b""
    return answer.stdout if answer.returncode == 0 else b""


def is_source(directory: Path) -> bool:
    """Whether `directory` holds everything a release is made of."""
    return (directory / "remote" / "agent").is_dir() and all((directory / folder).is_dir() for folder in FOLDERS)


def find_source(chosen: Path | None, start: Path, installed: Path | None = None) -> Source:
    """Return the tree to ship: `chosen`, else the nearest parent of `start` that is one, else the installed package.

    Raises a usage error when `chosen` is given and is none.
    """
    if chosen is not None:
        return Source(_checked(chosen.expanduser().resolve()), "--source")
    for parent in _with_parents(start.resolve()):
        if is_source(parent):
            return Source(parent, "nearest parent directory")
    package = Path(__file__).resolve().parent.parent if installed is None else installed
    return Source(_checked(package), INSTALLED)


def _with_parents(path: Path) -> Iterable[Path]:
    yield path
    yield from path.parents


def _checked(directory: Path) -> Path:
    if is_source(directory):
        return directory
    missing = [folder for folder in ("remote/agent", "templates", "trainer") if not (directory / folder).is_dir()]
    raise usage_error(
        f"{directory} is no source tree",
        cause=f"it has no {', no '.join(missing)}",
        hint="name the directory that holds remote/, trainer/ and templates/ with --source DIR",
    )
