"""The bytes below an ssh connection: a TCP socket, a proxy command, or a channel of the gateway before; every wait ends."""

from __future__ import annotations

import contextlib
import errno
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO, Any, Protocol

from dflashctl.errors import NoAnswer
from dflashctl.transport.bounded import within
from dflashctl.transport.sshconfig import Hop, expand

_PROXY_WORDS = 500
_PROXY_PATIENCE = 1.0
"""Seconds a proxy command gets to end by itself once its connection is closed."""


_Addresses = list[tuple[socket.AddressFamily, Any]]


class Socket(Protocol):
    """What paramiko asks of a socket."""

    def send(self, data: bytes, /) -> int: ...
    def recv(self, size: int, /) -> bytes: ...
    def settimeout(self, seconds: float | None, /) -> None: ...
    def close(self) -> None: ...


class Patience:
    """How long a send may make no progress; one for all lines of a route, for each carries the next."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class Line:
    """A socket as paramiko wants one, on which a send that makes no progress fails.

    paramiko itself tries for ever: with a frozen far end and full buffers neither a channel's time-out nor close would help.
    """

    def __init__(self, inner: Socket, patience: Patience) -> None:
        self._inner = inner
        self._patience = patience
        self._stuck_since: float | None = None
        # paramiko looks for this name, which its own channels have.
        self._closed = False

    def send(self, data: bytes) -> int:
        try:
            sent = self._inner.send(data)
        except TimeoutError:
            now = time.monotonic()
            self._stuck_since = self._stuck_since or now
            if now - self._stuck_since < self._patience.seconds:
                raise
            # Half a packet may be out: nothing sensible can follow it.
            self.close()
            raise OSError(errno.ETIMEDOUT, "the far end takes nothing more") from None
        self._stuck_since = None
        return sent

    def recv(self, size: int) -> bytes:
        return self._inner.recv(size)

    def settimeout(self, seconds: float | None) -> None:
        self._inner.settimeout(seconds)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            # A gateway that was cut has nothing left to close.
            with contextlib.suppress(OSError, EOFError):
                self._inner.close()

    def trouble(self) -> str:
        """Return what whoever carries this line said about its end, "" where nothing carries it."""
        return ""


class ProxyLine(Line):
    """A line through a process on this machine, which ends with it."""

    def __init__(
        self, inner: Socket, patience: Patience, process: subprocess.Popen[bytes], said: IO[bytes], command: str
    ) -> None:
        super().__init__(inner, patience)
        self._process = process
        self._said = said
        self._command = command
        self._trouble = ""
        self._is_over = False
        # paramiko's thread closes the line as well as ours.
        self._lock = threading.Lock()

    def send(self, data: bytes) -> int:
        try:
            return super().send(data)
        except ConnectionError:
            self._is_over = True
            raise

    def recv(self, size: int) -> bytes:
        data = super().recv(size)
        self._is_over = not data
        return data

    def trouble(self) -> str:
        self.close()
        return self._trouble

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            # Only a process that hung up first has a reason of its own; one that we hang up on complains of us.
            if self._is_over:
                self._await_end()
            if self._process.poll() is not None:
                self._said.seek(0)
                words = self._said.read()[-_PROXY_WORDS:].decode("utf-8", "replace").strip()
                self._trouble = f"{self._command}: {words or f'it ended with code {self._process.returncode}'}"
            super().close()
            self._said.close()
            self._await_end()
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()

    def _await_end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PROXY_PATIENCE)


def dial(hop: Hop, patience: Patience) -> Line:
    """Connect to the first hop. Raises NoAnswer with a sentence for each reason."""
    if hop.proxy_command:
        return _start_proxy(hop, patience)
    deadline = time.monotonic() + hop.timeout
    addresses = _addresses(hop)
    error: OSError = OSError("it has no address")
    for index, (family, address) in enumerate(addresses):
        # A share of what is left for each, so that a dead IPv6 route leaves time for IPv4.
        share = max((deadline - time.monotonic()) / (len(addresses) - index), 0.1)
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(share)
            connection.connect(address)
        except OSError as failed:
            connection.close()
            error = failed
            continue
        # Nagle's algorithm waits for an answer to each small packet: a remote `true` took 44 ms with it, 2.3 ms without.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Line(connection, patience)
    raise _not_connected(hop, error)


def _addresses(hop: Hop) -> _Addresses:
    def unresolved(cause: str) -> NoAnswer:
        return NoAnswer(
            f"the host name {hop.host} cannot be resolved",
            cause=cause,
            hint="check the name given with --host, and the network (VPN?) of this machine",
        )

    def too_slow() -> _Addresses:
        raise unresolved(f"no name server answered within {hop.timeout:.0f} s")

    def look_up() -> _Addresses:
        found = socket.getaddrinfo(hop.host, hop.port, type=socket.SOCK_STREAM)
        return [(family, address) for family, _, _, _, address in found]

    try:
        # The resolver has time-outs of its own, 5 s an attempt and server, and takes no other.
        return within(hop.timeout, look_up, too_slow)
    except (OSError, UnicodeError) as error:
        raise unresolved(str(error.args[-1])) from None


def _not_connected(hop: Hop, error: OSError) -> NoAnswer:
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return NoAnswer(
            f"no connection to {hop.label}",
            cause=f"it did not answer within {hop.timeout:.0f} s",
            hint="check that it is on, that the port is right, and that no firewall is between",
        )
    if error.errno == errno.ECONNREFUSED:
        return NoAnswer(
            f"{hop.label} refuses the connection",
            cause=f"nothing listens on port {hop.port} there",
            hint="check that sshd runs, and the port: --host HOST:PORT",
        )
    return NoAnswer(
        f"{hop.label} cannot be reached",
        cause=error.strerror or str(error),
        hint="check the network (VPN?) of this machine, and the address",
    )


def _start_proxy(hop: Hop, patience: Patience) -> Line:
    if sys.platform == "win32":
        raise NoAnswer(
            f"{hop.label} is reached by a ProxyCommand, which dflashctl cannot use on Windows",
            cause=hop.proxy_command,
            hint="use ProxyJump in the ssh configuration",
        )
    tokens = {"h": hop.host, "p": str(hop.port), "r": hop.user, "n": hop.host, "%": "%"}
    ours, theirs = socket.socketpair()
    said = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the connection
    try:
        # Split before anything is put in, and never through a shell: a name cannot become a command.
        words = [expand(word, tokens) for word in shlex.split(hop.proxy_command)]
        words = words[1:] if words[:1] == ["exec"] else words
        # A session of its own: Ctrl-C at the terminal interrupts this client, never its connection in mid-request.
        process = subprocess.Popen(
            words, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=said, start_new_session=True
        )
    except (OSError, IndexError, ValueError) as error:
        ours.close()
        said.close()
        raise NoAnswer(
            f"the ProxyCommand for {hop.label} cannot be run",
            cause=f"{hop.proxy_command}: {error}",
            hint="dflashctl runs it without a shell: write `sh -c '...'` where it needs one",
        ) from error
    finally:
        theirs.close()
    return ProxyLine(ours, patience, process, said, hop.proxy_command)
