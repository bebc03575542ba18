"""Connections to the hops of a route, through fabric and paramiko, with every host key verified before anybody logs in.

fabric alone trusts any host key and waits without bound; so the socket, the check of the key and the login are ours.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fabric  # pyright: ignore[reportMissingTypeStubs]
import paramiko
from paramiko.ssh_exception import ChannelException

from dflashctl.errors import NoAnswer
from dflashctl.transport.bounded import within
from dflashctl.transport.knownhosts import (
    Entry,
    HostKey,
    Trusted,
    Verdict,
    judge,
    preferred_algorithms,
    read_known_hosts,
    read_revoked_keys,
)
from dflashctl.transport.sshchannel import LOST
from dflashctl.transport.sshconfig import Hop
from dflashctl.transport.sshkeys import KeyLogin
from dflashctl.transport.sshline import Line, Patience, dial
from dflashctl.transport.sshsentences import lost, no_handshake, refused
from remote.protocol.errors import DflashError

# 60 MB/s and more need the ciphers that come with their own checksum, and windows that outlast a round trip.
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
_WINDOW = 4 << 20
_PACKET = 1 << 15
_CLOSE_PATIENCE = 1.0


class _KeySeen(Exception):
    """Ends a connection once the host key is known."""


@dataclass(frozen=True)
class Verified:
    """A hop, the key that it showed, and the line of known_hosts that vouches for it."""

    hop: Hop
    key: HostKey
    trusted: Trusted


class Link:
    """Connections to the hops added so far, the nearest first; each is carried by the one before. Use from one thread.

    `destination` is what the operator writes behind --host to reach the last hop, for the hints. `dialled` is a line to the
    first hop, where there is one already, with its patience.
    """

    def __init__(self, destination: str, patience: Patience | None = None, dialled: Line | None = None) -> None:
        self.patience = patience or Patience(_CLOSE_PATIENCE)
        self.verified: list[Verified] = []
        self._destination = destination
        self._connections: list[Any] = []
        self._lines: list[Line] = []
        self._dialled = dialled
        silence_paramiko()

    def add(self, hop: Hop) -> None:
        """Connect to `hop` through the ones added before, verify its host key, log in. Raises NoAnswer."""

        def check(key: HostKey) -> None:
            verdict = look_up(hop, key)
            if not isinstance(verdict, Trusted):
                raise refused(hop, key, verdict, self._destination)
            self.verified.append(Verified(hop, key, verdict))

        connection, line = self._open(hop, check)
        self._connections.append(connection)
        self._lines.append(line)

    def host_key(self, hop: Hop) -> HostKey:
        """Return the key that `hop` shows, whatever is known of it; nobody logs in there. Raises NoAnswer."""
        seen: list[HostKey] = []

        def look(key: HostKey) -> None:
            seen.append(key)
            raise _KeySeen

        with contextlib.suppress(_KeySeen):
            self._open(hop, look)
        return seen[0]

    def start(self, command: str) -> paramiko.Channel:
        """Start `command` at the last hop, without a terminal. Raises NoAnswer."""
        hop, transport = self.verified[-1].hop, self._transport(-1)
        self.patience.seconds = hop.timeout
        try:
            channel = transport.open_session(timeout=hop.timeout)
        except ChannelException as error:
            raise NoAnswer(
                f"{hop.label} opens no further session on this connection",
                cause=error.text,
                hint="raise MaxSessions in its sshd_config, or wait until another command of this client has ended",
            ) from error
        except Exception as error:
            raise lost(hop, error, "while a session was opened") from error

        def too_slow() -> None:
            raise lost(hop, TimeoutError(), "while a command was started")

        try:
            # exec_command waits for its answer without bound; whatever waits here ends when the link is closed.
            within(hop.timeout, lambda: channel.exec_command(command), too_slow)
        except DflashError:
            raise
        except Exception as error:
            if not self.is_alive:
                raise lost(hop, error, "while a command was started") from error
            raise NoAnswer(
                f"{hop.label} lets {hop.user} in but runs no command",
                cause=str(error) or "it refused the request",
                hint="this account may be restricted there (ForceCommand, a key bound to something else)",
            ) from error
        return channel

    @property
    def is_alive(self) -> bool:
        """Whether no hop is known to be gone; a frozen one is not."""
        return all(self._transport(index).is_active() for index in range(len(self._connections)))

    @property
    def server(self) -> str:
        """The name and version that the last hop's sshd gives itself."""
        return self._transport(-1).remote_version.removeprefix("SSH-2.0-")

    def close(self) -> None:
        """End all connections, the farthest first; waits a bounded time."""
        self.patience.seconds = _CLOSE_PATIENCE
        # fabric leaves gateways open.
        while self._connections:
            _end(self._connections.pop())
            self._lines.pop().close()

    def _transport(self, index: int) -> paramiko.Transport:
        return self._connections[index].transport

    def _open(self, hop: Hop, check: Callable[[HostKey], None]) -> tuple[Any, Line]:
        self.patience.seconds = hop.timeout
        line = self._line(hop)
        began = time.monotonic()
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(line.close)
            connection = _connection(hop, line, check)
            on_failure.callback(_end, connection)
            try:
                connection.open()
            except (DflashError, _KeySeen):
                raise
            # Whatever paramiko's thread stumbled over is raised here: a garbled byte may be a ValueError or an InvalidTag.
            except Exception as error:
                transport: paramiko.Transport | None = connection.client.get_transport()
                version, seconds = transport.remote_version if transport else "", time.monotonic() - began
                raise no_handshake(hop, error, version, seconds, line.trouble()) from error
            on_failure.pop_all()
        return connection, line

    def _line(self, hop: Hop) -> Line:
        if not self._connections:
            line, self._dialled = self._dialled, None
            return line or dial(hop, self.patience)
        gateway = self.verified[-1].hop
        try:
            channel = self._transport(-1).open_channel(
                "direct-tcpip", (hop.host, hop.port), ("", 0), timeout=hop.timeout
            )
        except ChannelException as error:
            raise NoAnswer(
                f"{gateway.label} cannot connect to {hop.place}",
                cause=error.text.lower(),
                hint="check that address as seen from there, and AllowTcpForwarding in the sshd_config of the gateway",
            ) from error
        except Exception as error:
            raise lost(gateway, error, f"while it connected to {hop.place}") from error
        return Line(channel, self.patience)


