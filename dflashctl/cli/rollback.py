"""`dflashctl rollback`: an earlier release becomes current again."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from dflashctl.cli.options import Common, command
from dflashctl.console import OUT
from remote.protocol.codec import dumps


@command
def verb(
    common: Common,
    to: Annotated[str, typer.Option("--to", metavar="RELEASE", help="Which one; else the one before.")] = "",
) -> int:
    """Make an earlier release the current one. What runs is not touched."""
    from dflashctl.session import Session

    session = Session.open(common.flags(), verbose=common.verbose)
    result = session.client.rollback(to)
    if session.remembered is not None:
        known = dataclasses.replace(session.remembered, release=result.release)
        session.remember(known, make_current=False)
    OUT.line(
        dumps(result)
        if common.as_json
        else f"release {result.release} is current on {session.label}{f', was {result.previous}' if result.previous else ''}"
    )
    return 0
