"""One ssh connection to a destination, through its gateways; each command is a channel of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dflashctl.transport.base import Channel, Finding
from remote.protocol.errors import DflashError


class Ssh:
    """A machine behind ssh, `[user@]host[:port]`. Connects on first use. Raises a usage error for a bad destination."""

    def __init__(self, destination: str, *, config_file: str = "") -> None:
        self._destination = destination
        self._config_file = config_file

    @property
    def name(self) -> str:
        """The destination as it was typed."""
        return self._destination

    @property
    def user(self) -> str:
        """Who logs in there, as the destination or the ssh configuration says; nothing is contacted."""
        raise NotImplementedError

    def open(self, argv: Sequence[str]) -> Channel:
        """Start `argv` there. Raises NoAnswer when no connection comes about, one sentence a reason."""
        raise NotImplementedError

    def explain(self, said: str) -> DflashError | None:
        """Return what a shell over there meant when it said `said` and no agent answered."""
        raise NotImplementedError

    def examine(self) -> Iterator[Finding]:
        """Look at the connection and at the host key of each hop."""
        raise NotImplementedError

    def close(self) -> None:
        """End the connection and those to the gateways. Idempotent."""
        raise NotImplementedError
