"""`dflashctl hosts list`: the destinations that were deployed to."""

from __future__ import annotations

from dflashctl.cli.options import Common, command
from dflashctl.console import OUT, one_line
from remote.protocol.codec import dumps


@command
def verb(common: Common) -> int:
    """List the destinations that dflashctl remembers; verbs without --host use the one that is marked."""
    from dflashctl.session import Session
    from dflashctl.views import table

    remembered = Session.open(common.flags(), verbose=common.verbose).store.load()
    if common.as_json:
        OUT.line(dumps(remembered))
        return 0
    if not remembered.known:
        OUT.line("no destination yet; `dflashctl deploy --host HOST` remembers one")
        return 0
    rows = [
        [
            "*" if known.key == remembered.current else "",
            *map(one_line, (known.host, known.ct, known.root, known.release)),
        ]
        for known in remembered.known
    ]
    for line in table(("", "host", "ct", "root", "release"), rows, OUT):
        OUT.line(line)
    return 0
