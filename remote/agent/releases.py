"""The current release, the ones before it, and the verbs releases and rollback."""

from __future__ import annotations

import os
import time
from typing import Any, cast

from remote.agent.roots import current_release, not_deployed, require_release
from remote.agent.wire import Answer, Request
from remote.protocol.errors import preflight_error
from remote.protocol.files import fsync_directory, read_json, write_json
from remote.protocol.layout import RootLayout, is_release_id
from remote.protocol.locks import LockKind, acquire_within

_HISTORY_KEPT = 100
_LOCK_SECONDS = 10.0


def switch_current(root: RootLayout, release: str) -> str:
    """Point `current` to a release, atomically, and remember it. Returns the release it pointed to before."""
    lock = acquire_within(root.start_lock.with_name("current.lock"), LockKind.EXCLUSIVE, _LOCK_SECONDS)
    try:
        previous = current_release(root)
        # An unchanged deploy is no switch: rollback must not go back to the same release.
        if previous == release:
            return previous
        temporary = root.path / f".current-{os.getpid()}"
        temporary.unlink(missing_ok=True)
        # Relative: ROOT may be bind-mounted elsewhere in a container.
        temporary.symlink_to(f"releases/{release}")
        try:
            temporary.replace(root.current)
        except IsADirectoryError as error:
            temporary.unlink()
            raise preflight_error(
                f"{root.current} is a directory",
                cause="it should be a link to the release in use; somebody copied it, or its link was followed",
                hint="move it away and repeat the command",
            ) from error
        fsync_directory(root.path)
        entries = [*_history(root), {"release": release, "time": time.time()}]
        write_json(root.history, {"switches": entries[-_HISTORY_KEPT:]})
        return previous
    finally:
        os.close(lock)


def _history(root: RootLayout) -> list[dict[str, Any]]:
    try:
        entries: Any = (read_json(root.history) or {}).get("switches")
    except ValueError:  # a convenience, not a truth: begin it anew
        return []
    if not isinstance(entries, list):
        return []
    return [cast("dict[str, Any]", entry) for entry in cast("list[Any]", entries) if isinstance(entry, dict)]


def releases(request: Request, answer: Answer) -> None:
    """Answer {"releases": [{release, deployed, current}, ...], "current"}, newest first."""
    root = RootLayout(request.root)
    current = current_release(root)
    found = [path for path in root.releases.glob("*") if is_release_id(path.name)]
    listed = sorted(((path.stat().st_mtime, path.name) for path in found), reverse=True)
    entries = [{"release": name, "deployed": when, "current": name == current} for when, name in listed]
    answer.result({"releases": entries, "current": current})


def rollback(request: Request, answer: Answer) -> None:
    """Switch `current` to `to`, or to the release before the current one. Runs that live keep theirs."""
    root = RootLayout(request.root)
    current = current_release(root)
    target = request.text("to", "") or _before(root, current)
    if not target and not current:
        raise not_deployed(f"{root.path} holds no release")
    if not target:
        raise preflight_error(
            "there is no release to go back to",
            cause=f"release {current} is the only one that was deployed there",
            hint="deploy another one first; `dflashctl releases` lists what is there",
        )
    require_release(root, target)
    switch_current(root, target)
    answer.result({"release": target, "previous": current})


def _before(root: RootLayout, current: str) -> str:
    names = [str(entry.get("release", "")) for entry in reversed(_history(root))]
    # The newest other one: rollback twice returns to where one was.
    others = [name for name in names if name != current and is_release_id(name)]
    return next((name for name in others if root.release(name).is_dir()), "")
