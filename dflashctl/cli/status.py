"""`dflashctl status`: one call, one card."""

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
    run: Annotated[str, typer.Option("--run", metavar="ID", help="Which run; else the live or last one.")] = "",
) -> int:
    """Say how the run is doing.

    Exits with 0 whenever the far end answered, whatever the state.
    """
    from dflashctl.session import Session

    session = Session.open(common.flags(), verbose=common.verbose)
    status = session.here(session.client.status(run))
    if common.as_json:
        OUT.line(dumps(dataclasses.asdict(status)))
        return 0
    # Imported by now, while the far end looked: see Session.client.
    from dflashctl.views import status_lines

    for line in status_lines(status, session.label, OUT):
        OUT.line(line)
    return 0
