"""`dflashctl runs`: the registry over there."""

from __future__ import annotations

from typing import Annotated

import typer

from dflashctl.cli.options import Common, command
from dflashctl.console import OUT
from remote.protocol.codec import dumps


@command
def verb(
    common: Common,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="At most so many.")] = 20,
) -> int:
    """List the runs over there, newest first."""
    from dflashctl.session import Session
    from dflashctl.views import runs_lines
    from remote.protocol.records import SCHEMA

    session = Session.open(common.flags(), verbose=common.verbose)
    runs = [session.here(status) for status in session.client.runs(limit)]
    if common.as_json:
        OUT.line(dumps({"schema": SCHEMA, "runs": runs}))
        return 0
    for line in runs_lines(runs, OUT) if runs else [f"no run yet on {session.label}; `dflashctl start` begins one"]:
        OUT.line(line)
    return 0
