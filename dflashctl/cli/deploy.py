"""`dflashctl deploy`: ship the trainer, have it checked over there, remember the destination."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl.cli.options import Common, command
from dflashctl.console import OUT
from remote.protocol.codec import dumps

if TYPE_CHECKING:
    from dflashctl.session import Session


@command
def verb(
    common: Common,
    source: Annotated[
        str | None,
        typer.Option("--source", metavar="DIR", help="Tree with remote/, trainer/ and templates/ to ship."),
    ] = None,
    selfcheck: Annotated[
        bool, typer.Option("--selfcheck/--no-selfcheck", help="Run the trainer's self-check before it becomes current.")
    ] = True,
) -> int:
    """Ship the trainer to a destination and remember it.

    The release is named by the hash of its content: an unchanged tree sends nothing. The self-check (undefined names,
    imports, one training step of a toy) runs over there before the release becomes current; what runs is not touched.
    """
    from dflashctl.release import build_release
    from dflashctl.session import Session
    from dflashctl.talk import Talk
    from dflashctl.views import duration, size

    begun, talk = time.monotonic(), Talk()
    session = Session.open(common.flags() | {"source": source}, verbose=common.verbose)
    tree = session.source
    release = build_release(tree.directory)
    total = sum(len(content) for content in release.files.values())
    talk.say(f"release {release.id} of {tree.directory} ({tree.origin}): {len(release.files)} files, {size(total)}")
    result = session.client.deploy(release, selfcheck=selfcheck, on_event=talk)
    _remember(session, release.id, str(result.get("root") or session.client.root))
    if common.as_json:
        OUT.line(
            dumps({"release": release.id, "host": session.settings["host"], "ct": session.settings["ct"], **result})
        )
    else:
        OUT.line(_summary(session, result, release.id, duration(time.monotonic() - begun)))
    return 0


def _remember(session: Session, release: str, root: str) -> None:
    origin = session.source.provenance()
    known = dataclasses.replace(
        session.destination(),
        root=root,
        release=release,
        source=origin["directory"],
        revision=origin["revision"],
        dirty=origin["dirty"],
    )
    session.store.remember(known, make_current=True)


def _summary(session: Session, result: dict[str, Any], release: str, took: str) -> str:
    place = f"{session.label}, {result.get('root', session.client.root)}"
    if not result.get("changed", True):
        return f"release {release} was current already on {place}: nothing sent ({took})"
    before = f", was {result['previous']}" if result.get("previous") else ""
    return f"release {release} is current on {place}{before} ({took})"