def silence_paramiko() -> None:
    """Keep paramiko's threads from writing their tracebacks to stderr, unless somebody asked for them with a handler."""
    logger = logging.getLogger("paramiko")
    if not logger.handlers:
        # With no handler at all, logging writes warnings to stderr by itself.
        logger.addHandler(logging.NullHandler())


def look_up(hop: Hop, key: HostKey) -> Verdict:
    """Say what the operator's files make of the key that `hop` showed. Raises NoAnswer for a file that cannot be read."""
    revoked = read_revoked_keys(hop.revoked_keys, key)
    return revoked or judge(_entries(hop), hop.key_name, key)


def _entries(hop: Hop) -> list[Entry]:
    return read_known_hosts((*hop.known_hosts, *hop.global_known_hosts))


def _connection(hop: Hop, line: Line, check: Callable[[HostKey], None]) -> Any:
    """Return a fabric connection over `line` that is not open yet."""
    algorithms = preferred_algorithms(_entries(hop), hop.key_name)

    def make_transport(sock: Line, **options: Any) -> paramiko.Transport:
        transport = paramiko.Transport(
            sock,  # pyright: ignore[reportArgumentType]  # as good as a socket
            default_window_size=_WINDOW,
            default_max_packet_size=_PACKET,
            **options,
        )
        transport.handshake_timeout = transport.clear_to_send_timeout = hop.timeout
        known: Any = transport.get_security_options()
        known.ciphers = _CIPHERS
        plain = [kind for kind in known.key_types if "-cert-" not in kind]
        known.key_types = [*(kind for kind in algorithms if kind in plain), *(k for k in plain if k not in algorithms)]
        return transport

    # lazy and an empty SSHConfig: neither ~/.fabric.yml nor ~/.ssh/config has a say beyond what the hop says.
    config = fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig())
    times = dict.fromkeys(("timeout", "banner_timeout", "auth_timeout", "channel_timeout"), hop.timeout)
    options = {"sock": line, "transport_factory": make_transport, "auth_strategy": KeyLogin(hop), **times}
    connection: Any = fabric.Connection(
        hop.host,
        user=hop.user,
        port=hop.port,
        config=config,
        gateway=False,
        forward_agent=False,
        connect_kwargs=options,
    )
    connection.client.set_missing_host_key_policy(_Policy(check))
    return connection


class _Policy(paramiko.MissingHostKeyPolicy):
    """Asks our own reading of known_hosts: paramiko's is never loaded, so that every key comes here."""

    def __init__(self, check: Callable[[HostKey], None]) -> None:
        self._check = check

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        self._check(HostKey(key.get_name(), key.asbytes()))


def _end(connection: Any) -> None:
    transport: paramiko.Transport | None = connection.client.get_transport()
    if transport is not None:
        # Its timer for the handshake is no daemon: the process would wait for it at its end.
        packetizer: Any = transport.packetizer
        packetizer.complete_handshake()
    with contextlib.suppress(*LOST):
        connection.client.close()
