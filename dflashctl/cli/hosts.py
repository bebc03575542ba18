"""`dflashctl hosts trust`: learn the host keys on the way to a destination, once somebody has compared them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl.cli.options import Common, command
from dflashctl.console import ERR, OUT, harmless
from remote.protocol.codec import dumps
from remote.protocol.errors import DflashError, usage_error

if TYPE_CHECKING:
    from dflashctl.transport.sshtrust import Sighting


@command
def verb(
    common: Common,
    fingerprint: Annotated[
        list[str] | None,
        typer.Option(
            "--fingerprint", metavar="SHA256:...", help="Trust this key without asking; once for each hop that is new."
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Forget the old key of a host whose key has changed.")
    ] = False,
) -> int:
    """Learn the host keys of a destination, gateways first.

    Contacts each hop, shows the type and fingerprint of its key, and adds it to known_hosts if you say so. Compare the
    fingerprint with what `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` says on that machine. Only the gateways are
    logged in to.
    """
    from dflashctl.session import Session
    from dflashctl.transport.sshtrust import sightings, trust

    session = Session.open(common.flags(), verbose=common.verbose)
    host = session.settings["host"]
    if host == "local":
        raise usage_error("this machine has no host key to learn", cause="host is local", hint="name one with --host")
    given = [text if text.startswith("SHA256:") else f"SHA256:{text}" for text in fingerprint or ()]
    learnt: list[dict[str, Any]] = []
    for sighting in sightings(host, session.settings["ssh_config"]):
        if sighting.state == "known":
            ERR.line(harmless(f"{sighting.hop.label}: {sighting.key} is known already, from {sighting.known_from}"))
        else:
            sighting.must_be_replaceable(replace)
            _decide(sighting, given)
            ERR.line(harmless(f"{sighting.hop.label}: added to {trust(sighting)}"))
        learnt.append(sighting.to_json())
    if common.as_json:
        OUT.line(dumps({"host": host, "keys": learnt}))
    return 0


def _decide(sighting: Sighting, given: list[str]) -> None:
    """Return if the key is to be trusted. Raises DflashError if it is not, or if there is nobody to ask."""
    ERR.line(harmless(f"{sighting.hop.label} shows {sighting.key}"))
    for old in sighting.old:
        ERR.line(harmless(f"  before: {old.key} in {old.place}"))
    if given:
        sighting.must_be_one_of(given)
    # Where output is piped or the terminal is dumb nobody expects a question.
    elif not (sys.stdin.isatty() and OUT.live and ERR.live):
        raise usage_error(
            f"nobody can be asked whether to trust {sighting.hop.label}",
            cause=f"this is no terminal, and the key is {sighting.key}",
            hint=f"compare it with the key there, then pass --fingerprint {sighting.key.fingerprint}",
        )
    elif not _is_confirmed():
        raise DflashError(
            f"{sighting.hop.label} is not trusted", cause="the answer was no", hint="nothing was changed in known_hosts"
        )


def _is_confirmed() -> bool:
    ERR.file.write("is this the key of that machine? [y/N] ")
    ERR.file.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
