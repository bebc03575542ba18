"""Ways to a destination. Each is a class; a hop holds the next hop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflashctl.transport.base import EXPLANATION_SECONDS, Channel, ChannelClosed, Finding, Silence, Transport

if TYPE_CHECKING:
    from dflashctl.transport.pct import Host

__all__ = ["EXPLANATION_SECONDS", "Channel", "ChannelClosed", "Finding", "Silence", "Transport", "make_transport"]


def make_transport(host: str, ct: str, ssh_config: str = "") -> Transport:
    """Return the way to container `ct` ("" for none) on `host`. Raises a usage error for a host that can be none."""
    hop = _machine(host, ssh_config)
    if not ct:
        return hop
    from dflashctl.transport.pct import Pct

    return Pct(ct, hop)


def _machine(host: str, ssh_config: str) -> Host:
    # Imported when needed: each costs time that a command for another destination need not spend.
    if host == "local":
        from dflashctl.transport.local import Local

        return Local()
    from dflashctl.transport.ssh import Ssh

    return Ssh(host, config_file=ssh_config)
