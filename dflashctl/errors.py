"""How a failure reaches the person at the keyboard, and the failures that only the operator's side can see."""

from __future__ import annotations

import sys

from dflashctl.console import ERR, OUT, harmless
from remote.protocol.codec import dumps
from remote.protocol.errors import DflashError, ExitCode


class NoAnswer(DflashError):
    """The far end could not be asked, or did not answer (exit code 8)."""

    def __init__(self, error: str, *, cause: str = "", hint: str = "") -> None:
        super().__init__(error, cause=cause, hint=hint, code=ExitCode.NO_ANSWER)


class NoProgram(NoAnswer):
    """The destination was reached, and has no such program: the first word of an argv is no executable file there."""


class ConnectionLost(NoAnswer):
    """The answer broke off after the far end had begun to speak: asking again is worth while."""


def report(error: DflashError, *, as_json: bool) -> int:
    """Show `error` as three lines on stderr, and with `as_json` as one object on stdout; return its exit code."""
    for line in error.render().splitlines():
        key, colon, rest = line.partition(":")
        ERR.line(ERR.style(key + colon, "red bold" if key == "error" else "dim") + harmless(rest))
    # The traceback or the last log lines that the far end sent along.
    for line in error.detail.rstrip().splitlines():
        ERR.line("  " + harmless(line))
    if as_json:
        OUT.line(dumps(error.to_json()))
    return int(error.code)


def report_bug(error: BaseException) -> int:
    """Show an exception that is nobody's fault but ours, without its traceback; return the exit code."""
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    place = "" if where is None else f" ({where.tb_frame.f_globals.get('__name__')}:{where.tb_lineno})"
    return report(
        DflashError(
            f"this is a bug in dflashctl: {type(error).__name__}: {error}",
            cause=f"an exception nobody foresaw{place}, under Python {sys.version.split()[0]}",
            hint="run the same command with --debug for the traceback and report it",
        ),
        as_json=False,
    )
