"""`dflashctl deploy`: ship the trainer, have it checked over there, remember the destination."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from dflashctl.cli.options import Common, command
from dflashctl.console import OUT
from remote.protocol.codec import dumps, plain

if TYPE_CHECKING:
    from dflashctl.results import Deployed
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
    from dflashctl.session import Session
    from dflashctl.shipping import ship
    from dflashctl.talk import Talk
    from dflashctl.views import duration

    begun, talk = time.monotonic(), Talk()
    session = Session.open(common.flags() | {"source": source}, verbose=common.verbose)
    result, _ = ship(session, session.source, talk, selfcheck=selfcheck)
    if common.as_json:
        OUT.line(dumps({"host": session.settings["host"], "ct": session.settings["ct"], **plain(result)}))
    else:
        OUT.line(_summary(session, result, duration(time.monotonic() - begun)))
    return 0


def _summary(session: Session, result: Deployed, took: str) -> str:
    place = f"{session.label}, {result.root}"
    if not result.changed and not result.sent:
        return f"release {result.release} was current already on {place}: nothing sent ({took})"
    before = f", was {result.previous}" if result.previous else ""
    return f"release {result.release} is current on {place}{before} ({took})"
