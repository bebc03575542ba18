"""Ways to a destination. Each is a class; a hop holds the next hop."""

from __future__ import annotations

from dflashctl.transport.base import Channel, ChannelClosed, Finding, Silence, Transport
from remote.protocol.errors import usage_error

__all__ = ["Channel", "ChannelClosed", "Finding", "Silence", "Transport", "make_transport"]


def make_transport(host: str, ct: str) -> Transport:
    """Return the way to container `ct` ("" for none) on `host`. Raises a usage error for a host it cannot reach."""
    if host == "local":
        from dflashctl.transport.local import Local

        return Local()
    raise usage_error(
        f"cannot reach {host}{f', container {ct}' if ct else ''}",
        cause="this version of dflashctl reaches the local machine only",
        hint="use --host local",
    )
