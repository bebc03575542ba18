"""One ssh connection to a destination, through its gateways; each command is a channel of it."""

from __future__ import annotations

import re
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from dflashctl.errors import NoAnswer, NoProgram
from dflashctl.transport.base import Channel, Finding
from dflashctl.transport.sshconfig import Hop, behind_host, parse_destination, resolve
from dflashctl.transport.sshline import Patience, dial
from remote.protocol.errors import DflashError

if TYPE_CHECKING:
    from dflashctl.transport.sshlink import Link

# sshd allows 10 sessions a connection (MaxSessions).
_MOST_CHANNELS = 8
# What shells say (bash, dash, zsh, busybox) of a program that is not there.
_NOT_FOUND = re.compile(
    r"^.*?(?P<program>[^\s:]+): (?:command not found|not found|No such file or directory|Permission denied)\s*$"
    r"|^zsh:\d+: (?:command not found|no such file or directory): (?P<zsh>\S+)\s*$",
    re.MULTILINE,
)
_NO_LOGIN = re.compile(r"This account is currently not available|nologin|account has expired", re.IGNORECASE)


class Ssh:
    """A machine behind ssh, `[user@]host[:port]`. Connects on first use, and again after a connection was lost.

    `config_file` takes the place of the user's and the system's ssh configuration. Raises a usage error for a destination
    that can be none.
    """

    def __init__(self, destination: str, *, config_file: str = "") -> None:
        parse_destination(destination)
        self._destination = destination
        self._config_file = config_file
        self._link: Link | None = None
        self._seconds = 0.0
        self._channels: set[object] = set()
        # A link whose far end fell silent: it may be frozen, which nothing tells but another silence.
        self._is_suspect = False
        # Two threads that connect at once would each get half a connection.
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The destination as it was typed."""
        return self._destination

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """The machines on the way, the nearest first; nothing is contacted. Raises a usage error."""
        return resolve(self._destination, self._config_file)

    @property
    def user(self) -> str:
        """Who logs in there, as the destination or the ssh configuration says; nothing is contacted."""
        return self.hops[-1].user

    def open(self, argv: Sequence[str]) -> Channel:
        """Start `argv` there. Raises NoAnswer when no connection comes about, one sentence a reason."""
        # The login shell over there parses the line once; this is the one place that quotes for it.
        command = shlex.join(argv)
        if "\0" in command:
            raise ValueError("embedded null byte in an argument")
        from dflashctl.transport.sshchannel import SshChannel

        with self._lock:
            if len(self._channels) >= _MOST_CHANNELS:
                raise NoAnswer(
                    f"{_MOST_CHANNELS} commands run on {self.name} at once",
                    cause="its sshd allows 10 sessions a connection, and a few are left for others",
                    hint="wait until one of them has ended",
                )
            link = self._connected()
            try:
                channel = link.start(command)
            except NoAnswer:
                # With other commands on it the connection may be refused one more session, and is kept.
                if not self._channels:
                    self._drop()
                raise
            self._channels.add(channel)
        # discard, not a count: channels may end in several threads at once.
        return SshChannel(channel, link.patience, self._suspect, lambda: self._channels.discard(channel))

    def _connected(self) -> Link:
        if self._link is not None and (not self._link.is_alive or (self._is_suspect and not self._channels)):
            self._drop()
        if self._link is None:
            self._link = self._connect()
        return self._link

    def _connect(self) -> Link:
        hops = self.hops
        patience = Patience(hops[0].timeout)
        began = time.monotonic()
        # Before fabric and paramiko are imported, which takes 0.15 s: the far end says its first words meanwhile (a round
        # trip, and 12 ms for the fork of its sshd).
        line = dial(hops[0], patience)
        dialled = time.monotonic() - began
        from dflashctl.transport.sshlink import Link

        began = time.monotonic() - dialled
        link = Link(behind_host(self._destination, self._config_file), patience, line)
        try:
            for hop in hops:
                link.add(hop)
        except BaseException:
            link.close()
            raise
        self._seconds = time.monotonic() - began
        return link

    def _suspect(self) -> None:
        self._is_suspect = True

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None
        self._is_suspect = False

    def explain(self, said: str, *, silent: bool = False) -> DflashError | None:
        """Return what a login shell over there meant when it said `said` and no agent answered."""
        if _NO_LOGIN.search(said):
            return NoAnswer(
                f"{self.user} may log in on {self.name}, but runs nothing there",
                cause=said[-200:],
                hint="name another user: --host USER@HOST",
            )
        found = _NOT_FOUND.search(said)
        if found is None:
            return None
        program = found["program"] or found["zsh"]
        return NoProgram(
            f"{self.name} has no program {program}",
            cause=found[0].strip(),
            hint="name a Python 3.11 or newer there with --python PATH",
        )

    def examine(self) -> Iterator[Finding]:
        """Look at the connection and at the host key of each hop."""
        # Not at the top of the module: it imports paramiko.
        from dflashctl.transport.sshsentences import HostKeyRefused

        try:
            with self._lock:
                link = self._connected()
        except DflashError as error:
            name = "host key" if isinstance(error, HostKeyRefused) else "ssh"
            yield Finding(name, "failed", f"{error.error}: {error.cause}", error.hint, error.code)
            return
        last = self.hops[-1]
        way = "".join(f" through {hop.place}" for hop in self.hops[:-1])
        seconds = f"connected in {self._seconds:.2f} s"
        yield Finding("ssh", "ok", f"{last.user}@{last.place}{way}, {seconds}, {link.server}")
        keys = [f"{seen.key}, known from {seen.trusted.entry.place}" for seen in link.verified]
        gateways = [f"; {seen.hop.label}: {key}" for seen, key in zip(link.verified[:-1], keys[:-1], strict=True)]
        yield Finding("host key", "ok", keys[-1] + "".join(gateways))

    def close(self) -> None:
        """End the connection and those to the gateways. Idempotent."""
        with self._lock:
            self._drop()
