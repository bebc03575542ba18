"""`dflashctl doctor`: is everything there that a start needs, from the ssh connection to the data's columns."""

from __future__ import annotations

from typing import Annotated

import typer

from dflashctl.cli.options import Common, command
from dflashctl.console import OUT, width
from remote.protocol.codec import dumps


@command
def verb(
    common: Common,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="Training configuration (TOML, flat keys).")
    ] = None,
) -> int:
    """Look at everything that a start needs, and say what is missing and how to get it.

    One line each: ssh, host key, pct, container, python and packages, GPUs and who holds them, the target's directory,
    memory, data, space, time of a call. It looks with the configuration that `start` would use now, starts nothing and
    changes nothing. Exits with 0 when no line failed, else with the code of the first that did: 8 when the far end
    could not be reached, 7 when it lacks something.
    """
    from dflashctl.doctor import Examination, as_json, exit_code, finding_lines
    from dflashctl.session import Session
    from dflashctl.talk import Talk
    from dflashctl.transport import Finding

    session = Session.open(common.flags() | {"config": config}, verbose=common.verbose)
    examination = Examination(session, Talk())
    findings: list[Finding] = []
    for finding in examination:
        findings.append(finding)
        if not common.as_json:
            for line in finding_lines(finding, OUT, width()):
                OUT.line(line)
    if common.as_json:
        OUT.line(dumps(as_json(findings, examination.training)))
    return int(exit_code(findings))
