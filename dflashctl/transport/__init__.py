"""Ways to a destination. Each is a class; a hop holds the next hop."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar
from typing import TYPE_CHECKING

from dflashctl.transport.base import EXPLANATION_SECONDS, Channel, ChannelClosed, Finding, Silence, Transport
from dflashctl.transport.bounded import within

if TYPE_CHECKING:
    from dflashctl.transport.pct import Host

__all__ = [
    "EXPLANATION_SECONDS",
    "Channel",
    "ChannelClosed",
    "Finding",
    "Silence",
    "Transport",
    "connections",
    "make_transport",
]

_CLOSING_SECONDS = 0.5
"""Longest time a connection is given to say good-bye: behind a frozen sshd it would take ten seconds."""

_open: ContextVar[contextlib.ExitStack | None] = ContextVar("open connections", default=None)


@contextlib.contextmanager
def connections() -> Generator[None]:
    """Give back at its end whatever connection was made inside: a verb may end at any place in any way."""
    with contextlib.ExitStack() as stack:
        token = _open.set(stack)
        try:
            yield
        finally:
            _open.reset(token)


def make_transport(host: str, ct: str, ssh_config: str = "") -> Transport:
    """Return the way to container `ct` ("" for none) on `host`. Raises a usage error for a host that can be none."""
    transport = _way(host, ct, ssh_config)
    stack = _open.get()
    if stack is not None:
        stack.callback(within, _CLOSING_SECONDS, transport.close, lambda: None)
    return transport


def _way(host: str, ct: str, ssh_config: str) -> Transport:
    machine = _machine(host, ssh_config)
    if not ct:
        return machine
    from dflashctl.transport.pct import Pct

    return Pct(ct, machine)


def _machine(host: str, ssh_config: str) -> Host:
    # Imported when needed: each costs time that a command for another destination need not spend.
    if host == "local":
        from dflashctl.transport.local import Local

        return Local()
    from dflashctl.transport.ssh import Ssh

    return Ssh(host, config_file=ssh_config)
