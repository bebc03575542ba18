"""`dflashctl releases`: what was deployed over there."""

from __future__ import annotations

from typing import Any

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
    entries: list[dict[str, Any]] = result.get("releases", [])
    if not entries:
        OUT.line(f"no release yet on {session.label}; `dflashctl deploy` ships one")
        return 0
    current = result.get("current")
    rows = [["*" if entry["release"] == current else "", str(entry["release"])] for entry in entries]
    for line in table(("", "release"), rows, OUT):
        OUT.line(line)
    return 0
