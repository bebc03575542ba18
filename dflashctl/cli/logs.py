"""`dflashctl logs`: the run's log, as it stands or as it grows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dflashctl.cli.options import Common, command
from dflashctl.console import ERR
from dflashctl.errors import report
from remote.protocol.errors import DflashError, ExitCode, usage_error

if TYPE_CHECKING:
    from dflashctl.follow import Follower
    from dflashctl.logview import LogView
    from dflashctl.results import LogEnd

_FILES = ("train", "events", "supervisor")
_FOLLOW_TAIL = 50
"""Lines shown before following, where --tail is not given: enough to see where the run stands."""


@command
def verb(
    common: Common,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as it grows, until the run has ended or Ctrl-C.")
    ] = False,
    tail: Annotated[int | None, typer.Option("--tail", metavar="N", min=0, help="Only the last N lines.")] = None,
    run: Annotated[str, typer.Option("--run", metavar="ID", help="Which run; else the live or last one.")] = "",
    file: Annotated[str, typer.Option("--file", metavar="|".join(_FILES), help="Which of its logs.")] = "train",
    raw: Annotated[bool, typer.Option("--raw", help="The bytes as they are.")] = False,
) -> int:
    """Show or follow the run's log.

    Following ends with the run: exit code 0 when it finished or was stopped, 1 when it failed, 10 when an alarm was
    seen. Ctrl-C stops watching, not the run.
    """
    from dflashctl.follow import Follower, LogRequest
    from dflashctl.logview import choose_view
    from dflashctl.session import Session

    if file not in _FILES:
        raise usage_error(f"no such log: {file}", cause="a run keeps three", hint=f"--file {'|'.join(_FILES)}")
    session = Session.open(common.flags(), verbose=common.verbose)
    lines = _FOLLOW_TAIL if follow and tail is None else tail
    follower = Follower(session.client, LogRequest(run, file, lines, follow))
    try:
        with choose_view(as_json=common.as_json, raw=raw) as view:
            end = _pump(follower, view)
        if not follow:
            return int(ExitCode.OK)
        # Stalls are noticed by the supervisor and stand in no log.
        status = session.client.status(end.run or run)
        alarmed = view.alarms > 0 or bool(status.alarms)
    except KeyboardInterrupt:
        ERR.line("\ndetached; the run goes on: `dflashctl status`, `dflashctl stop`" if follow else "\ninterrupted")
        return int(ExitCode.INTERRUPTED)
    view.ended(end)
    return int(ExitCode.ALARM) if alarmed else _judge(end, status.message)


def _pump(follower: Follower, view: LogView) -> LogEnd:
    from dflashctl.follow import Notice
    from dflashctl.results import LogEnd

    end = LogEnd("unknown")
    for item in follower:
        if isinstance(item, bytes):
            view.feed(item)
        elif isinstance(item, Notice):
            view.notice(item.text)
        else:
            end = item
    view.finish()
    return end


def _judge(end: LogEnd, known: str) -> int:
    """Return the exit code that a run's end means, and say why where it is no good one; `known` is what status says."""
    if end.state in ("finished", "stopped"):
        return int(ExitCode.OK)
    message = (end.exit.message if end.exit is not None else "") or known
    cause = message or "no exit record says why"
    hint = "`dflashctl status` shows what is known of it; `dflashctl start --resume` goes on from the last checkpoint"
    error = DflashError(f"the run is {end.state}", cause=cause, hint=hint)
    return report(error, as_json=False)
