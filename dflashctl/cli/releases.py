"""`dflashctl releases`: what was deployed over there."""

from __future__ import annotations

import time

from dflashctl.cli.options import Common, command
from dflashctl.console import OUT
from remote.protocol.codec import dumps


@command
def verb(common: Common) -> int:
    """List the releases over there."""
    from dflashctl.session import Session
    from dflashctl.views import table

    session = Session.open(common.flags(), verbose=common.verbose)
    result = session.client.releases()
    if common.as_json:
        OUT.line(dumps(result))
        return 0
    if not result.releases:
        OUT.line(f"no release yet on {session.label}; `dflashctl deploy` ships one")
        return 0
    rows = [
        [
            "*" if entry.release == result.current else "",
            entry.release,
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.deployed)),
        ]
        for entry in result.releases
    ]
    for line in table(("", "release", "deployed"), rows, OUT):
        OUT.line(line)
    return 0
