"""`dflashctl stop`: end a run with a checkpoint and wait until nothing of it lives."""

from __future__ import annotations

from typing import Annotated

import typer

from dflashctl.cli.options import Common, command
from dflashctl.console import ERR, OUT
from remote.protocol.codec import dumps
from remote.protocol.errors import ExitCode


@command
def verb(
    common: Common,
    run: Annotated[str, typer.Option("--run", metavar="ID", help="Which run; else the live one.")] = "",
    now: Annotated[bool, typer.Option("--now", help="End at once, without a checkpoint.")] = False,
    grace: Annotated[
        str | None,
        typer.Option("--grace", metavar="SECONDS", help="Get rougher after so long without checkpoint progress."),
    ] = None,
) -> int:
    """Stop the run, with a checkpoint.

    The trainer is asked to end at its next step and to save; only when that makes no progress is it made to. Returns
    when no process of the run lives. A run that has ended already is no error.
    """
    from dflashctl.session import Session, operator
    from dflashctl.talk import Talk

    session = Session.open(common.flags() | {"grace": grace}, verbose=common.verbose)
    talk = Talk()
    try:
        result = session.client.stop(
            run, now=now, grace=session.settings.seconds("grace"), by=operator(), on_event=talk
        )
    except KeyboardInterrupt:
        ERR.line("\nno longer watching; the run goes on stopping if it was asked to: `dflashctl status`")
        return int(ExitCode.INTERRUPTED)
    OUT.line(dumps(result) if common.as_json else result.message)
    return int(ExitCode.OK)
