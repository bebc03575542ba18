"""The messages of one (target, drafter) pair: which slot is ready, which is free, and goodbye.

One SOCK_SEQPACKET socket per pair: messages stay whole, and the kernel tells at once when the peer dies. BYE ends a stream on
purpose (end of data, stop); end of file without BYE means that the peer is dead.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from trainer.pipeline.pulse import Pulse

_MESSAGE = struct.Struct("<IIQ")


class MessageKind(IntEnum):
    """What a message says about its slot."""

    READY = 1
    FREE = 2
    BYE = 3


@dataclass(frozen=True)
class SlotMessage:
    """One message: u32 kind, u32 slot, u64 batch."""

    kind: MessageKind
    slot: int = 0
    batch: int = 0

    def pack(self) -> bytes:
        return _MESSAGE.pack(self.kind, self.slot, self.batch)

    @classmethod
    def unpack(cls, data: bytes) -> SlotMessage:
        """Parse a message. Raises ValueError when it is none."""
        if len(data) != _MESSAGE.size:
            raise ValueError(f"message of {len(data)} bytes")
        kind, slot, batch = _MESSAGE.unpack(data)
        return cls(MessageKind(kind), slot, batch)


class PeerDied(Exception):
    """The process at the other end of a pair ended without saying goodbye. `rank`: its global rank, None if unknown."""

    def __init__(self, peer: str, rank: int | None = None) -> None:
        super().__init__(peer)
        self.rank = rank


class PairChannel:
    """A connected pair socket. `rank` is the peer's; `pulse` is told of every wait for it."""

    def __init__(
        self, connection: socket.socket, peer: str, *, rank: int | None = None, pulse: Pulse | None = None
    ) -> None:
        self._socket = connection
        self._peer_left = False
        self._pulse = pulse or Pulse()
        self.peer = peer
        self.rank = rank

    def send(self, message: SlotMessage) -> None:
        """Send a message. Raises PeerDied."""
        try:
            self._socket.send(message.pack())
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerDied(self.peer, self.rank) from error

    def receive(self) -> SlotMessage:
        """Wait for the next message. Raises PeerDied at the end of the stream."""
        try:
            with self._pulse.waiting(self.peer):
                data = self._socket.recv(_MESSAGE.size + 1)
        except ConnectionResetError as error:
            raise PeerDied(self.peer, self.rank) from error
        return self._parse(data)

    def poll(self) -> SlotMessage | None:
        """Return a message that has already arrived, None when there is none. Raises PeerDied."""
        try:
            data = self._socket.recv(_MESSAGE.size + 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionResetError as error:
            raise PeerDied(self.peer, self.rank) from error
        return self._parse(data)

    def _parse(self, data: bytes) -> SlotMessage:
        if not data:
            raise PeerDied(self.peer, self.rank)
        message = SlotMessage.unpack(data)
        self._peer_left = self._peer_left or message.kind is MessageKind.BYE
        return message

    def say_goodbye(self) -> None:
        """Send BYE; a peer that is gone already needs none."""
        try:
            self.send(SlotMessage(MessageKind.BYE))
        except PeerDied:
            return

    def wait_goodbye(self) -> None:
        """Read until the peer's BYE; what is still on its way is of no use any more.

        A BYE that a working thread read counts: two ends that both read on for a second one would wait for ever.
        """
        try:
            while not self._peer_left:
                self.receive()
        except PeerDied:
            return

    def close(self) -> None:
        self._socket.close()


def listen(address: Path) -> socket.socket:
    """Return a socket that waits for the one peer of a pair."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(address))
    listener.listen(1)
    return listener


def accept(
    listener: socket.socket, peer: str, timeout: float, *, rank: int | None = None, pulse: Pulse | None = None
) -> PairChannel:
    """Accept the peer and close the listener. Raises TimeoutError after `timeout` seconds."""
    pulse = pulse or Pulse()
    with listener, pulse.waiting(peer):
        listener.settimeout(timeout)
        connection, _ = listener.accept()
    connection.setblocking(True)
    return PairChannel(connection, peer, rank=rank, pulse=pulse)


def connect(
    address: Path, peer: str, timeout: float, *, rank: int | None = None, pulse: Pulse | None = None
) -> PairChannel:
    """Connect to a peer that may not listen yet. Raises TimeoutError after `timeout` seconds."""
    pulse = pulse or Pulse()
    deadline = time.monotonic() + timeout
    with pulse.waiting(peer):
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(str(address))
                return PairChannel(connection, peer, rank=rank, pulse=pulse)
            except (FileNotFoundError, ConnectionRefusedError):
                connection.close()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{peer} does not listen after {timeout:.0f} s") from None
                time.sleep(0.02)
