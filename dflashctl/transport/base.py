"""The seam between the client and whatever carries its bytes: a Transport opens Channels.

A hop is a Transport that holds the next one and rewrites the argv, e.g. `Pct(200, Ssh("root@10.1.2.6"))`; nothing above
this module knows how many hops there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from remote.protocol.errors import DflashError, ExitCode

EXPLANATION_SECONDS = 3.0
"""Longest time an explanation may take: with two calls of `pct` (0.5 to 1 s each) an answer is still worth the wait."""


class Silence(Exception):
    """Nothing moved within the time-out."""


class ChannelClosed(Exception):
    """The far end no longer reads; what it had to say may still be received."""


@dataclass(frozen=True)
class Finding:
    """One line of `doctor`: what was looked at, how it stands, and the way out where it is wrong.

    `code` is the exit code of a doctor whose first failed line this is.
    """

    name: str
    state: Literal["ok", "warning", "failed"]
    text: str
    hint: str = ""
    code: ExitCode = ExitCode.NO_ANSWER


class Channel(Protocol):
    """One running command: bytes in, bytes out, every wait with a time-out in seconds."""

    def send(self, data: bytes, timeout: float) -> None:
        """Send all of `data`. Raises Silence when nothing moved for `timeout`, ChannelClosed when nobody reads."""
        ...

    def finish(self) -> None:
        """Tell the far end that no more input comes."""
        ...

    def receive(self, timeout: float) -> bytes:
        """Return the next bytes, b"" at the end. Raises Silence."""
        ...

    def diagnostics(self) -> str:
        """Return the last of what came on stderr: what was said where an answer was expected."""
        ...

    def close(self) -> None:
        """End the channel and whatever carries it on this machine. Idempotent; waits a bounded time."""
        ...


class Transport(Protocol):
    """A way to run commands at a destination."""

    @property
    def name(self) -> str:
        """The destination as a person would call it, e.g. "local" or "container 200 on 10.1.2.6"."""
        ...

    def open(self, argv: Sequence[str]) -> Channel:
        """Start `argv` (ASCII) there. Raises NoAnswer when the destination cannot be reached or has no such program."""
        ...

    def explain(self, said: str, *, silent: bool = False) -> DflashError | None:
        """Return what `said`, the last words of a command that never answered, means; None for words of no hop.

        `silent`: the command did not end, nothing more came of it. Only asked after a failure, so it may ask a hop about
        its state (`pct status`) at the price of a call; takes EXPLANATION_SECONDS at most.
        """
        ...

    def examine(self) -> Iterator[Finding]:
        """Look at each hop, the nearest first; ends after a hop that failed, for nothing behind it can be seen."""
        ...

    def close(self) -> None:
        """Give connections back. Idempotent."""
        ...
