"""Where things lie at this far end: ROOT, the current release, the interpreter of a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from remote.agent.environment import home
from remote.protocol.errors import DflashError, preflight_error, usage_error
from remote.protocol.layout import RootLayout, is_release_id


def resolve_root(text: str) -> Path:
    """Return ROOT as an absolute path: the one asked for, else the default of this machine (docs/architecture.md).

    Raises a usage error for a text that can be no path.
    """
    if text:
        try:
            path = Path.cwd() / _expanded(text)
            # NUL or a lone surrogate: told here, not by the first verb that looks.
            if b"\0" in os.fsencode(path):
                raise ValueError("it holds NUL")
        except (ValueError, RuntimeError) as error:
            raise usage_error(
                f"{text!r} cannot be ROOT", cause=str(error), hint="pass --root DIR (absolute)"
            ) from error
        return path
    # The volume that survives a rebuilt container, where images of GPU clouds have one.
    if Path("/workspace").is_dir():
        return Path("/workspace/dflashctl")
    if os.geteuid() == 0:
        return Path("/opt/dflashctl")
    return home() / ".local/share/dflashctl"


def _expanded(text: str) -> Path:
    """Return a path with `~` as this machine has it; `~name` is looked up in its user database anyway."""
    if text == "~" or text.startswith("~/"):
        return home() / text[2:]
    return Path(text).expanduser()


def create_root(root: RootLayout) -> None:
    """Make ROOT and its folders. Raises a preflight error when that is not possible."""
    try:
        root.create()
    except OSError as error:
        raise preflight_error(
            f"cannot create {root.path}",
            cause=f"{error.filename}: {error.strerror}",
            hint="choose another place with --root DIR",
        ) from error


def current_release(root: RootLayout) -> str:
    """Return the id that `current` points to, or "" when nothing is deployed."""
    try:
        name = root.current.readlink().name
    except OSError:
        return ""
    return name if is_release_id(name) and root.release(name).is_dir() else ""


def require_release(root: RootLayout, release: str) -> Path:
    """Return the directory of a release, of the current one for "". Raises a preflight error when it is not there."""
    if release and not is_release_id(release):
        raise usage_error(f"not a release id: {release!r}", hint="12 hex digits, as `dflashctl releases` lists them")
    # The link may point to a release that somebody removed by hand; then there is none.
    release = release or current_release(root)
    if not release:
        raise not_deployed(f"{root.path} holds no current release")
    directory = root.release(release)
    if not directory.is_dir():
        raise not_deployed(f"release {release} is not in {root.releases}")
    return directory


def not_deployed(cause: str) -> DflashError:
    """Return the error for a far end without the release that is needed."""
    return preflight_error("nothing is deployed there", cause=cause, hint="run `dflashctl deploy` first")


def interpreter(asked: str) -> str:
    """Return the python a run uses: the one asked for, else the one that runs this agent.

    Raises a preflight error when it is no executable file.
    """
    path = asked or sys.executable
    if not (Path(path).is_absolute() and os.access(path, os.X_OK) and Path(path).is_file()):
        raise preflight_error(
            f"no python at {path}", cause="it is not an executable file", hint="pass --python PATH (absolute)"
        )
    return path
