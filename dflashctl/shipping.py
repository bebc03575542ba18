"""Shipping a release: all of `deploy`, for the verbs that ship first; and how the tree here differs from what was shipped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from dflashctl.home import replace_file
from dflashctl.release import Release, build_release
from dflashctl.results import Deployed
from dflashctl.session import Session
from dflashctl.source import INSTALLED, Source
from dflashctl.talk import Talk
from dflashctl.views import size
from remote.protocol.codec import dumps, loads_object
from remote.protocol.errors import DflashError
from remote.protocol.layout import is_release_id

_MANIFESTS_KEPT = 20
_FILES_NAMED = 3


def ship(session: Session, tree: Source, talk: Talk, *, selfcheck: bool = True) -> tuple[Deployed, Session]:
    """Ship the tree, have it checked and made current; return what became of it and the session as it is after that.

    Raises DflashError: 7 when the far end refuses the release; then what was current stays so.
    """
    release = build_release(tree.directory)
    total = sum(len(content) for content in release.files.values())
    talk.say(f"release {release.id} of {tree.directory} ({tree.origin}): {len(release.files)} files, {size(total)}")
    result = session.client.deploy(release, selfcheck=selfcheck, on_event=talk)
    origin = tree.provenance()
    known = dataclasses.replace(
        session.destination(),
        root=result.root,
        release=release.id,
        source=origin["directory"],
        revision=origin["revision"],
        dirty=origin["dirty"],
    )
    session.remember(known, make_current=True)
    _keep_manifest(_manifests(session), release)
    return result, session.after_deploy(known)


def tree_here(session: Session) -> Source:
    """Return the tree that a start would ship: the one near, else the one deployed last, else the installed package."""
    near = session.source
    return session.deployed_source if near.origin == INSTALLED else near


def difference(session: Session) -> str:
    """Return one line that tells how the tree here differs from the deployed release; "" where it does not, or none is.

    Costs no remote call: the release's id is computed here as `deploy` does, in 5 ms for 140 files.
    """
    if not session.release:
        return ""
    try:
        tree = tree_here(session)
        release = build_release(tree.directory)
    except DflashError:  # no tree, or a file of it that cannot be read: a matter of `deploy`, not of this start
        return ""
    # The tree that this program came with is nobody's work, unless it is what was deployed.
    if tree.origin == INSTALLED or release.id == session.release:
        return ""
    files = _changed(_read_manifest(_manifests(session), session.release), release.manifest)
    named = f" ({_counted(files)})" if files else ""
    return (
        f"the source in {tree.directory} differs from the deployed release {session.release}{named}: "
        "`--deploy` ships it first"
    )


def _counted(files: list[str]) -> str:
    names = ", ".join(files[:_FILES_NAMED]) + (", ..." if len(files) > _FILES_NAMED else "")
    return f"{len(files)} file{'' if len(files) == 1 else 's'}: {names}"


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the paths that are new, gone or of another content; [] where nothing is known of `before`."""
    # agent.pyz is made of remote/: it would only say the same again.
    paths = (before.keys() | now.keys()) - {"agent.pyz"} if before else set[str]()
    return sorted(path for path in paths if before.get(path) != now.get(path))


def _manifests(session: Session) -> Path:
    return session.store.path.with_name("manifests")


def _keep_manifest(folder: Path, release: Release) -> None:
    """Remember what a release is made of, to name later what changed; only names and hashes, 15 KB."""
    try:
        replace_file(folder / f"{release.id}.json", dumps(release.manifest))
        old = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)[_MANIFESTS_KEPT:]
        for path in old:
            path.unlink(missing_ok=True)
    except OSError:
        # Not worth a word: without it a later notice names no files. That the home is not writable was said before.
        return


def _read_manifest(folder: Path, release: str) -> Mapping[str, str]:
    if not is_release_id(release):
        return {}
    try:
        kept = loads_object((folder / f"{release}.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, str]", kept)
